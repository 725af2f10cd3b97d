"""The names, shapes and dtypes of a model's inputs and outputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sparkdl.errors import ModelError
from sparkdl.learner.framework import overlaid
from sparkdl.learner.preprocessing import ROW, Preprocessing, preprocessor_of, space_of

if TYPE_CHECKING:
    import keras

LabelKind = Literal["sparse", "binary", "dense", "own"]
"""What labels a loss takes: class numbers; numbers in [0, 1] or any numbers, both of the output's
shape; or (a user's own, ``CTC``, ``Circle``) of a shape that only the loss knows."""
_BINARY = ("binarycrossentropy", "binaryfocalcrossentropy")
_SHARES, _AMOUNTS, _SIDES = (0.0, 1.0), (0.0, math.inf), (-1.0, 1.0)
_RANGES = {
    "kldivergence": _SHARES, "dice": _SHARES, "tversky": _SHARES, "categoricalhinge": _SHARES,
    "poisson": _AMOUNTS, "meansquaredlogarithmicerror": _AMOUNTS,
    "categoricalcrossentropy": _AMOUNTS, "categoricalfocalcrossentropy": _AMOUNTS,
    "hinge": _SIDES, "squaredhinge": _SIDES,
}  # fmt: skip
"""The labels that a loss of Keras has a meaning for. Others it cuts off (``kl_divergence``), or has
no least value for, so that training goes to minus infinity (``poisson``)."""
_OF_CLASSES = frozenset({
    "categoricalcrossentropy", "categoricalfocalcrossentropy", "categoricalhinge", "kldivergence",
    "dice", "tversky",
})  # fmt: skip
"""The losses of Keras that compare a vector with one place for each class."""
_OF_NUMBERS = frozenset({
    "meansquarederror", "meanabsoluteerror", "meanabsolutepercentageerror",
    "meansquaredlogarithmicerror", "cosinesimilarity", "huber", "logcosh", "hinge", "squaredhinge",
    "poisson", *_BINARY,
})  # fmt: skip
"""Those that compare numbers, one for each unit. Labels of any other loss stay as they are."""
_STEPS = ("train_step", "test_step", "compute_loss", "compute_metrics")
"""The methods of ``keras.Model`` that see labels."""
_OF_BOTH = ("Hashing", "HashedCrossing")
"""Layers that take texts and whole numbers."""
_OF_TEXTS = ("TextVectorization", "StringLookup", *_OF_BOTH)
_MOST_TRIED = 64
"""Ways to give a subclassed model symbols of numbers and texts that are tried at most."""
AS_GIVEN = "as given"
"""The dtype of rows that a preprocessor takes, which may be numbers of any kind, or texts."""
LABEL = "label of all outputs"
"""Stands for an output's name where one label goes, as it is, to code of the user's own."""
Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: per-row ``shape`` (None where free; None as a whole if unknown).

    An input that ``takes_whole`` gets integers and booleans as they are, and others as ``dtype``.
    """

    name: str
    shape: Shape | None
    dtype: str
    takes_whole: bool = False

    def dtype_for(self, given: str) -> str:
        """The NumPy dtype in which an input gets values of dtype ``given``, as in Keras' ``fit``;
        float32 for one that NumPy lacks (bfloat16): the model rounds."""
        if self.dtype == AS_GIVEN:
            return "float32" if given == "float64" else given
        if self.takes_whole and is_whole(given):
            return given
        return "float32" if self.dtype.startswith(("bfloat", "float8")) else self.dtype


def is_whole(dtype: str) -> bool:
    """Whether a dtype is one of integers or booleans."""
    return dtype == "bool" or dtype.startswith(("int", "uint"))


@dataclass(frozen=True)
class Signature:
    """A model's inputs and outputs.

    Args:
        inputs: By name, in the order of the model's maker: of the dict or the list. One unnamed
            input is called ``'features'``.
        outputs: By name.
        label_kinds: Output name -> ``'sparse'`` where the loss wants integer class labels,
            ``'dense'`` where it wants the output's shape, ``'binary'`` where it wants that and
            numbers in [0, 1], ``'own'`` for a loss of the user's or one that no shape is known of.
        named_inputs: Whether the input names are the model's own (functional), so that unknown
            names can be refused.
        needs_labels: False where the model may do without: it was compiled without a loss.
        label_ranges: Output name -> the least and the greatest label that its loss has a meaning
            for, where it is ``'dense'`` and not any.
        ignored_classes: Output name -> the label whose rows or positions its loss leaves out.
        optional_labels: The outputs without a loss, of a model without metrics: no labels are
            needed for them.
        own_step: Whether code of the user's own sees the labels: a ``train_step``, ``test_step``,
            ``compute_loss`` or ``compute_metrics``.
        number_losses: Output name -> its loss, where that is one of Keras' which compares numbers,
            one for each unit: a class number there is no one-hot vector.
        class_counts: Output name -> the number of classes, where the loss tells it and the output
            does not (``ShardedClassifier``).
        whole_outputs: Output name -> its dtype where inputs that take integers get them.
        preprocessing: The way from rows to what the model takes, where it has one of its own:
            ``inputs`` are the rows then. It may make the labels, too.
    """

    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    label_kinds: dict[str, LabelKind]
    named_inputs: bool
    needs_labels: bool = True
    label_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    ignored_classes: dict[str, int] = field(default_factory=dict)
    optional_labels: frozenset[str] = frozenset()
    number_losses: dict[str, str] = field(default_factory=dict)
    own_step: bool = False
    class_counts: dict[str, int] = field(default_factory=dict)
    whole_outputs: dict[str, str] = field(default_factory=dict)
    preprocessing: Preprocessing | None = field(default=None, compare=False, repr=False)

    def output_dtype(self, output: str, given: Mapping[str, str] | None) -> str:
        """The dtype of an output where inputs get the dtypes ``given``; None: whatever they get."""
        dtype, whole = self.outputs[output].dtype, self.whole_outputs.get(output)
        if whole is None or whole == dtype:
            return dtype
        if given is None:
            return np.result_type(dtype, whole).name
        free = (given.get(n, "") for n, spec in self.inputs.items() if spec.takes_whole)
        return whole if any(map(is_whole, free)) else dtype

    def class_labels(self, output: str) -> tuple[int | None, Shape]:
        """The number of classes of a ``'sparse'`` output, and the shape of a row's labels."""
        if output in self.class_counts:
            return self.class_counts[output], ()
        shape = self.outputs[output].shape or (None,)
        return shape[-1], shape[:-1]

    def row_shape(self, output: str) -> Shape | None:
        """The shape of an output's rows; None for :data:`LABEL`."""
        return self.outputs[output].shape if output in self.outputs else None

    def label_bounds(self, output: str) -> tuple[float, float] | None:
        """The least and the greatest label that the loss of an output takes; None: any."""
        if self.label_kinds.get(output) == "binary":
            return _SHARES
        return self.label_ranges.get(output)


def model_signature(model: keras.Model) -> Signature:
    """Reads the signature of a built ``keras.Model`` (functional, Sequential or subclassed)."""
    functional = getattr(model, "_inputs_struct", None) is not None or hasattr(model, "_functional")
    whole: dict[str, str] = {}
    if functional and getattr(model, "inputs", None):
        struct = getattr(model, "_inputs_struct", None)
        if isinstance(struct, dict):  # in the order of the model's maker; Keras sorts its inputs
            inputs = _specs(list(struct.values()), list(struct))
        else:
            inputs = _specs(model.inputs, _keys(struct, model.inputs))
        names = getattr(getattr(model, "_functional", model), "output_names", None)
        struct = getattr(model, "_outputs_struct", None)
        outputs = _specs(model.outputs, _keys(struct, model.outputs, names))
    else:
        inputs, outputs, whole = _subclassed(model)
    _refuse_texts(model, inputs)
    kinds = _label_kinds(model, list(outputs))
    named = bool(functional) and len(inputs) > 1
    loss = getattr(model, "loss", None)
    losses = loss_by_output(loss, list(outputs))
    called = {name: loss_name(item)[0] for name, item in losses.items()}
    ranges = {output: _RANGES[name] for output, name in called.items() if name in _RANGES}
    ignored = {name: c for name, item in losses.items() if (c := ignored_class(item)) is not None}
    optional = _without_loss(model, losses)
    numbers = {output: name for output, name in called.items() if name in _OF_NUMBERS}
    signature = Signature(
        inputs, outputs, kinds, named, loss is not None, ranges, ignored, optional, numbers,
        has_own(model, *_STEPS),
        {name: count for name, item in losses.items() if (count := _class_count(item)) is not None},
        whole,
    )  # fmt: skip
    if preprocessor_of(model) is None:
        return signature
    first = next(iter(inputs.values())).shape
    images = len(inputs) == 1 and first is not None and len(first) == 3
    row = TensorSpec(ROW, (None,) * 3 if images else None, AS_GIVEN)
    space = space_of(model)
    columns = {} if space is None else {n: str(f.dtype) for n, f in space.features.items()}
    prepares = Preprocessing(model, tuple(inputs), tuple(outputs), columns)
    return replace(signature, inputs={ROW: row}, named_inputs=False, preprocessing=prepares)


def _refuse_texts(model: keras.Model, inputs: Mapping[str, TensorSpec]) -> None:
    import keras

    backend = keras.backend.backend()
    texts = [name for name, spec in inputs.items() if spec.dtype == "string"]
    if texts and backend != "tensorflow":
        raise ModelError(
            f"model {model.name!r} takes texts, of which {backend} has no tensors",
            expected="inputs of numbers, and the layers that take texts before the model",
            received=f"inputs of texts: {texts}",
            hint="the layers behind them as a model, and decoder={'input': the layer of texts}; "
            "or KERAS_BACKEND=tensorflow",
        )


def unbuilt(model: keras.Model) -> ModelError:
    """The error for a model that has no variables yet."""
    return ModelError(
        f"model {model.name!r} has no variables yet", expected="a built model",
        received="an unbuilt one",
        hint="start it with keras.Input(shape), or call it once on an example batch",
    )  # fmt: skip


def has_own(model: keras.Model, *methods: str) -> bool:
    """Whether a model's class has one of these methods of ``keras.Model`` from the user."""
    import keras

    return any(getattr(type(model), m) is not getattr(keras.Model, m) for m in methods)


def compiles_itself(cls: type[keras.Model]) -> bool:
    """Whether a class of models has a ``compile`` of its own, and Keras does not know with what."""
    import keras

    return (
        issubclass(cls, keras.Model)
        and cls.compile is not keras.Model.compile
        and cls.compile_from_config is keras.Model.compile_from_config
    )


def gives_otherwise(model: keras.Model) -> bool:
    """Whether ``predict`` may give other outputs than the model's layers: with a step or a call of
    the user's own."""
    import keras

    models = keras.src.models
    calls = (models.Functional.call, keras.Sequential.call)
    functional = getattr(model, "_inputs_struct", None) is not None
    return has_own(model, "predict_step") or (functional and type(model).call not in calls)


def takes_strings(model: keras.Model) -> bool:
    """Whether an input of the model is text."""
    return any(tensor.dtype == "string" for tensor in getattr(model, "inputs", None) or [])


def _keys(struct: object, tensors: Any, names: Any = None) -> list[str]:
    if isinstance(struct, dict):
        return sorted(struct)
    is_named = names and len(names) == len(tensors)
    return distinct(names if is_named else [t.name for t in tensors])


def distinct(names: Sequence[str]) -> list[str]:
    """Names of which Keras gives one to all outputs of an operation: ``lstm``, ``lstm_1``."""
    before = [(name, list(names[:place]).count(name)) for place, name in enumerate(names)]
    return [f"{name}_{number}" if number else str(name) for name, number in before]


def _specs(tensors: Any, names: list[str]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(name, tuple(t.shape[1:]), "string" if _is_text(t) else str(t.dtype))
        for name, t in zip(names, tensors, strict=True)
    }


def _is_text(tensor: Any) -> bool:
    """Whether a symbol is the text of a class, of which Keras says that it is a whole number."""
    made_by = getattr(getattr(tensor, "_keras_history", None), "operation", None)
    return type(made_by).__name__ == "StringLookup" and bool(getattr(made_by, "invert", False))


def _subclassed(
    model: keras.Model,
) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec], dict[str, str]]:
    """Inputs, outputs and ``whole_outputs`` of a model that a call has built: of its dtypes Keras
    notes nothing, so that it is tried with symbols of both kinds (ADR 0180)."""
    import keras

    shapes = getattr(model, "_build_shapes_dict", None) or {}
    flat: dict[str, Any] = {}
    values = list(shapes.values())
    if len(values) == 1 and isinstance(values[0], dict):
        flat = dict(values[0])
    elif takes_list(model):
        flat = dict(zip(list_names(len(values[0])), values[0], strict=True))
    elif len(values) == 1:
        flat = {"features": values[0]}
    floats = keras.config.floatx()
    unknown = {"output": TensorSpec("output", None, floats)}
    if not flat:
        return {"features": TensorSpec("features", None, floats, True)}, unknown, {}

    sizes = [shape[1:] for shape in flat.values()]

    def arranged(values: list[Any]) -> Any:
        if takes_list(model):
            return values
        return values[0] if list(flat) == ["features"] else dict(zip(flat, values, strict=True))

    def symbols_of(dtypes: Sequence[str]) -> list[Any]:
        return [keras.KerasTensor((None, *s), d) for s, d in zip(sizes, dtypes, strict=True)]

    @cache
    def outputs_of(*dtypes: str) -> dict[str, TensorSpec] | None:
        spec = traced(lambda values: model(arranged(values)), symbols_of(dtypes))
        if isinstance(spec, dict):
            return _specs(list(spec.values()), list(spec))
        if isinstance(spec, (list, tuple)):
            return _specs(spec, [f"output_{i}" for i in range(len(spec))])
        return None if spec is None else _specs([spec], ["output"])

    every = (floats,) * len(flat), ("int64",) * len(flat)
    readers: list[set[str]] = [set() for _ in flat]
    while True:  # a layer of texts ends a trace with symbols of numbers
        read = _readers_of_texts(
            model, arranged, symbols_of(["string" if kinds else floats for kinds in readers])
        )
        if not any(new - known for new, known in zip(read, readers, strict=True)):
            break
        readers = [new | known for new, known in zip(read, readers, strict=True)]
    numbers = [(floats, "int64")] if len(flat) < 4 else [(floats,), ("int64",)]
    tried = (
        d for kinds in numbers
        for d in product(*(("string", *kinds) if texts else kinds for texts in readers))
    )  # fmt: skip
    dtypes = next((d for d in islice(tried, _MOST_TRIED) if outputs_of(*d)), every[0])
    found, inputs = outputs_of(*dtypes), {}
    for i, (name, size) in enumerate(zip(flat, sizes, strict=True)):
        whole = *dtypes[:i], "int64", *dtypes[i + 1 :]
        free = bool(not found or outputs_of(*every[1]) or outputs_of(*whole))
        if dtypes[i] == "string":
            free = readers[i].issubset(_OF_BOTH)
        inputs[name] = TensorSpec(name, tuple(size), dtypes[i], free)
    of_whole = outputs_of(*("int64" if s.takes_whole else s.dtype for s in inputs.values()))
    return inputs, found or unknown, {name: s.dtype for name, s in (of_whole or {}).items()}


