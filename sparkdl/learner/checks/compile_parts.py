"""A model's compile settings: whether the workers can make them again, and evaluate by them.

Each worker keeps the metrics of its own rows; the driver sums their variables and asks the metric
for its result. That gives the metric of all rows exactly when the variables are sums over rows,
from zero on:

    state(A then B) = state(A) + state(B),   state(nothing) = 0

All of Keras' own metrics are such (mean: total and count; AUC and confusion matrices: counts;
F1, R2, IoU: sums). A metric with an ``update_state`` of the user's own is tried on made-up rows; a
metric that keeps a largest value or a running mean fails the trial and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.data.columns import ColumnSpec
from sparkdl.errors import ModelError
from sparkdl.learner.archives.archive import lenient_constructors, making_models
from sparkdl.learner.custom_objects import (
    compiled_objects,
    find_custom_objects,
    named_functions,
    own_compile_settings,
    untold,
)
from sparkdl.learner.signature import distinct, has_own, traced
from sparkdl.learner.state.metric_state import flatten_arrays
from sparkdl.learner.structure import arrange, arrange_inputs

_PLAIN = (bool, int, float, str, np.ndarray, np.generic, type(None))
_KINDS = {
    "loss": keras.losses.Loss,
    "metric": keras.metrics.Metric,
    "optimizer": keras.optimizers.Optimizer,
}


def _require_remakable(model: keras.Model, part: object, objects: dict[str, Any]) -> None:
    given = {"custom_objects": objects, "safe_mode": False}
    try:
        saved = keras.saving.serialize_keras_object(part)
        lacking = untold(type(part), saved["config"])
        copy = keras.saving.deserialize_keras_object(saved, **given)
    except TypeError as error:
        needed = [name for name, one in lacking.items() if one.default is one.empty]
        received = str(error).rpartition("Exception encountered: ")[2]
        raise _refusal(model, part, needed, received) from error
    except NotImplementedError as error:  # a schedule without get_config
        raise _refusal(model, part, [*untold(type(part), ())], str(error)) from error
    except Exception:  # told where the model is saved, with what Keras says of it
        return
    lost = [name for name in lacking if _differs(_value(part, name), _value(copy, name))]
    if lost:
        received = ", ".join(
            f"{n}={_value(part, n)!r}, which becomes {_value(copy, n)!r}" for n in lost
        )
        raise _refusal(model, part, lost, received)


def _value(thing: object, argument: str) -> Any:
    return getattr(thing, "__dict__", {}).get(_attribute(thing, argument))


def _attribute(thing: object, argument: str) -> str:
    hidden = f"_{argument}"
    return hidden if hidden in getattr(thing, "__dict__", {}) else argument


def _differs(one: object, other: object) -> bool:
    plain = [all(isinstance(v, _PLAIN) for v in keras.tree.flatten(x)) for x in (one, other)]
    return plain[0] != plain[1] or (all(plain) and repr(one) != repr(other))


def _refusal(model: keras.Model, part: object, arguments: list[str], received: str) -> ModelError:
    name = type(part).__name__
    kind = next((kind for kind, cls in _KINDS.items() if isinstance(part, cls)), "object")
    line = ", ".join(f"{a!r}: self.{_attribute(part, a)}" for a in arguments) or "..."
    return ModelError(
        f"{kind} {name} of model {model.name!r} cannot be made again on the workers",
        expected="get_config with the arguments of its constructor, as for model.save",
        received=received,
        hint=f"in class {name}: def get_config(self): return {{**super().get_config(), {line}}}",
    )


def require_loadable(model: keras.Model) -> None:
    """Refuses a model whose workers' copy would lack something that it is compiled with.

    Keras sends an object of the user's own as its class and what ``get_config`` returns. Layers
    tell the arguments of their constructor without a ``get_config``; losses, metrics and optimizers
    do not.

    Raises:
        ModelError: An argument of a ``compile`` of its own would be lost; a class does not tell an
            argument of its constructor; or Keras keeps variables in Flax's NNX.
    """
    _, lost = own_compile_settings(model)
    if lost and not has_own(model, "compile_from_config"):
        raise ModelError(
            f"model {model.name!r} cannot be compiled again on the workers",
            expected="arguments of a compile of its own that the model keeps as attributes, or "
            "get_compile_config and compile_from_config",
            received=f"{type(model).__name__}.compile with {', '.join(lost)}",
            hint="get_compile_config(self) returns the arguments of compile as a dict (optimizers "
            "by keras.saving.serialize_keras_object), compile_from_config(self, config) calls "
            "self.compile with them",
        )
    if getattr(keras.config, "is_nnx_enabled", bool)():  # since Keras 3.11
        raise ModelError(
            "models that keep their variables in Flax's NNX cannot be trained by workers",
            expected="keras.config.is_nnx_enabled() False", received="True",
            hint="start Python without KERAS_NNX_ENABLED",
        )  # fmt: skip
    parts = compiled_objects(model)
    if not parts:
        return
    objects = find_custom_objects(model)
    with making_models, named_functions(model) as functions, lenient_constructors(objects):
        for part in parts:
            _require_remakable(model, part, {**objects, **functions})


def require_evaluable(model: keras.Model) -> None:
    """Raises ModelError unless the model can be evaluated.

    A ``train_step`` of its own says nothing of what Keras' ``test_step`` computes: that needs a
    compiled loss, losses that layers add, or a ``compute_loss`` of the model's own.
    """
    if model._compile_loss is None and not has_own(model, "compute_loss", "test_step"):
        if adds_loss(type(model)) or layers_can_add_loss(model):
            return
        raise ModelError(
            f"model {model.name!r} cannot be evaluated: it has no loss",
            expected="a test_step of the model's own beside its train_step, or model.compile with "
            "a loss",
            received="Keras' test_step and no loss",
            hint="write test_step(self, data) like train_step, without the optimizer",
        )


def adds_loss(kind: type) -> bool:
    """Whether a method of the user's own class calls ``add_loss``."""
    own = (base for base in kind.__mro__ if not base.__module__.startswith("keras."))
    methods = (method for base in own for method in vars(base).values())
    return any(isinstance(m, FunctionType) and "add_loss" in m.__code__.co_names for m in methods)


