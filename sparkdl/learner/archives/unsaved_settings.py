"""Settings of a model that Keras keeps neither in its configuration nor among its weights.

The driver notes all of them (:class:`UnsavedSettings`); they travel beside the model's file
(:class:`BesideFile`), and a worker gives them to the model that it has loaded. See the table in
docs/keras.md.

Attributes that no configuration has are found by comparing two models that should be equal, part by
part (:func:`compared_parts`). Only values that can be told apart are looked at: numbers, texts,
arrays, tensors, containers of these, functions by their code, and objects of such attributes.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras.src.backend.common.remat import RematMode
from keras.src.saving import saving_lib

from sparkdl.errors import ModelError
from sparkdl.learner.archives.value_forms import (
    UNKNOWN,
    form_of,
    is_plain,
    numbers_of,
    plain_copy,
    with_numbers,
)
from sparkdl.learner.custom_objects import comes_with_keras, compile_settings
from sparkdl.learner.framework import jax_takes_64_bits, replaced
from sparkdl.learner.preprocessing import preprocessor_of
from sparkdl.learner.state.carried_state import matched, variables_by_name
from sparkdl.learner.state.model_weights import (
    Orders,
    attributes_of_keras,
    held_in_order,
    orders_of,
)
from sparkdl.learner.state.optimizer_state import innermost_optimizer
from sparkdl.process import payload

if TYPE_CHECKING:
    from sparkdl.learner.archives.archive import ModelArchive

Attributes = dict[int, dict[str, Any]]
"""Number of a part of the model -> attribute -> value."""


@dataclass(frozen=True)
class GlobalSettings:
    """Settings of Keras that a process has, not a model."""

    floatx: str
    epsilon: float
    image_data_format: str
    dtype_policy: Any
    flash_attention: bool | None
    wide_numbers: bool

    @classmethod
    def now(cls) -> GlobalSettings:
        """Those of this thread and process."""
        return cls(
            keras.config.floatx(), keras.config.epsilon(), keras.config.image_data_format(),
            keras.dtype_policies.serialize(keras.config.dtype_policy()), _flash_attention(),
            jax_takes_64_bits(),
        )  # fmt: skip

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Within, this thread and process have these settings."""
        before, state = GlobalSettings.now(), keras.src.backend.common.global_state
        policy = state.get_global_attribute("dtype_policy")
        self._apply()
        try:
            yield
        finally:
            before._apply()
            state.set_global_attribute("dtype_policy", policy)

    def _apply(self) -> None:
        keras.config.set_floatx(self.floatx)
        keras.config.set_epsilon(self.epsilon)
        keras.config.set_image_data_format(self.image_data_format)
        if keras.dtype_policies.serialize(keras.config.dtype_policy()) != self.dtype_policy:
            keras.config.set_dtype_policy(keras.dtype_policies.get(self.dtype_policy))
        if self.flash_attention is not _flash_attention():
            keras.src.backend.common.global_state.set_global_attribute(
                "flash_attention", self.flash_attention
            )
        if self.wide_numbers is not jax_takes_64_bits():
            import jax

            jax.config.update("jax_enable_x64", self.wide_numbers)


