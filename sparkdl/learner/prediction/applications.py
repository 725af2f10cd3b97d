"""Models of ``keras.applications``."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np


def pretrained(module: str, name: str, *, features: bool) -> Any:
    """A model trained on ImageNet, whose weights Keras downloads into its cache.

    Args:
        module: Of ``keras.applications``.
        name: Of the function there.
        features: Without the classes: the mean over the pixels of the last feature map.
    """
    make = getattr(importlib.import_module(f"keras.applications.{module}"), name)
    if features:
        return make(weights="imagenet", include_top=False, pooling="avg")
    return make(weights="imagenet")


def imagenet_names(module: str) -> list[tuple[str, str]]:
    """Identifier and description of the classes, in their order; Keras downloads them."""
    decode = importlib.import_module(f"keras.applications.{module}").decode_predictions
    rows = decode(np.eye(1000, dtype="float32"), top=1)
    return [(str(best[0]), str(best[1])) for (best,) in rows]
