"""Whether a model brings its inputs to mean 0 by itself."""

from __future__ import annotations

from typing import Any

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
