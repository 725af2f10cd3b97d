"""Keras optimizers as rules for the rows of a table."""

from __future__ import annotations

from typing import Any

import keras

from sparkdl.errors import ModelError
from sparkdl.tables import rules
from sparkdl.tables.rules import RowRule, SgdRows


def row_rule_of(optimizer: Any, table: str) -> RowRule:
    """The row rule that does as a Keras optimizer.

    Args:
        optimizer: A ``keras.optimizers.Optimizer``; None where nothing is trained.
        table: Name of the table, for the message.

    Raises:
        ModelError: The optimizer is of the user's own, or scales the loss.
        ConfigError: It does what needs more than the rows of one batch (weight decay, momentum,
            clipping, averages).
        UnknownNameError: Rows have no rule as this one.
    """
    if optimizer is None:
        return SgdRows()
    refuse_scaled_loss(optimizer, table)
    if not type(optimizer).__module__.startswith("keras."):
        raise ModelError(
            f"table {table!r} cannot be trained with this optimizer",
            expected="keras.optimizers.SGD, Adagrad, Adam or Ftrl",
            received=f"the class {type(optimizer).__qualname__} of the user's own",
            hint="ServedEmbedding(..., optimizer='adagrad')",
        )
    config = optimizer.get_config()
    constants = {
        key: value
        for key, value in config.items()
        if value is None or isinstance(value, (bool, int, float))
    }
    return rules.row_rule_of(type(optimizer).__name__, constants)


def refuse_scaled_loss(optimizer: object, table: str) -> None:
    """Raises ModelError if the gradients of a model's rows are those of a scaled loss."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ModelError(
            f"table {table!r} cannot be trained with a scaled loss",
            expected="an optimizer without loss scaling",
            received="LossScaleOptimizer (the policy mixed_float16 makes it)",
            hint="mixed_bfloat16 needs no loss scaling",
        )


def fixed_rate(optimizer: Any, table: str) -> float:
    """The learning rate of a table's own optimizer.

    Raises:
        ModelError: It is a schedule.
    """
    rate = optimizer.get_config()["learning_rate"]
    if not isinstance(rate, (int, float)):
        raise ModelError(
            f"table {table!r} has a learning rate that changes",
            expected="a number",
            received="a LearningRateSchedule",
            hint="without optimizer= the layer follows the rate that the model is compiled with",
        )
    return float(rate)