def layers_can_add_loss(model: keras.Model) -> bool:
    """Whether a layer may add a loss when the model is called."""
    return bool(model.losses) or any(
        not type(layer).__module__.startswith("keras.")
        or isinstance(layer, keras.layers.ActivityRegularization)
        or getattr(layer, "activity_regularizer", None) is not None
        for layer in model._flatten_layers(include_self=False)
    )


DECLARATION = "sums_over_workers"
"""Class attribute by which a metric says that its variables are sums (True) or are not (False)."""
_ROWS = (5, 3)
_FREE_DIMENSION = 4


def check_metrics_add_up(
    model: keras.Model, x: Mapping[str, Any], labels: Mapping[str, ColumnSpec]
) -> None:
    """Refuses metrics whose variables must not be summed. The metrics must be built.

    Metrics of Keras cost nothing; only a metric with an ``update_state`` of its own is tried out.
    It is reset afterwards.

    Args:
        model: Compiled.
        x: Input name -> anything with ``shape`` (a batch's) and ``dtype``.
        labels: Output name -> its labels.

    Raises:
        ModelError: A metric is not a sum over rows, or the trial raises an error.
    """
    unknown = [(m, place) for m, place in _metrics(model) if not _known(m)]
    if not unknown:
        return
    batches = _made_up(model, x, labels)
    for metric, place in unknown:
        _try_out(model, metric, [(y[place], predicted[place]) for y, predicted in batches])


def _metrics(model: keras.Model) -> Iterator[tuple[Any, int]]:
    for metric in model.metrics:
        per_output = getattr(metric, "_flat_metrics", None)
        if per_output is None:
            yield metric, 0
            continue
        for parts in (per_output, metric._flat_weighted_metrics):
            for place, part in enumerate(parts):
                for one in getattr(part, "metrics", [] if part is None else [part]):
                    yield one, place


def _known(metric: Any) -> bool:
    if getattr(metric, DECLARATION, None) is not None:
        return bool(getattr(metric, DECLARATION))
    module: str = type(metric).update_state.__module__
    return module.split(".")[0] == "keras"