@dataclass(frozen=True)
class UnsavedSettings:
    """The settings that make a loaded model the one that was saved.

    Args:
        globals: Of Keras.
        policies: The dtype policy of each layer, in the order of ``_flatten_layers``.
        remat: What each layer recomputes in the backward pass; None for nothing.
        adapters: What :func:`_adapters` says of each layer.
        held: What :func:`_held` says of each layer.
        learns: Whether each layer is trainable, which it uses in its call, too.
        trainable: Of each variable.
        regularizers: Number of a variable -> its regularizer, as Keras serializes it.
        constraints: Number of a variable -> its constraint.
        scales_loss: Whether the optimizer is in a ``LossScaleOptimizer``.
        stepped: The numbers of the variables that the optimizer knows.
        decays: Whether weight decay applies to each of them.
        orders: The order of what each layer holds, see :func:`orders_of`.
        rows: Settings of the preprocessor, of which KerasHub's do not tell all (lengths).
        attributes: What else differs from a model that is made from the configuration.
    """

    globals: GlobalSettings
    policies: list[Any]
    remat: list[tuple[Any, ...] | None]
    adapters: list[tuple[int, Any] | None]
    held: list[dict[str, dict[str, Any]] | None]
    learns: list[bool | None]
    trainable: list[bool]
    regularizers: dict[int, Any]
    constraints: dict[int, Any]
    scales_loss: bool
    stepped: list[int] | None
    decays: list[bool]
    orders: Orders
    rows: dict[str, Any]
    attributes: Attributes = field(default_factory=dict)

    @classmethod
    def of(cls, model: keras.Model) -> UnsavedSettings:
        """The settings of a built model."""
        variables, optimizer = model.variables, getattr(model, "optimizer", None)
        parts = parts_of(model)
        return cls(
            GlobalSettings.now(),
            [keras.dtype_policies.serialize(p.dtype_policy) for p in parts],
            [_remat(layer) for layer in parts],
            [_adapters(layer) for layer in parts],
            [_held(layer) for layer in parts],
            [bool(layer._trainable) for layer in parts],
            [bool(v.trainable) for v in variables],
            _saved_parts(variables, "regularizer"),
            _saved_parts(variables, "constraint"),
            optimizer is not None and innermost_optimizer(model) is not optimizer,
            *_stepped(model),
            orders_of(model),
            _settings_of_rows(preprocessor_of(model)),
        )  # fmt: skip

    @property
    def key(self) -> bytes:
        """Bytes that equal settings share."""
        return payload.dump(self)

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Within, this thread and process have Keras' settings, and a file is loaded whose values
        have no place until :meth:`give_adapters` has quantized the layers."""
        later, name = any(map(_quantizes, self.policies)), "_raise_loading_failure"
        with self.globals.set(), replaced(saving_lib, name, lambda *_, **__: None, later):
            yield

    def placed(self, places: Sequence[int | None]) -> UnsavedSettings:
        """The same for a model with parts in other places: for each its number here, or None."""
        if list(places) == list(range(len(self.policies))):
            return self

        of_parts = {n: vars(self)[n] for n in ("policies", "remat", "adapters", "held", "learns")}
        moved: dict[str, Any]
        moved = {n: [None if p is None else of[p] for p in places] for n, of in of_parts.items()}
        return replace(self, **moved)

    def give_adapters(self, model: keras.Model) -> bool:
        """Gives a loaded model policies, and the adapters, quantized layers and variables of layers
        that its configuration lacks; False if it has them."""
        changed = False
        for layer, policy in zip(parts_of(model), self.policies, strict=False):
            if policy is not None and keras.dtype_policies.serialize(layer.dtype_policy) != policy:
                if isinstance(layer.dtype_policy, keras.dtype_policies.DTypePolicyMap):
                    layer._dtype_policy = layer.dtype_policy.default_policy  # quantize wants a name
                layer.dtype_policy = keras.dtype_policies.get(policy)
                changed |= _quantizes(policy)
        for layer, wanted in zip(parts_of(model), self.adapters, strict=False):
            if wanted is not None and _adapters(layer) is None and hasattr(layer, "enable_lora"):
                rank, alpha = wanted
                layer.enable_lora(rank, **({} if alpha is None else {"lora_alpha": alpha}))
                changed = True
        for layer, held in zip(parts_of(model), self.held, strict=False):
            for name in (n for n in held or {} if getattr(layer, n, None) is None):
                locked, layer._tracker.locked = layer._tracker.locked, False
                setattr(layer, name, keras.Variable("zeros", **(held or {})[name]))
                layer._tracker.locked, changed = locked, True
        return changed

    def put_in_order(self, model: keras.Model) -> bool:
        """Puts layers, variables, seeds and metrics of a loaded model in order; False if they are.

        A layer that was quantized, a head that was replaced, layers named by a set have another.
        """
        changed = False
        for place, held, names in held_in_order(model):
            wanted = self.orders.get(place, names)
            if names == wanted or sorted(names) != sorted(wanted):
                continue
            changed = True
            numbers = [names.index(name) for name in wanted]
            if isinstance(held, dict):
                pairs = list(held.items())
                dict.clear(held)  # without Keras, which notes what goes and what comes
                for number in numbers:
                    dict.__setitem__(held, *pairs[number])
            else:
                held[:] = [held[number] for number in numbers]
        return changed

    def odd_place(self, model: keras.Model) -> str:
        """The first layer, variable or seed that is at another place in a model, in words."""
        found = orders_of(model)
        for place, wanted in self.orders.items():
            names = found.get(place, [])
            if names != wanted and not place.endswith("_metrics"):
                its = sorted({*names} - {*wanted}) or "nothing"
                mine = sorted({*wanted} - {*names}) or "nothing"
                return f"{its} in place of {mine}, in {place}"
        return ""

    def apply(self, model: keras.Model, custom_objects: dict[str, Any]) -> bool:
        """Gives a model that was just loaded these settings.

        Returns:
            Whether what it holds has changed places, so that the file must be read again.

        Raises:
            ModelError: It holds other things than these settings are of.
        """
        changed = self.put_in_order(model)
        if self.give_adapters(model):
            self.put_in_order(model)
        if odd := self.odd_place(model):
            raise ModelError(
                f"model {model.name!r} is made otherwise here than on the driver",
                expected="the same layers and variables", received=odd,
                hint="what the constructor and build make must not depend on the process",
            )  # fmt: skip
        for layer, learns in zip(parts_of(model), self.learns, strict=True):
            if learns is not None:
                layer._trainable = learns  # alone: its setter changes the layers within, too
        for layer, remat in zip(parts_of(model), self.remat, strict=True):
            if remat != _remat(layer):
                layer._remat_mode = None if remat is None else RematMode(*remat)
        with keras.saving.custom_object_scope(custom_objects):
            for number, variable in enumerate(model.variables):
                if variable.trainable != self.trainable[number]:
                    variable.trainable = self.trainable[number]
                _set_part(variable, "regularizer", self.regularizers.get(number))
                _set_part(variable, "constraint", self.constraints.get(number))
        before = preprocessor_of(model)
        for name, value in _settings_of_rows(before).items():
            if self.rows.get(name, value) != value:
                setattr(before, name, self.rows[name])
        if getattr(model, "optimizer", None) is not None and self.stepped is not None:
            self._apply_to_optimizer(model, self.stepped)
        give_attributes(model, self.attributes)
        return changed

    def _apply_to_optimizer(self, model: keras.Model, stepped: list[int]) -> None:
        optimizer = model.optimizer
        if not self.scales_loss and innermost_optimizer(model) is not optimizer:
            optimizer = innermost_optimizer(model)  # compile wraps it by the policy
        known = [model.variables[number] for number in stepped]
        built = list(optimizer._trainable_variables) if optimizer.built else []
        if [id(v) for v in built] != [id(v) for v in known]:
            optimizer = type(optimizer).from_config(optimizer.get_config())
            optimizer.build(known)
        if optimizer is not model.optimizer:
            model.optimizer = optimizer
        if not all(self.decays):
            inner = innermost_optimizer(model)
            pairs = zip(known, self.decays, strict=True)
            # What exclude_from_weight_decay sets; it refuses an optimizer that is built.
            inner._exclude_from_weight_decay = {
                inner._var_key(v) for v, decays in pairs if not decays
            }
            inner._exclude_from_weight_decay_pattern = None
            inner._exclude_from_weight_decay_cache = {}


def _settings_of_rows(before: object) -> dict[str, Any]:
    """The plain arguments of a preprocessor's constructor, as it has them now."""
    told = () if before is None else inspect.signature(type(before).__init__).parameters
    kept = {name: getattr(before, name, None) for name in told}
    return {n: v for n, v in kept.items() if isinstance(v, (bool, int, float, str))}


