"""Rows as a user gives them -> what a model takes, where the model says how: KerasHub's tasks do.

A worker keeps the rows as they came, texts as texts, and makes batches of them one by one, in the
thread that gathers the batches, as Keras' own ``fit`` of such a model does with ``tf.data``.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from sparkdl.data.columns import ColumnSpec, DataSpec
from sparkdl.data.conform import conform, empty_rows
from sparkdl.errors import DataError, ResourceError
from sparkdl.process import payload
from sparkdl.training.learning import Arrays, BatchStack

ROW = "features"
"""The name of a row that is one value."""
SEGMENT = "segment "
"""Stands before the number of a text, where a row is several texts in an order."""
EXAMPLE = "a good text"
_FREE_DIMENSION = 8


@dataclass(frozen=True)
class LayerEncoder:
    """A layer of Keras that takes texts, before a model; an encoder of columns.

    It travels by value, and is made again where it is first used, when Keras is up there.

    Args:
        layer: ``StringLookup``, ``TextVectorization``, ``Hashing`` or one of the user's own.
    """

    layer: Any

    @classmethod
    def of(cls, decoder: object) -> LayerEncoder | None:
        """The encoder of what a user gave as a decoder; None for a function of one value."""
        if isinstance(decoder, LayerEncoder):
            return decoder
        keras = sys.modules.get("keras")
        is_layer = keras is not None and isinstance(decoder, keras.Layer)
        return cls(decoder) if is_layer and space_in(decoder) is None else None

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.layer, bytes):
            return {"layer": self.layer}
        with present_vocabularies(self.layer):
            return {"layer": payload.dump(self.layer)}

    def encode(self, texts: npt.NDArray[Any], spec: ColumnSpec) -> npt.NDArray[Any]:
        """See :class:`sparkdl.data.columns.ColumnEncoder`; not thread-safe."""
        plain = replace(spec, kind="array", encoder=None)
        return conform(self.made(texts, spec.label), plain) if len(texts) else empty_rows(plain)

    def kind(self, label: str) -> tuple[bool, int]:
        """Whether it makes whole numbers, and of how many dimensions, the rows included."""
        try:
            made = self.made_again().compute_output_spec(_keras().KerasTensor((None,), "string"))
        except Exception:  # a layer of the user's own
            made = self.made(np.array([EXAMPLE], object), label)
        return "int" in str(made.dtype), len(made.shape)

    def __call__(self, value: object) -> Any:
        """Makes an array of one value of a column that is no text."""
        return self.made_again()(value)

    def made_again(self) -> Any:
        """The layer, in this process; Keras is up."""
        if isinstance(self.layer, bytes):
            object.__setattr__(self, "layer", payload.load(self.layer))
        return self.layer

    def made(self, texts: npt.NDArray[Any], label: str) -> npt.NDArray[Any]:
        """What the layer makes of texts of the column ``label``.

        Raises:
            DataError: The layer raises, or does not make a value for each row.
            ResourceError: TensorFlow is missing.
        """
        what = f"column {label}: the layer before the model cannot take these texts"
        expected = "texts of which it makes an array of numbers with a row for each"
        try:
            found = _array(self.made_again()(np.array(_texts(texts), object)))
        except ImportError as error:
            raise _missing(f"the layer before the model, for column {label},", error) from error
        except Exception as error:
            received = f"{type(error).__name__}: {_cause(error)[:300]}"
            raise DataError(what, expected=expected, received=received) from error
        if found.shape[:1] != texts.shape[:1] or found.dtype.kind not in "biuf":
            received = f"{found.dtype} of shape {found.shape} for {len(texts)} rows"
            raise DataError(what, expected=expected, received=received)
        return found


@contextlib.contextmanager
def present_vocabularies(layer: Any) -> Iterator[None]:
    """Within, Keras saves lookups in a layer with the vocabulary that they have now; else it is the
    one that their constructor got, or the name of a file of it on the driver."""
    changed = []
    for part in layer._flatten_layers():
        if vars(part).get("input_vocabulary") is None or not hasattr(part, "get_vocabulary"):
            continue
        words, given = part.get_vocabulary(), [*part.get_config()["vocabulary"]]
        if given in (words, part.get_vocabulary(include_special_tokens=False)):
            continue
        weights = getattr(part, "idf_weights", None)
        idf = None if weights is None else weights.numpy()[: len(words)].tolist()
        changed.append((vars(part), dict(vars(part))))
        vars(part).update(input_vocabulary=words, input_idf_weights=idf)
    try:
        yield
    finally:
        for present, before in changed:
            present.update(before)


def _missing(who: str, error: ImportError) -> ResourceError:
    return ResourceError(
        f"{who} needs a package that is not installed here",
        expected="TensorFlow, and for keras-hub's tokenizers tensorflow-text, on the driver and on "
        "the workers: they take texts with TensorFlow, whatever backend the model runs on",
        received=f"{type(error).__name__}: {str(error)[:300]}",
        hint="pip install tensorflow; for keras-hub 'sparkdl-keras[hub]' tensorflow-text",
    )


_spaces: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Model -> the ``keras.utils.FeatureSpace`` that makes its inputs of rows."""


