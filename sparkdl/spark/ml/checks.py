"""Checks of a classifier's or a regressor's model and label column, before a job starts."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.learner.prediction.class_scores import ClassScores
from sparkdl.learner.signature import Shape, Signature


def is_validated() -> bool:
    """Whether CrossValidator or TrainValidationSplit has called this thread's function.

    Stages are not told: in a pipeline they see one fit after the other, each on other rows.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "pyspark.ml.tuning":
            return True
        frame = frame.f_back
    return False


def only_output(signature: Signature, stage: str) -> str:
    """The name of a model's only output."""
    if len(signature.outputs) != 1:
        raise ModelError(
            f"{stage} takes a model with one output",
            expected="one output",
            received=f"{len(signature.outputs)}: {', '.join(signature.outputs)}",
            hint="KerasEstimator takes any inputs and outputs",
        )
    return next(iter(signature.outputs))


def scores_of(
    known: ClassScores | None, shape: Shape | None, logits: bool | None, stage: str
) -> tuple[ClassScores, int]:
    """The meaning of the numbers of a classifier's output, and the number of classes.

    Args:
        known: What the loss, or the last activation, says; None where they say nothing.
        shape: Of a row of the output.
        logits: Param ``fromLogits``, which has the last word; None: as ``known``.
        stage: For the message.

    Raises:
        ModelError: The output says nothing about one class per row.
    """
    units = None if shape is None else (shape[-1] if shape else 1)
    if known is None and logits is not None:
        known = ClassScores(units != 1, logits, units)
    classes = None if known is None else known.num_classes
    if known is None or classes is None or len(shape or ()) > 1:
        raise ModelError(
            f"{stage} takes a model whose output is one class per row",
            expected="a last layer with a unit per class and a categorical cross-entropy (or "
            "softmax), or one unit and a binary cross-entropy (or sigmoid)",
            received=f"an output of shape {shape}, with another loss and activation",
            hint="fromLogits=True or False says what the output of a loss of your own is; "
            "KerasRegressor predicts numbers; KerasEstimator takes any inputs and outputs",
        )
    return (known if logits is None else replace(known, logits=logits)), classes


def check_number(shape: Shape | None, stage: str) -> None:
    """Refuses an output that is not one number per row."""
    if shape is not None and tuple(shape) not in ((), (1,)):
        raise ModelError(
            f"{stage} takes a model whose output is one number per row",
            expected="a last layer with one unit",
            received=f"an output of shape {shape}",
            hint="KerasClassifier predicts classes; KerasEstimator takes any inputs and outputs",
        )


def check_labels(schema: Any, label: Any, num_classes: int) -> None:
    """Refuses a label column whose metadata name more classes than the model has."""
    field = next((f for f in schema.fields if f.name == label), None)
    values = ((field.metadata or {}) if field else {}).get("ml_attr", {}).get("vals")
    if values is not None and len(values) > num_classes:
        raise DataError(
            f"label {label!r} has more classes than the model",
            expected=f"at most {num_classes} classes, as many as the model has units",
            received=f"{len(values)}: {', '.join(map(str, values[:8]))}",
            hint="a last layer with as many units as classes",
        )


def check_thresholds(thresholds: list[float] | None, num_classes: int) -> tuple[float, ...]:
    """Spark's rules for ``thresholds``; an empty tuple for none.

    Raises:
        ConfigError: Another number of them than classes, a negative one, or two that are 0.
    """
    if thresholds is None:
        return ()
    wrong = len(thresholds) != num_classes or min(thresholds) < 0
    if wrong or sum(t == 0 for t in thresholds) > 1:
        raise ConfigError(
            "thresholds do not fit the classes",
            expected=f"{num_classes} numbers >= 0, one per class, at most one of them 0",
            received=str(thresholds),
        )
    return tuple(thresholds)
