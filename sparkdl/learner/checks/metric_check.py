"""Whether a metric's variables may be summed over workers.

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
from typing import Any, Protocol

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.errors import ModelError
from sparkdl.learner.state.metric_state import flatten_arrays
from sparkdl.learner.structure import arrange, arrange_inputs

DECLARATION = "sums_over_workers"
"""Class attribute by which a metric says that its variables are sums (True) or are not (False)."""
_ROWS = (5, 3)
_FREE_DIMENSION = 4


class Labels(Protocol):
    """The form of the labels of one output (a :class:`sparkdl.data.ColumnSpec`)."""

    @property
    def shape(self) -> tuple[int | None, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def one_hot(self) -> int | None: ...
    @property
    def num_classes(self) -> int | None: ...


def check_metrics_add_up(
    model: keras.Model, x: Mapping[str, Any], labels: Mapping[str, Labels]
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
    """Every metric of the model, and the number of the output that it looks at."""
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
        raise _refusal(model, metric, f"{DECLARATION} = False")
    try:
        nothing = _state_after(metric, [])
        apart = sum((_state_after(metric, [batch]) for batch in batches), np.zeros_like(nothing))
        together = _state_after(metric, batches)
    except Exception as error:
        raise _refusal(model, metric, f"{type(error).__name__} on made-up rows: {error}") from error
    finally:
        metric.reset_state()
    if nothing.any():
        raise _refusal(model, metric, f"variables that start at {nothing.tolist()[:8]}")
    if not np.allclose(apart, together, rtol=1e-4, atol=1e-5):
        raise _refusal(
            model, metric, f"{together.tolist()[:8]} for two batches, "
            f"but {apart.tolist()[:8]} as the sum of one and the other",
        )  # fmt: skip


def _state_after(metric: keras.Metric, batches: list[tuple[Any, Any]]) -> npt.NDArray[np.float64]:
    metric.reset_state()
    for y, predicted in batches:
        metric.update_state(keras.ops.convert_to_tensor(y), keras.ops.convert_to_tensor(predicted))
    return flatten_arrays(keras.ops.convert_to_numpy(v) for v in metric.variables)


def _refusal(model: keras.Model, metric: keras.Metric, received: str) -> ModelError:
    return ModelError(
        f"metric {metric.name!r} of model {model.name!r} cannot be summed over the workers",
        expected="variables that start at zero and are sums over rows: "
        "state(A and B) = state(A) + state(B)",
        received=received,
        hint=f"keep sums and divide in result(); if they are sums, say so in the class: "
        f"{DECLARATION} = True",
    )


def _made_up(
    model: keras.Model, x: Mapping[str, Any], labels: Mapping[str, Labels]
) -> list[tuple[list[Any], list[Any]]]:
    """Two batches: for each, the labels and the predictions by number of the output."""
    rng = np.random.default_rng(0)
    inputs = {n: keras.KerasTensor(e.shape, keras.backend.standardize_dtype(e.dtype))
              for n, e in x.items()}  # fmt: skip
    outputs = keras.tree.flatten(model.compute_output_spec(arrange_inputs(model, inputs)))
    names = list(getattr(model, "output_names", None) or labels)
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
    rng: np.random.Generator, rows: int, spec: Labels, output: tuple[int | None, ...] | None
) -> npt.NDArray[Any]:
    """Labels, as wide as the output where they do not say how wide they are."""
    known = spec.shape
    if output is not None and len(output) == len(known):
        known = tuple(o if d is None else d for d, o in zip(known, output, strict=True))
    shape = (rows, *_sizes(known))
    if spec.one_hot is not None:
        drawn = rng.integers(0, spec.one_hot, shape[:-1])
        return np.eye(spec.one_hot, dtype=spec.dtype)[drawn]
    if spec.num_classes is not None or np.dtype(spec.dtype).kind in "iub":
        return rng.integers(0, spec.num_classes or 2, shape).astype(spec.dtype)
    return rng.uniform(0.1, 0.9, shape).astype(spec.dtype)


def _sizes(shape: tuple[int | None, ...]) -> tuple[int, ...]:
    return tuple(_FREE_DIMENSION if d is None else d for d in shape)