def parts_of(model: keras.Model) -> list[Any]:
    """The model and the layers that compute its outputs, in an order that an equal model has, too.

    Left out are input layers, which a model that was loaded may have more often, and what makes
    rows of texts, which makes layers of its own when it is called first.
    """
    layers = model._flatten_layers(include_self=True, recursive=True)
    before = preprocessor_of(model)
    own = before._flatten_layers() if isinstance(before, keras.Layer) else ()
    dropped = {id(layer) for layer in own}
    kinds = (keras.metrics.Metric, keras.layers.InputLayer)
    return [p for p in layers if not isinstance(p, kinds) and id(p) not in dropped]


def _adapters(layer: keras.Layer) -> tuple[int, Any] | None:
    if not getattr(layer, "lora_enabled", False):
        return None
    return int(layer.lora_rank), getattr(layer, "lora_alpha", None)


def _held(layer: keras.Layer) -> dict[str, dict[str, Any]] | None:
    """Attribute -> how to make the variable there, which may have come after the constructor."""
    return None if comes_with_keras(type(layer)) else {
        name: {"shape": tuple(v.shape), "dtype": v.dtype, "trainable": v.trainable,
               "name": re.sub("_[0-9]+$", "", v.name)}
        for name, v in vars(layer).items() if isinstance(v, keras.Variable)
    }  # fmt: skip