def _readers_of_texts(
    model: keras.Model, arranged: Callable[[list[Any]], Any], symbols: list[Any]
) -> list[set[str]]:
    """For each input the kinds of the layers of texts that read it, as TensorFlow's graph tells."""
    import keras

    given: list[Any] = []
    read: list[tuple[str, Any]] = []
    layers = {
        layer: kind.__name__ for layer in model._flatten_layers() for kind in type(layer).__mro__
        if kind.__name__ in _OF_TEXTS
    }  # fmt: skip

    def noted(kind: str, call: Callable[..., Any], inputs: Any, *args: Any, **options: Any) -> Any:
        read.extend((kind, tensor) for tensor in keras.tree.flatten(inputs))
        return call(inputs, *args, **options)

    def call(values: list[Any]) -> Any:
        given[:] = values
        return model(arranged(values))

    with contextlib.ExitStack() as stack:
        for layer, kind in layers.items():
            stack.enter_context(overlaid(layer, call=partial(noted, kind, layer.call)))
        if layers:
            traced(call, symbols)
    found: list[set[str]] = [set() for _ in symbols]
    for kind, tensor in read:
        above, seen = [tensor], set()
        while above:
            operation = getattr(above.pop(), "op", None)
            if operation is not None and operation not in seen:
                seen.add(operation)
                above += operation.inputs
        for number, value in enumerate(given):
            if getattr(value, "op", None) in seen:
                found[number].add(kind)
    return found


