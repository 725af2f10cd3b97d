"""Facts of a model by which ``fit`` recognises one that has learned nothing, and tells why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.learner.signature import loss_name

_ONE_CLASS = ("sparsecategoricalcrossentropy", "categoricalcrossentropy")


def guessing_loss(model: Any, label_mean: Sequence[float]) -> float | None:
    """The cross-entropy of answering every row with the mean label: the labels' entropy, in nats.

    Args:
        model: A compiled ``keras.Model`` with one output.
        label_mean: See :func:`sparkdl.data.statistics.label_mean`.

    Returns:
        The loss; None if the model's loss is no cross-entropy of Keras, the mean is empty, or all
        labels are the same, so that there is nothing to learn.
    """
    mean = np.asarray(label_mean, np.float64)
    if not mean.size or not bool(((mean >= 0) & (mean <= 1)).all()):
        return None
    loss = model.loss
    if isinstance(loss, (dict, list, tuple)):
        loss, *others = loss.values() if isinstance(loss, dict) else loss
        if others:
            return None
    name, _ = loss_name(loss)
    if name in _ONE_CLASS and np.isclose(mean.sum(), 1, atol=1e-3):
        entropy = _surprise(mean).sum()
    elif name == "binarycrossentropy":
        entropy = (_surprise(mean) + _surprise(1 - mean)).mean()
    else:
        return None
    return float(entropy) if entropy > 0 else None


def _surprise(p: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return -p * np.log(np.where(p > 0, p, 1.0))


_LAYERS = ("Normalization", "BatchNormalization", "LayerNormalization", "GroupNormalization")


def normalizes(model: Any) -> bool:
    """Whether a layer subtracts a mean or adds an offset, wherever in the model.

    Args:
        model: A built ``keras.Model``.
    """
    for layer in model._flatten_layers(include_self=False):
        if type(layer).__name__ in _LAYERS:
            return True
        if type(layer).__name__ == "Rescaling" and getattr(layer, "offset", 0.0) != 0.0:
            return True
    return False