def _quantizes(policy: object) -> bool:
    return policy is not None and keras.dtype_policies.get(policy).quantization_mode is not None


def _remat(layer: keras.Layer) -> tuple[Any, ...] | None:
    mode = getattr(layer, "_remat_mode", None)  # older versions of Keras have none
    return None if mode is None else tuple(plain_copy(part) for part in mode)


def _stepped(model: keras.Model) -> tuple[list[int] | None, list[bool]]:
    """The numbers of the variables that the optimizer knows, and whether it decays each."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return None, []
    numbers = {id(variable): number for number, variable in enumerate(model.variables)}
    known = optimizer._trainable_variables
    if any(id(variable) not in numbers for variable in known):
        return None, []
    inner = innermost_optimizer(model)
    return [numbers[id(v)] for v in known], [bool(inner._use_weight_decay(v)) for v in known]


def _saved_parts(variables: Sequence[Any], name: str) -> dict[int, Any]:
    parts = {i: getattr(variable, name, None) for i, variable in enumerate(variables)}
    return {i: _saved_part(part, name) for i, part in parts.items() if part is not None}


def _saved_part(part: Any, name: str) -> Any:
    """A regularizer or constraint as Keras serializes it; a function comes with its layer."""
    if part is None or isinstance(part, FunctionType):
        return part and "a function"
    return getattr(keras, f"{name}s").serialize(part)


def _set_part(variable: keras.Variable, name: str, saved: Any) -> None:
    if saved != _saved_part(getattr(variable, name, None), name):
        made = None if saved is None else getattr(keras, f"{name}s").deserialize(saved)
        setattr(variable, name, made)


def _flash_attention() -> bool | None:
    state = keras.src.backend.common.global_state
    found: bool | None = state.get_global_attribute("flash_attention")
    return found


@dataclass(frozen=True)
class OwnAttributes:
    """The plain attributes that objects of the user's own classes in a model have now.

    Code of a layer may set some while it is traced or trains (``self.calls += 1``).

    Args:
        values: Number of a part -> attribute -> value; for parts of the user's own classes.
    """

    values: Attributes

    @classmethod
    def of(cls, model: keras.Model) -> OwnAttributes:
        """Those of a model that was just made."""
        return cls({
            number: {name: plain_copy(vars(part.thing)[name]) for name in part.plain_names()}
            for number, part in enumerate(compared_parts(model)) if part.own
        })  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self.values)

    def give_back(self, model: keras.Model) -> None:
        """Sets those of the same model that have changed since, and takes away new ones."""
        if not self.values:
            return
        parts = compared_parts(model)
        for number, values in self.values.items():
            present = vars(parts[number].thing)
            for name in parts[number].plain_names():
                if name not in values:
                    if not name.startswith("_"):  # Keras' own, as a step made it
                        del present[name]
                elif form_of(values[name]) != parts[number].attributes[name]:
                    present[name] = plain_copy(values[name])
            present |= {name: plain_copy(v) for name, v in values.items() if name not in present}


_NO_SETTINGS = frozenset({
    "name", "built", "compiled", "stop_training", "stop_evaluating", "stop_predicting",
    "supports_jit", "supports_masking", "loss",
    "train_function", "test_function", "predict_function", "input_names", "output_names",
    "training", "stateful", "is_adapted", "is_gptq_calibrated", "is_awq_calibrated",
    "build_config", "_eval_epoch_iterator", "_exclude_from_weight_decay_cache",
})  # fmt: skip
"""Attributes of Keras that follow from how far a model is built, or from its configuration."""
_PYTORCH = ("_buffers", "_parameters")
_SETTINGS = frozenset({"_run_eagerly", "_jit_compile", "_fn_kwargs"})
"""Settings of Keras that begin with an underscore, and not all are in a configuration: arguments of
a loss or a metric are there (``delta`` of Huber, ``axis`` of CosineSimilarity)."""


@dataclass(frozen=True)
class ComparedPart:
    """The comparable attributes of one layer, loss, metric or optimizer.

    Args:
        thing: The object itself; None in what is kept of a model.
        kind: Its class, in words.
        own: Whether the class is the user's.
        attributes: Name -> a form of the value that equal values share.
    """

    thing: Any
    label: str
    kind: str
    own: bool
    attributes: Mapping[str, Any]

    def plain_names(self) -> list[str]:
        """The attributes that are numbers, texts, arrays and containers of these."""
        return [name for name in self.attributes if is_plain(attributes_of(self.thing)[name])]

    def kept(self) -> ComparedPart:
        """The same without the object."""
        return ComparedPart(None, self.label, self.kind, self.own, self.attributes)


def compared_parts(model: keras.Model) -> list[ComparedPart]:
    """The layers of a model, what it was compiled with, and its optimizers, in one order."""
    things = [("layer", thing) for thing in parts_of(model)]
    settings = compile_settings(model)
    for name in ("loss", "metrics", "weighted_metrics"):
        given = settings.get(name)
        found = [] if given is None else keras.tree.flatten(given)
        kinds = (keras.losses.Loss, keras.metrics.Metric)
        things += [(name.rstrip("s"), thing) for thing in found if isinstance(thing, kinds)]
    optimizer = getattr(model, "optimizer", None)
    while optimizer is not None:
        things.append(("optimizer", optimizer))
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return [_part(what, thing) for what, thing in things]


def _part(what: str, thing: object) -> ComparedPart:
    kind, own = type(thing), not comes_with_keras(type(thing))
    attributes = {
        name: form_of(value)
        for name, value in attributes_of(thing).items()
        if not _is_inner(name, kind) and name not in _NO_SETTINGS
    }
    attributes = {name: form for name, form in attributes.items() if form is not UNKNOWN}
    name = getattr(thing, "name", None) or kind.__name__
    label = f"{what} {name!r}" if what != "optimizer" else f"optimizer {kind.__name__}"
    return ComparedPart(thing, label, f"{kind.__module__}.{kind.__qualname__}", own, attributes)


def attributes_of(thing: Any) -> dict[str, Any]:
    """Name -> value of an object's attributes; also buffers and parameters of PyTorch."""
    found = dict(vars(thing))
    for inside in _PYTORCH:
        found |= found.pop(inside, None) or {}
    if type(thing).__name__ == "TorchModuleWrapper":
        found |= {f"module.{name}": value for name, value in thing.module.named_buffers()}
    return found