def traced(call: Callable[[Any], Any], given: object) -> Any:
    """The outputs of a call for symbols; None where it needs values."""
    import keras

    try:
        return keras.src.backend.compute_output_spec(call, given)
    except Exception:  # of any kind: the call is the user's
        return None


def list_names(count: int) -> list[str]:
    """Names for a list of inputs that have none."""
    return [f"input_{i}" for i in range(count)]


def takes_list(model: keras.Model) -> bool:
    """Whether a subclassed model was built on a list of inputs, which have no names then."""
    values = list((getattr(model, "_build_shapes_dict", None) or {}).values())
    return (
        len(values) == 1
        and isinstance(values[0], (list, tuple))
        and bool(values[0])
        and isinstance(values[0][0], (list, tuple))
    )


def _label_kinds(model: keras.Model, outputs: list[str]) -> dict[str, LabelKind]:
    loss = getattr(model, "loss", None)
    if isinstance(loss, (list, tuple)) and len(loss) != len(outputs):
        raise ModelError(
            f"model {model.name!r} has losses and outputs that do not match",
            expected=f"{len(outputs)} losses, for {outputs}", received=f"{len(loss)}",
        )  # fmt: skip
    if loss is None and has_own(model, "compute_loss", "train_step"):
        return dict.fromkeys(outputs, "own")
    return {name: _kind(item) for name, item in loss_by_output(loss, outputs).items()}


