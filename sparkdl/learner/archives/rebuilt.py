"""Whether a worker's model will be the driver's: the archive is loaded once here, and compared.

Both must have the same variables, and compute the same of one batch. What else differs is carried
beside the file (values of variables, settings, plain attributes), or refused before a job starts.
What was found out is kept by the model's architecture and settings, so that only the first fit of a
model loads it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
import threading
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import keras
import numpy as np
from keras.src.models import functional
from keras.src.saving import serialization_lib
from keras.src.saving.saving_lib import H5IOStore

from sparkdl.errors import ModelError
from sparkdl.learner.archives.plain_config import dicts_in
from sparkdl.learner.archives.unsaved_settings import (
    Attributes,
    BesideFile,
    ComparedPart,
    UnsavedSettings,
    attributes_of,
    compared_parts,
    give_attributes,
    parts_of,
)
from sparkdl.learner.archives.value_forms import (
    is_plain,
    is_plain_object,
    numbers_of,
    plain_copy,
    told_arguments,
)
from sparkdl.learner.custom_objects import comes_with_keras, find_custom_objects
from sparkdl.learner.framework import replaced
from sparkdl.learner.signature import model_signature
from sparkdl.learner.state.carried_state import (
    SMALL,
    is_zero,
    untrusted_values,
    values_of,
    variables_by_name,
    whole_names,
)
from sparkdl.learner.state.model_weights import Orders, orders_of
from sparkdl.learner.structure import arrange_inputs

LARGE_BYTES = 32 << 20
"""The values of a model with more are not compared: that needs the memory and the time of a second
model. Its file is trusted as Keras' own tests and ours hold it, see :func:`untrusted_values`."""
_MOST_ZEROS = 1 << 29
"""Elements that a file may lack: Keras takes many more for an attack."""
_CAPACITY = 8
Load = Callable[[bool], Any]
"""Makes the model of the archive; False: without values, which takes no memory for them."""


@dataclass(frozen=True)
class _Rebuilt:
    """The facts about the model that is loaded from an archive.

    Args:
        lossy: Names of the variables whose values the file did not bring back.
        places: See :func:`_places`.
        orders: The order of what its layers hold.
    """

    parts: tuple[ComparedPart, ...]
    lossy: frozenset[str]
    places: tuple[int | None, ...]
    orders: Orders


_known: OrderedDict[str, _Rebuilt] = OrderedDict()
"""Key of an architecture with its settings -> what is known; the one used last is last."""


@contextlib.contextmanager
def values_left_out(model: keras.Model, wanted: bool) -> Iterator[frozenset[str]]:
    """Within, Keras writes large variables as zeros, which take no place in a file of HDF5.

    Args:
        wanted: False does so only with those that are 0, and so does a model of which no names
            are yielded: see :func:`whole_names`.
    """
    whole, write = whole_names(model, large=wanted), H5IOStore.__setitem__
    own = threading.get_ident()  # another thread's file is whole

    def set_item(store: Any, key: str, value: Any) -> None:
        size = np.prod(value.shape) if hasattr(value, "shape") else 1
        counts = size > SMALL and threading.get_ident() == own
        kind = keras.backend.standardize_dtype(value.dtype) if counts else ""
        leave = kind in ("float16", "float32", "float64") and size < _MOST_ZEROS
        if leave and not (wanted and whole):
            leave = is_zero(value := keras.ops.convert_to_numpy(value))
        write(store, key, np.zeros(0) if leave else value)
        if leave:
            group = store._h5_entry_group
            del group[key]
            group.create_dataset(key, tuple(value.shape), kind)

    with replaced(H5IOStore, "__setitem__", set_item):
        yield whole


