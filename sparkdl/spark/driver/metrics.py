"""Metric variables on the driver, which take the state that the workers sum up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import DataError, ModelError
from sparkdl.learner import metric_state
from sparkdl.learner.metric_check import check_metrics_add_up
from sparkdl.learner.signature import model_signature
from sparkdl.spark.columns.sources import Source


@dataclass(frozen=True)
class _ArrayLike:
    """Shape and dtype of a batch, for Keras' symbolic build."""

    shape: tuple[int | None, ...]
    dtype: str


def prepare_metrics(model: Any, source: Source, batch_size: int) -> None:
    """Makes the model's metric variables here, to put the workers' numbers into them.

    Args:
        model: Compiled.
        source: The rows that it will see.
        batch_size: Rows of a batch: that metrics cannot take labels and outputs of different
            sizes shows only where the sizes are known.

    Raises:
        DataError: The model cannot take these columns.
        ModelError: The loss or a metric cannot be computed, or a metric's variables must not be
            summed.
    """
    spec = source.spec
    x, y, weights = (
        {name: _ArrayLike((batch_size, *s.shape), s.dtype) for name, s in part.items()}
        for part in (spec.features, spec.labels, spec.weights)
    )
    try:
        metric_state.build_metrics(model, x, y, weights or None)  # type: ignore[arg-type]
    except ModelError:
        raise
    except Exception as error:
        signature = model_signature(model)
        raise DataError(
            f"model {model.name!r} cannot take these columns",
            expected=f"inputs {_shapes(signature.inputs)}, outputs {_shapes(signature.outputs)}",
            received=f"{type(error).__name__}: {str(error)[:600]}",
            hint="try model.fit on a few rows as NumPy arrays",
        ) from error
    check_metrics_add_up(model, x, spec.labels)


def _shapes(specs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {spec.shape}" for name, spec in specs.items())