def loss_by_output(loss: object, outputs: list[str]) -> dict[str, Any]:
    """The ``loss`` that a model was compiled with, for each of its outputs (None: no loss)."""
    if isinstance(loss, dict):
        return {name: loss.get(name) for name in outputs}
    if isinstance(loss, (list, tuple)):
        return dict(zip(outputs, loss, strict=False))
    return dict.fromkeys(outputs, loss)


def _without_loss(model: keras.Model, losses: dict[str, Any]) -> frozenset[str]:
    """The outputs of which Keras' own step uses no labels; with metrics it wants those of all."""
    own = has_own(model, *_STEPS)
    if own or model._compile_metrics is not None or all(v is None for v in losses.values()):
        return frozenset()
    return frozenset(name for name, loss in losses.items() if loss is None)


def ignored_class(loss: object) -> int | None:
    """The label whose rows or positions a loss of Keras leaves out; None where it takes all."""
    ignored = _options(loss).get("ignore_class")
    return None if ignored is None else int(ignored)


def _options(loss: Any) -> dict[str, Any]:
    function = getattr(loss, "fn", loss)
    options = dict(getattr(loss, "_fn_kwargs", {}))
    while hasattr(function, "func"):  # functools.partial
        options = {**function.keywords, **options}
        function = function.func
    return options


def loss_name(loss: object) -> tuple[str | None, bool]:
    """The name of a loss of Keras, lower case without underscores, and whether it takes logits.

    The name is None for a loss that does not come with Keras.
    """
    import keras

    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            return None, False
    if loss is None:
        return None, False
    function = getattr(loss, "fn", loss)
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    named = function if hasattr(function, "__name__") else type(function)
    if str(named.__module__).split(".")[0] != "keras":
        return None, False
    return named.__name__.lower().replace("_", ""), bool(_options(loss).get("from_logits", False))


def _class_count(loss: object) -> int | None:
    count = getattr(loss, "num_classes", None)
    of_ours = type(loss).__module__.startswith("sparkdl.")
    return count if of_ours and isinstance(count, int) else None


def _kind(loss: object) -> LabelKind:
    if loss is None:
        return "dense"
    if _class_count(loss) is not None:
        return "sparse"
    plain, _ = loss_name(loss)
    if plain in ("sparsecategoricalcrossentropy", "categoricalgeneralizedcrossentropy"):
        return "sparse"
    if plain in _BINARY:
        return "binary"
    return "dense" if plain in _OF_CLASSES | _OF_NUMBERS else "own"