def compared_with_rebuilt(
    model: keras.Model, key: str, load: Load, custom_objects: dict[str, Any], whole: frozenset[str]
) -> tuple[BesideFile, dict[str, np.ndarray]]:
    """The settings and values beside a model's file, with which a worker has the same model.

    Args:
        model: Built, compiled or not.
        key: Key of its architecture and compile settings.
        load: Loads the file here, with values or without.
        custom_objects: Name -> class or function of the user's own.
        whole: The names that :func:`values_left_out` gave.

    Raises:
        ModelError: The loaded model would be another one.
    """
    settings = UnsavedSettings.of(model)
    key = f"{key} {settings}"
    known = _known.pop(key, None)
    if known is None:
        with _nothing_drawn(), settings.set():
            known = _compared(model, settings, load, custom_objects)
    _known[key] = known
    while len(_known) > _CAPACITY:
        _known.popitem(last=False)
    settings = settings.placed(known.places)
    settings = replace(settings, orders=known.orders, attributes=_differences(model, known))
    return BesideFile(settings, bool(whole)), untrusted_values(model, whole or known.lossy)


def _compared(
    model: keras.Model, settings: UnsavedSettings, load: Load, custom_objects: dict[str, Any]
) -> _Rebuilt:
    """Loads the model, and compares it with the driver's; see :func:`compared_with_rebuilt`."""
    sizes = (4 * int(np.prod(v.shape)) for v in variables_by_name(model).values())
    for with_values in (True,) if sum(sizes) <= LARGE_BYTES else (False, True):
        made = load(with_values)
        reordered = settings.put_in_order(made)
        kinds, others = ([_kind(p) for p in parts_of(m)] for m in (model, made))
        places = _places(kinds, others)
        placed = settings.placed(places)
        before = {id(v) for v in variables_by_name(made).values()}
        try:
            adapted = placed.give_adapters(made)
        except Exception:  # it wants values, to be quantized
            if with_values:
                raise
            continue
        reordered = placed.put_in_order(made) or reordered
        if kinds == others and not placed.odd_place(made):
            break
    _require_same_variables(model, made)
    lossy = frozenset(n for n, v in variables_by_name(made).items() if id(v) not in before)
    orders = orders_of(made)
    if with_values:
        replace(placed, orders=orders).apply(made, custom_objects)
        lossy = _lossy(model, made)
    if reordered:  # what a file numbers by their order goes to another variable
        lossy = frozenset(variables_by_name(model))
    elif adapted and not with_values:  # the optimizer that was loaded has none of their variables
        lossy |= {n for n in variables_by_name(model) if n.startswith("optimizer")}
    known = _Rebuilt(tuple(part.kept() for part in compared_parts(made)), lossy, places, orders)
    if with_values:
        give_attributes(made, _differences(model, known))
        _require_same_outputs(model, made, kinds, others)
    return known


def _places(kinds: list[str], others: list[str]) -> tuple[int | None, ...]:
    """For each part of the loaded model its number in the driver's; None: that has no such."""
    if kinds == others:
        return tuple(range(len(kinds)))
    found: dict[int, int] = {}
    for block in SequenceMatcher(None, others, kinds, False).get_matching_blocks():
        found |= {block.a + i: block.b + i for i in range(block.size)}
    return tuple(found.get(number) for number in range(len(others)))


def _lossy(model: keras.Model, copy: keras.Model) -> frozenset[str]:
    mine, its = variables_by_name(model), variables_by_name(copy)
    names = [name for name in mine if name in its]
    pairs = zip(
        names, values_of([mine[n] for n in names]), values_of([its[n] for n in names]), strict=True
    )
    lost = {name for name, one, other in pairs if not _equal(one, other)}
    return frozenset(lost | {name for name in mine if name not in its})


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    one, other = (np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (one, other))
    return np.array_equal(one, other)


def _require_same_variables(model: keras.Model, copy: keras.Model) -> None:
    mine, its = (_shapes(m.variables) for m in (model, copy))
    if mine != its:
        paths = [v.path for v in model.variables]
        wrong = next(
            (f"{b} in place of {path}, {a}" for path, a, b in zip(paths, mine, its, strict=False)
             if a != b),
            f"{len(its)} variables in place of {len(mine)}",
        )  # fmt: skip
        raise _refusal(
            model, "the same variables in the same order", wrong,
            "build(self, input_shape) makes all variables of a layer, in one order; layers that "
            "were added after the model was made belong into its constructor, or into get_config "
            "and from_config",
        )  # fmt: skip


