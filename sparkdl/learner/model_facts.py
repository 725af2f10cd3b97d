"""A compiled model in plain values, for a run's description."""

from __future__ import annotations

from typing import Any

from sparkdl.progress.events import Json


def describe_model(model: Any) -> dict[str, Json]:
    """Parameters, layers, loss and the optimizer's settings (``optimizer_learning_rate``, ...).

    Only numbers, texts and truth values; a learning-rate schedule is named by its class.
    """
    told: dict[str, Json] = {
        "model": model.name,
        "model_parameters": int(model.count_params()),
        "model_layers": len(model.layers),
        "loss": name_of_loss(model.loss),
        "optimizer": type(model.optimizer).__name__,
    }
    for name, value in model.optimizer.get_config().items():
        if isinstance(value, dict) and "class_name" in value:
            value = str(value["class_name"])
        if name != "name" and value is not None and isinstance(value, (bool, int, float, str)):
            told[f"optimizer_{name}"] = value
    return told


def name_of_loss(loss: Any) -> str:
    """The name of a loss, or of several by output; ``'none'`` for None."""
    if loss is None or isinstance(loss, str):
        return loss or "none"
    if isinstance(loss, dict):
        return ", ".join(f"{output}: {name_of_loss(one)}" for output, one in loss.items())
    if isinstance(loss, (list, tuple)):
        return ", ".join(name_of_loss(one) for one in loss)
    return str(getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__))