def space_in(decoder: object) -> Any:
    """The ``FeatureSpace`` that a user gave as the decoder, or as that of ``'features'``."""
    given = decoder.get("features") if isinstance(decoder, Mapping) else decoder
    kinds = {kind.__name__ for kind in type(given).__mro__}  # Keras may not be imported
    return given if "FeatureSpace" in kinds else None


def give_space(model: object, decoder: object) -> None:
    """From now on a model's rows go through the ``FeatureSpace`` of a decoder, or through none."""
    space = space_in(decoder)
    if space is not None:
        _spaces[model] = space
    elif _spaces:
        _spaces.pop(model, None)


def space_of(model: object) -> Any:
    """The ``FeatureSpace`` of a model; None: it has none."""
    return _spaces.get(model) if _spaces else None


def preprocessor_of(model: object) -> Any:
    """The layer or function that makes a model's inputs of its rows; None: there is none."""
    makes = hasattr(type(model), "preprocess_samples")
    own = getattr(model, "preprocessor", None) if makes else None
    return space_of(model) if own is None else own


@dataclass(frozen=True, eq=False)
class Preprocessing:
    """Makes what the steps of a model take of rows; thread-safe as the model's preprocessor is.

    Args:
        model: Has a ``preprocess_samples``, as ``keras_hub.models.Task``; None where this came with
            a signature from another process.
        inputs: Names of the model's inputs, in its order.
        columns: Feature -> dtype, of a ``FeatureSpace``; a row of any other is what it takes.
    """

    model: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    columns: Mapping[str, str] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "model": None}

    def stack(self, stack: BatchStack) -> BatchStack:
        """One batch of rows, as a stack of one, as the model's steps take it.

        Labels and sample weights are those that the preprocessor gives back: of a causal language
        model both are made of the text.
        """
        labels, weights = (
            None if part is None else {name: array[0] for name, array in part.items()}
            for part in (stack.y or None, stack.sample_weight)
        )
        rows = {name: array[0] for name, array in stack.x.items()}
        prepared = self._prepare(rows, labels, weights)
        x, y, weight = (None if part is None else _batched(part) for part in prepared)
        return replace(stack, x=x or {}, y=y or {}, sample_weight=weight)

    def rows(self, x: Arrays) -> Arrays:
        """The model's inputs for rows without labels."""
        found = self._prepare(x, None, None)[0]
        assert found is not None
        return found

    def example(self, spec: DataSpec, num_rows: int) -> BatchStack:
        """A batch of made-up rows of these columns, for their shapes.

        Raises:
            DataError: The model cannot take such columns, or they are no inputs of it.
            ResourceError: TensorFlow or another package of the preprocessor is missing.
        """
        groups = (spec.features, spec.labels, spec.weights)
        x, y, weight = ({n: _made_up(s, num_rows) for n, s in g.items()} for g in groups)
        columns = ", ".join(f"{s.label} ({s.kind}, {s.dtype})" for s in spec.features.values())
        what = f"model {self.model.name!r} cannot take these columns"
        try:
            weights = _batched(weight) or None
            made = self.stack(BatchStack(_batched(x), _batched(y), weights, 1, num_rows))
        except ImportError as error:
            raise _missing(f"the preprocessor of model {self.model.name!r}", error) from error
        except Exception as error:
            raise DataError(
                what,
                expected="columns of the kind that its preprocessor takes: strings for a text "
                "model, images (arrays of three dimensions) for an image model",
                received=f"{columns}; {type(error).__name__}: {_cause(error)[:300]}",
                hint="try model.preprocessor on one value; a dict of columns for a dict",
            ) from error
        if len(self.inputs) > 1 and set(made.x) != set(self.inputs):  # more than these are dropped
            raise DataError(
                what, expected=f"rows of which its preprocessor makes {sorted(self.inputs)}",
                received=f"{columns}, of which it makes {sorted(made.x)}",
            )  # fmt: skip
        return made

    def _prepare(
        self, x: Arrays, y: Arrays | None, weight: Arrays | None
    ) -> tuple[Arrays | None, Arrays | None, Arrays | None]:
        rows = {name: _texts(a) if a.dtype == object else a for name, a in x.items()}
        labels, weights = (
            next(iter(p.values())) if p is not None and len(self.outputs) == 1 else p
            for p in (y, weight)
        )
        space, given = space_of(self.model), _as_given(rows)
        if space is None:
            made = self.model.preprocess_samples(given, y=labels, sample_weight=weights)
        else:
            made = space(given), labels, weights
        found = _keras().utils.unpack_x_y_sample_weight(made)
        names = (self.inputs, self.outputs, self.outputs)
        prepared = [_named(part, its) for part, its in zip(found, names, strict=True)]
        return prepared[0], prepared[1], prepared[2]