def _require_same_outputs(
    model: keras.Model, copy: keras.Model, kinds: list[str], others: list[str]
) -> None:
    """Refuses a model whose loaded copy computes something else of the same values.

    Layers of Keras' own compute the same where there are as many of each kind in the same order.
    """
    parts = parts_of(model)
    if kinds == others and all(comes_with_keras(type(part)) for part in parts):
        return
    served = any(kind.startswith("sparkdl.") for kind in kinds)  # a lookup makes rows
    wanted, batch = None, None if served else _batch_for(model)
    kept = [(vars(p), dict(vars(p))) for p in parts if not comes_with_keras(type(p))]
    with contextlib.suppress(Exception):  # code that wants other values: nothing can be told
        wanted = None if batch is None else _outputs(model, model, batch)
    different = "" if kinds == others else _odd_part(kinds, others)
    if wanted is not None:
        try:
            different = _odd_output(wanted, _outputs(copy, model, batch))
        except Exception as error:
            different = f"{type(error).__name__}: {error}"[:300]
        if different and _odd_output(wanted, _outputs(model, model, batch)):
            different = ""  # the model draws numbers of its own
    for attributes, before in kept:
        attributes.clear()
        attributes.update(before)
    if different:
        if kinds != others:
            different += f"; {_odd_part(kinds, others)}"
        raise _refusal(
            model, "the same outputs of one batch", different,
            "layers that were added after the model was made, and what they are told, belong into "
            "its constructor, or into get_config and from_config",
        )  # fmt: skip


def _batch_for(model: keras.Model) -> Any:
    """Two rows of the model's own shapes; None where these are not known."""
    random = np.random.default_rng(0)

    def made(shape: Sequence[int | None], dtype: str) -> np.ndarray:
        sizes = (2, *(size or 8 for size in shape))
        if dtype == "string":
            return np.full(sizes, "a good text", object)
        whole = dtype == "bool" or "int" in dtype
        values = random.integers(0, 2, sizes) if whole else random.random(sizes)
        return values.astype(dtype if whole else "float32")

    struct = getattr(model, "_inputs_struct", None)
    if struct is not None:
        return keras.tree.map_structure(lambda t: made(t.shape[1:], t.dtype), struct)
    specs = model_signature(model).inputs.items()
    if any(spec.shape is None for _, spec in specs):
        return None
    return arrange_inputs(model, {n: made(s.shape or (), s.dtype) for n, s in specs})


def _outputs(model: keras.Model, values: Any, batch: object) -> list[np.ndarray]:
    pairs = zip(model.variables, values.variables, strict=True)
    with keras.StatelessScope(state_mapping=[(v, its.value) for v, its in pairs]):
        made = model(keras.tree.map_structure(keras.ops.convert_to_tensor, batch), training=False)
    tensors = [keras.ops.cast(tensor, "float32") for tensor in keras.tree.flatten(made)]
    return [keras.ops.convert_to_numpy(tensor) for tensor in tensors]


def _odd_output(wanted: list[np.ndarray], found: list[np.ndarray]) -> str:
    """The first output that differs, in words; empty where all are equal."""
    if len(wanted) != len(found):
        return f"{len(found)} outputs in place of {len(wanted)}"
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        if one.shape != other.shape:
            return f"output {number} of shape {other.shape} in place of {one.shape}"
        close = np.isclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
        if not close.all():
            place = np.unravel_index(int(np.argmin(close)), close.shape)
            return f"{other[place]} in place of {one[place]} in output {number}"
    return ""