def _is_inner(name: str, kind: type) -> bool:
    if name in _SETTINGS:
        return False
    if name.startswith("__") or name in attributes_of_keras():
        return name.startswith("_")
    return name.startswith("_") and comes_with_keras(kind)


@dataclass(frozen=True)
class BesideFile:
    """The settings for a model that was loaded from its file.

    Args:
        settings: Those that no configuration has.
        whole: Whether an equal model, to become this one, needs the archive's values alone.
        space: The ``FeatureSpace`` that makes the model's inputs of rows.
    """

    settings: UnsavedSettings
    whole: bool = False
    space: ModelArchive | None = None

    @staticmethod
    def give_values(model: keras.Model, values: Mapping[str, Any]) -> None:
        """Sets the variables whose values are not those of the file; without compile settings
        those of the model alone."""
        for variable, value in matched(variables_by_name(model), values, optional="optimizer"):
            variable.assign(value)


def give_attributes(model: keras.Model, attributes: Attributes) -> None:
    """Gives the parts of a loaded model the attributes that differ."""
    if not attributes:
        return
    parts = compared_parts(model)
    for number, values in attributes.items():
        thing = parts[number].thing
        for name, value in values.items():
            held = vars(thing)
            for inside in _PYTORCH:
                held = vars(thing)[inside] if name in vars(thing).get(inside, ()) else held
            present = attributes_of(thing).get(name)
            tensor = isinstance(value, np.ndarray) and numbers_of(present) is not None
            value = with_numbers(present, value) if tensor else value
            if value is not present:
                held[name] = value
