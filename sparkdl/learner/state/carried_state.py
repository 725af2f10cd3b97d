"""The variables of a model that no flat float32 buffer holds, by value and in order.

These are integers (a counter, the state of a seed), float64, and float variables that are neither
trained nor running statistics: frozen ones, which only code of the user's own changes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.errors import ModelError
from sparkdl.files.model_file import pack_arrays, unpack_arrays
from sparkdl.learner.custom_objects import comes_with_keras
from sparkdl.learner.state.model_weights import exchanged_variables

SMALL = 4096
"""Elements of a variable that always travels; a larger frozen one does so when it has changed."""
_WHOLE = 1 << 17
"""Elements of all variables of a small model: its task travels inside the job also with them."""
_LOADING = ("Layer", "Conv1D", "Dense", "EinsumDense", "Embedding")
_LOADS_VARIABLES = {getattr(keras.layers, kind).load_own_variables for kind in _LOADING}
"""How layers of Keras load that bring their variables back and nothing else."""
Array = npt.NDArray[Any]
Read = Callable[[Sequence[Any]], list[Array]]
"""The present values of some variables of a model."""


class CarriedState:
    """The part of one model that travels beside its flat buffer.

    Args:
        model: Built.
        read: Where the values of its variables are; None for the variables themselves.
    """

    def __init__(self, model: keras.Model, read: Read | None = None) -> None:
        self._read = read or values_of
        held = {id(v) for v in exchanged_variables(model)}
        self.variables = variables_of_model(model)
        self._always: list[str] = []
        self._watched: dict[str, int] = {}
        for name, variable in self.variables.items():
            if id(variable) in held:
                if is_wide(variable):
                    self._always.append(name)
            elif not keras.backend.is_float_dtype(variable.dtype) or _size(variable) <= SMALL:
                self._always.append(name)
            else:
                self._watched[name] = 0
        self.watch()

    def watch(self) -> None:
        """From now on larger frozen variables travel if they have changed since."""
        for name, value in self._values(self._watched):
            self._watched[name] = _digest(value)

    def to_bytes(self, form: Callable[[Any, Array], Array] = lambda _, value: value) -> bytes:
        """The values as bytes; none where there is nothing to carry.

        Args:
            form: Makes of a variable and its value what travels.
        """
        found = dict(self._values(self._always))
        found |= {n: v for n, v in self._values(self._watched) if _digest(v) != self._watched[n]}
        forms = {name: plain(form(self.variables[name], v)) for name, v in found.items()}
        return pack_arrays(forms) if forms else b""

    def _values(self, names: Iterable[str]) -> Iterable[tuple[str, Array]]:
        wanted = list(names)
        return zip(wanted, self._read([self.variables[n] for n in wanted]), strict=True)


class ValuesBefore:
    """The variables of a model before it predicts: seeds by value, weights by their digests."""

    def __init__(self, model: keras.Model) -> None:
        self._weights = list(model.weights)
        held = {id(v) for v in self._weights}
        self._seeds = [v for v in variables_of_model(model).values() if id(v) not in held]
        self._values = [value.copy() for value in values_of(self._seeds)]
        self._digests = self._digests_now()

    def give_back(self) -> bool:
        """Sets the seeds again; False if a weight is another one than before."""
        for variable, value in zip(self._seeds, self._values, strict=True):
            variable.assign(value)
        return self._digests_now() == self._digests

    def _digests_now(self) -> list[int]:
        return [_digest(value) for weight in self._weights for value in values_of([weight])]


def load_carried_state(model: keras.Model, content: bytes) -> None:
    """Sets the variables of a Keras model from what :meth:`CarriedState.to_bytes` returned."""
    for variable, value in paired(variables_by_name(model), content):
        variable.assign(value)


def untrusted_values(model: keras.Model, lossy: frozenset[str] = frozenset()) -> dict[str, Array]:
    """The values that a ``.keras`` file is not trusted with, by name.

    These are small ones, all of a layer with adapters (LoRA: Keras adds them to the kernel when it
    saves, and sets them to zero when it loads) and of one that saves its variables by code of the
    user's own, and those of ``lossy``.
    """
    doubtful = {
        id(variable)
        for layer in model._flatten_layers(include_self=True, recursive=True)
        if getattr(layer, "lora_enabled", False)
        or not comes_with_keras(type(layer).save_own_variables)
        or not comes_with_keras(type(layer).load_own_variables)
        for variable in layer.variables
    }
    found = {
        name: variable
        for name, variable in variables_by_name(model).items()
        if name in lossy or id(variable) in doubtful or _size(variable) <= SMALL
    }
    return dict(zip(found, map(_sent, values_of(list(found.values()))), strict=True))


def _sent(value: Array) -> Array:
    """A value as it travels: one 0 stands for many, as in the slots of an optimizer that is new."""
    value = plain(value)
    if value.size > SMALL and is_zero(value):
        return np.zeros((), value.dtype)
    return value if value.flags.owndata else value.copy()  # PyTorch's is the variable's memory


def is_zero(value: Array) -> bool:
    """Whether an array is 0 all over, and nowhere -0."""
    bits = np.ascontiguousarray(value).view(np.uint8)
    return not bits[:1].any() and not bits.any()


def names_in_buffer(model: keras.Model) -> set[str]:
    """The names of the variables that a flat float32 buffer holds as they are."""
    held = {id(v) for v in exchanged_variables(model)}
    variables = variables_of_model(model).items()
    return {name for name, v in variables if id(v) in held and not is_wide(v)}


def whole_names(model: keras.Model, *, large: bool) -> frozenset[str]:
    """The names of all variables.

    Empty where a file brings more to an equal model (layers that load tables, or by code of the
    user's own), and for a model of more than 2^17 elements unless ``large``.
    """
    sizes = {name: _size(variable) for name, variable in variables_by_name(model).items()}
    layers = model._flatten_layers(include_self=True, recursive=True)
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    is_whole = large or sum(sizes.values()) <= _WHOLE
    is_whole &= all(comes_with_keras(part) for part in (*layers, *model.metrics, inner or model))
    is_whole &= all(type(layer).load_own_variables in _LOADS_VARIABLES for layer in layers)
    return frozenset(sizes if is_whole else ())


def variables_of_model(model: keras.Model) -> dict[str, Any]:
    """The variables of a model by their number: ``'model 3'``.

    With what changes in training and is in no list of Keras: the states of stateful RNN layers, and
    Nadam's product of decays in a ``LossScaleOptimizer``. (On JAX Keras' steps do not change them.)
    """
    named = {f"model {i}": variable for i, variable in enumerate(model.variables)}
    if keras.backend.backend() == "jax":
        return named
    named |= {f"model, hidden {i}": state for i, state in enumerate(hidden_states(model))}
    hidden = _hidden_in(getattr(model, "optimizer", None))
    return named | {f"optimizer, hidden {i}": variable for i, variable in enumerate(hidden)}


def _hidden_in(optimizer: keras.Optimizer | None) -> list[Any]:
    found: list[Any] = []
    known = {id(v) for v in optimizer.variables} if optimizer is not None else set()
    while optimizer is not None:
        held = vars(optimizer).values() if optimizer.built else ()
        found += [v for v in held if isinstance(v, keras.Variable) and id(v) not in known]
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return found


def hidden_states(model: keras.Model) -> list[Any]:
    """The states of stateful RNN layers, which Keras lists among no variables."""
    states = (s for layer in stateful_layers(model) for s in keras.tree.flatten(layer.states))
    return [state for state in states if state is not None]


def require_no_states(model: keras.Model) -> None:
    """Raises ModelError for a model that several workers cannot train: its states are of a batch.

    One process on the global batch would have a state for each of its rows.
    """
    layers = stateful_layers(model)
    if layers:
        raise ModelError(
            f"model {model.name!r} cannot be trained by several workers",
            expected="layers without stateful=True",
            received=f"layer {layers[0].name!r}, whose states belong to the rows of one batch",
            hint="num_workers=1 trains it as Keras does",
        )


def stateful_layers(model: keras.Model) -> list[Any]:
    """The RNN layers of a model that go on with the states of the batch before."""
    layers = model._flatten_layers(include_self=False, recursive=True)
    return [layer for layer in layers if isinstance(layer, keras.layers.RNN) and layer.stateful]


def variables_by_name(model: keras.Model) -> dict[str, Any]:
    """The variables of a model and of its optimizer: ``'model 3'``, ``'optimizer 0'``."""
    optimizer: Any = getattr(model, "optimizer", None)
    known = [] if optimizer is None or not optimizer.built else optimizer.variables
    return variables_of_model(model) | {f"optimizer {i}": v for i, v in enumerate(known)}


def paired(variables: Mapping[str, Any], content: bytes) -> list[tuple[Any, Array]]:
    """Variables by name, each with its value in ``content``, packed; see :func:`matched`."""
    found = unpack_arrays(content, "the state of the model") if content else {}
    return matched(variables, found)


def matched(
    variables: Mapping[str, Any], found: Mapping[str, Array], optional: str | None = None
) -> list[tuple[Any, Array]]:
    """Variables, each with its value, both by name; one number is that of a whole variable.

    Args:
        optional: Names that begin so may be without a variable.

    Raises:
        ModelError: The values are of other variables.
    """
    if optional is not None and not any(name.startswith(optional) for name in variables):
        found = {n: v for n, v in found.items() if not n.startswith(optional)}
    pairs = []
    for name, value in found.items():
        if name in variables and not value.shape:
            value = np.full(tuple(variables[name].shape), value)
        if name not in variables or tuple(variables[name].shape) != value.shape:
            shape = tuple(variables[name].shape) if name in variables else "no such variable"
            raise ModelError(
                "the state does not fit the model", expected=f"variable {name}: {shape}",
                received=f"shape {value.shape}",
                hint="was the model changed since the state was saved?",
            )  # fmt: skip
        pairs.append((variables[name], value))
    return pairs


def is_wide(variable: keras.Variable) -> bool:
    """Whether float32 does not hold the values of a float variable."""
    return bool(keras.backend.standardize_dtype(variable.dtype) == "float64")


def values_of(variables: Sequence[Any]) -> list[Array]:
    """The values of Keras variables."""
    return [np.asarray(keras.ops.convert_to_numpy(v.value)) for v in variables]


def plain(value: Array) -> Array:
    """An array of a dtype that NumPy's files know: others (bfloat16) become float32."""
    return value.astype(np.float32) if value.dtype.kind == "V" else value


def _size(variable: keras.Variable) -> int:
    return int(np.prod(variable.shape))


def _digest(value: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