def _odd_part(kinds: list[str], others: list[str]) -> str:
    place = next(i for i in range(len(kinds) + 1) if kinds[i : i + 1] != others[i : i + 1])
    there, here = (_name(k[place : place + 1]) for k in (others, kinds))
    return f"{there} in place of {here}, layer {place}"


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _shapes(variables: Sequence[Any]) -> list[str]:
    """Each variable in words, without the number that Keras gives to some names."""
    return [
        f"{re.sub('_[0-9]+$', '', v.name)} {tuple(v.shape)} "
        f"{keras.backend.standardize_dtype(v.dtype)}"
        for v in variables
    ]


def _name(kinds: Sequence[str]) -> str:
    return kinds[0].rpartition(".")[2] if kinds else "none"


def _differences(model: keras.Model, known: _Rebuilt) -> Attributes:
    """Number of a part of the loaded model -> its attributes that it must be given."""
    found: Attributes = {}
    parts = compared_parts(model)
    behind = len(parts_of(model)) - len(known.places)  # what the model was compiled with
    for number, its in enumerate(known.parts):
        here = number + behind if number >= len(known.places) else known.places[number]
        part = None if here is None or here >= len(parts) else parts[here]
        if part is None or part.kind != its.kind:
            continue  # a name became an object of Keras
        for name, form in part.attributes.items():
            missing = name not in its.attributes
            if not missing and form == its.attributes[name]:
                continue
            value = attributes_of(part.thing)[name]
            numbers = None if missing else numbers_of(value)
            if is_plain(value):
                found.setdefault(number, {})[name] = plain_copy(value)
            elif numbers is not None or is_plain_object(value):
                found.setdefault(number, {})[name] = value if numbers is None else numbers
            elif part.own and not missing:  # else it may be what a call has made
                raise _refusal(
                    model, f"attribute {name!r} of {part.label} as it is",
                    f"{value!r}, of which its configuration knows nothing"[:300],
                    f"in class {type(part.thing).__name__}: get_config with {name!r}, which its "
                    "constructor takes; or give it to the constructor",
                )  # fmt: skip
    return found


def parts_by_id(model: keras.Model) -> dict[int, str]:
    """``id`` of each layer, variable and optimizer of a model -> what it is, in words."""
    things = [*parts_of(model), *model.variables, getattr(model, "optimizer", None) or model]
    return {id(thing): f"{type(thing).__name__} {thing.name!r}" for thing in things}