def _try_out(model: keras.Model, metric: keras.Metric, batches: list[tuple[Any, Any]]) -> None:
    if getattr(metric, DECLARATION, None) is False:
        raise _no_sum(model, metric, f"{DECLARATION} = False")
    try:
        nothing = _state_after(metric, [])
        apart = sum((_state_after(metric, [batch]) for batch in batches), np.zeros_like(nothing))
        together = _state_after(metric, batches)
    except Exception as error:
        raise _no_sum(model, metric, f"{type(error).__name__} on made-up rows: {error}") from error
    finally:
        metric.reset_state()
    if nothing.any():
        raise _no_sum(model, metric, f"variables that start at {nothing.tolist()[:8]}")
    if not np.allclose(apart, together, rtol=1e-4, atol=1e-5):
        raise _no_sum(
            model, metric, f"{together.tolist()[:8]} for two batches, "
            f"but {apart.tolist()[:8]} as the sum of one and the other",
        )  # fmt: skip


def _state_after(metric: keras.Metric, batches: list[tuple[Any, Any]]) -> npt.NDArray[np.float64]:
    metric.reset_state()
    for y, predicted in batches:
        metric.update_state(keras.ops.convert_to_tensor(y), keras.ops.convert_to_tensor(predicted))
    return flatten_arrays(keras.ops.convert_to_numpy(v) for v in metric.variables)


def _no_sum(model: keras.Model, metric: keras.Metric, received: str) -> ModelError:
    return ModelError(
        f"metric {metric.name!r} of model {model.name!r} cannot be summed over the workers",
        expected="variables that start at zero and are sums over rows: "
        "state(A and B) = state(A) + state(B)",
        received=received,
        hint=f"keep sums and divide in result(); if they are sums, say so in the class: "
        f"{DECLARATION} = True",
    )


def _made_up(
    model: keras.Model, x: Mapping[str, Any], labels: Mapping[str, ColumnSpec]
) -> list[tuple[list[Any], list[Any]]]:
    """Two batches: for each, the labels and the predictions by number of the output."""
    rng = np.random.default_rng(0)
    inputs = {n: keras.KerasTensor(e.shape, keras.backend.standardize_dtype(e.dtype))
              for n, e in x.items()}  # fmt: skip
    given = arrange_inputs(model, inputs)
    found = traced(model, given)  # not by a compute_output_shape that only the user's layers call
    outputs = keras.tree.flatten(model.compute_output_spec(given) if found is None else found)
    names = distinct(getattr(model, "output_names", None) or list(labels))
    struct = getattr(model, "_outputs_struct", None)
    shapes = dict(zip(names, (tuple(o.shape[1:]) for o in outputs), strict=False))
    batches = []
    for rows in _ROWS:
        y = {name: _labels(rng, rows, spec, shapes.get(name)) for name, spec in labels.items()}
        predicted = [
            rng.uniform(0.1, 0.9, (rows, *_sizes(o.shape[1:]))).astype("float32") for o in outputs
        ]
        batches.append((keras.tree.flatten(arrange(y, struct, names)), predicted))
    return batches


def _labels(
    rng: np.random.Generator, rows: int, spec: ColumnSpec, output: tuple[int | None, ...] | None
) -> npt.NDArray[Any]:
    """Labels, as wide as the output where they do not say how wide they are."""
    known = spec.shape
    if output is not None and len(output) == len(known):
        known = tuple(o if d is None else d for d, o in zip(known, output, strict=True))
    shape = (rows, *_sizes(known))
    if spec.one_hot is not None:
        return np.eye(spec.one_hot, dtype=spec.dtype)[rng.integers(0, spec.one_hot, shape[:-1])]
    if spec.num_classes is not None or np.dtype(spec.dtype).kind in "iub":
        return rng.integers(0, spec.num_classes or 2, shape).astype(spec.dtype)
    return rng.uniform(0.1, 0.9, shape).astype(spec.dtype)


def _sizes(shape: tuple[int | None, ...]) -> tuple[int, ...]:
    return tuple(_FREE_DIMENSION if d is None else d for d in shape)