def _cause(error: Exception) -> str:
    text, _, _ = re.sub("\x1b\\[[0-9]*m", "", str(error)).partition("Arguments received")
    return " ".join(text.rpartition("call().")[2].split())


def _texts(array: npt.NDArray[Any]) -> list[str]:
    return [t.decode() if isinstance(t, bytes) else t for t in array.reshape(-1).tolist()]


def _as_given(arrays: Mapping[str, Any]) -> Any:
    if all(name.startswith(SEGMENT) for name in arrays):
        return tuple(arrays.values())
    return next(iter(arrays.values())) if set(arrays) == {ROW} else dict(arrays)


def _named(made: object, names: tuple[str, ...]) -> Arrays | None:
    if made is None:
        return None
    if isinstance(made, Mapping):  # what is no input is left out, as in Keras
        kept = names if set(names) <= made.keys() else made
        return {str(name): _array(made[name]) for name in kept}
    if isinstance(made, (list, tuple)) and len(made) == len(names):
        return {name: _array(value) for name, value in zip(names, made, strict=True)}
    return {names[0] if names else "output": _array(made)}


def _array(value: object) -> npt.NDArray[Any]:
    ops = _keras().ops
    return np.asarray(ops.convert_to_numpy(value) if ops.is_tensor(value) else value)


def _keras() -> Any:
    import keras

    return keras


def _batched(arrays: Arrays) -> Arrays:
    return {name: array[None] for name, array in arrays.items()}


def _made_up(spec: ColumnSpec, num_rows: int) -> npt.NDArray[Any]:
    if spec.kind == "text" and spec.encoder is None:
        return np.array([EXAMPLE] * num_rows, object)
    shape = (num_rows, *(_FREE_DIMENSION if d is None else d for d in spec.shape))
    return np.zeros(shape, spec.dtype)