class SharedLayers:
    """The layers of a model that several of its layers hold: submodels, wrappers, the model itself.

    Keras' file of such a model cannot be loaded: a configuration has each layer once for each
    holder (what says that they are one is lost in a copy), and numbers a layer's calls within each
    holder, while a loaded layer numbers those of all. :meth:`numbered` and :meth:`mend` write both
    so that ``keras.models.load_model`` makes the same model.

    Args:
        model: Built.
    """

    def __init__(self, model: keras.Model) -> None:
        held: Counter[int] = Counter()
        for part in parts_of(model):
            held.update({id(v) for v in part._flatten_layers(include_self=False, recursive=False)})
        self._model = model
        self._ids = {key for key, count in held.items() if count > 1}
        inputs = {id(p) for p in parts_of(model) if isinstance(p, keras.layers.InputLayer)}
        self._any = bool(self._ids - inputs)

    def __bool__(self) -> bool:
        return self._any

    @contextlib.contextmanager
    def numbered(self, objects: dict[str, Any], told: bool) -> Iterator[None]:
        """Within, Keras writes the number of a shared layer at each of its places, and what
        :func:`told_arguments` does."""
        record = serialization_lib.record_object_after_serialization

        def record_all(thing: object, config: dict[str, Any]) -> None:
            record(thing, config)
            if id(thing) in self._ids:
                config["shared_object_id"] = id(thing)

        with (
            told_arguments(self._model, objects, told),
            replaced(serialization_lib, "record_object_after_serialization", record_all, self),
        ):
            yield

    def mend_file(
        self,
        path: str,
        custom_objects: dict[str, Any],
        load: Callable[[dict[str, Any], dict[str, Any]], Any],
    ) -> None:
        """Writes the ``config.json`` of a file anew; see :meth:`mend`."""
        objects = {**find_custom_objects(self._model), **custom_objects}
        with zipfile.ZipFile(path) as file:
            parts = {name: file.read(name) for name in file.namelist()}
        config = json.loads(parts["config.json"])
        self.mend(config, lambda given: load(given, objects))
        parts["config.json"] = json.dumps(config).encode()
        with zipfile.ZipFile(path, "w") as file:
            for name, part in parts.items():
                file.writestr(name, part)

    def mend(self, config: dict[str, Any], load: Callable[[dict[str, Any]], Any]) -> None:
        """Numbers calls of layers in a saved configuration as those of loaded layers.

        Args:
            config: Config of the model; changed in place.
            load: Makes the model of a configuration, which it may change.

        Raises:
            ModelError: The loaded model is another one.
        """
        given = copy.deepcopy(config)
        pairs = zip(_graphs(given), _graphs(config), strict=True)
        graphs = {id(mine["layers"]): its for mine, its in pairs}
        if not graphs:  # their calls have no numbers
            return
        begun: list[tuple[dict[str, Any], ...]] = []
        make, read = functional.functional_from_config, functional.deserialize_node

        def make_graph(cls: object, mine: dict[str, Any], custom_objects: object = None) -> Any:
            begun.append((dict(mine), graphs.get(id(mine["layers"]), {})))
            depth = len(begun)
            try:
                return make(cls, mine, custom_objects=custom_objects)
            finally:
                del begun[depth - 1 :]

        def read_node(node: object, layers: dict[str, Any]) -> Any:
            if begun and begun[-1]:  # the first call of this graph: no other was made yet
                both, begun[-1] = begun[-1], ()
                calls = {
                    layer["name"]: len(layers[layer["name"]]._inbound_nodes)
                    for layer in both[0]["layers"] if layer["inbound_nodes"]
                }  # fmt: skip
                for graph in both:
                    _renumber([layer["inbound_nodes"] for layer in graph.get("layers", ())], calls)
                    _renumber([graph.get("input_layers"), graph.get("output_layers")], calls)
            return read(node, layers)

        try:
            with (
                _nothing_drawn(),
                replaced(functional, "functional_from_config", make_graph),
                replaced(functional, "deserialize_node", read_node),
            ):
                made = load(given)
        except Exception as error:
            raise self._refused(f"{type(error).__name__}: {error}"[:300]) from error
        if _shapes(made.variables) != _shapes(self._model.variables):
            raise self._refused(f"{len(made.variables)} variables of layers that are apart")

    def _refused(self, received: str) -> ModelError:
        names = [part.name for part in parts_of(self._model) if id(part) in self._ids]
        count = len(self._model.variables)
        return ModelError(
            f"model {self._model.name!r} cannot be saved so that anybody can load it",
            expected=f"a configuration that makes its {count} variables again", received=received,
            hint=f"layers {names} belong to several others: make them in __init__ of a class of "
            "your own, whose from_config makes them once",
        )  # fmt: skip


def _graphs(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The configurations of functional models in a saved one."""
    keys = {"layers", "input_layers", "output_layers"}
    return [part for part in dicts_in(config) if keys <= part.keys()]


def _renumber(value: object, calls: dict[str, int]) -> None:
    """Adds to each ``[layer, call, tensor]`` the calls that the layer had before."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return
    if len(value) == 3 and isinstance(value[0], str) and isinstance(value[1], int):
        value[1] += calls.get(value[0], 0)
    else:
        for item in value:
            _renumber(item, calls)


def _refusal(model: keras.Model, expected: str, received: str, hint: str) -> ModelError:
    return ModelError(
        f"model {model.name!r} would be another one on the workers",
        expected=f"a model that keras.models.load_model makes again with {expected}",
        received=received, hint=hint,
    )  # fmt: skip


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Within, the user's random numbers and the names that Keras gives do not go on."""
    state = keras.src.backend.common.global_state
    names = state.get_global_attribute("object_name_uids")
    kept = None if names is None else names.copy()
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)
        if kept is not None:
            state.set_global_attribute("object_name_uids", kept)
