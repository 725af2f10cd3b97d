"""How a step of each Keras backend reaches rows outside of it.

Each module has ``lookup(rows, ids, anchor, width)``: the rows of ``ids`` as a tensor. The forward
pass calls ``rows.pull``, the backward pass ``rows.push``, each in the order of the program. The
``anchor`` is a variable that the rows do not depend on: frameworks differentiate with respect to
variables only, and its gradient, always 0, is what the backward pass returns.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.weights import FloatArray

Ids = npt.NDArray[np.int64] | npt.NDArray[np.int32]


class HostRows(Protocol):
    """The rows of one call of a layer, as NumPy arrays."""

    def pull(self, ids: Ids) -> FloatArray:
        """The rows of ``ids``, of shape ``(*ids.shape, dim)``."""

    def push(self, ids: Ids, gradients: FloatArray) -> None:
        """Takes the gradient of what :meth:`pull` returned for ``ids``."""


def lookup(rows: HostRows, ids: Any, anchor: Any, width: int) -> Any:
    """The rows of ``ids`` as a float32 tensor of shape ``(*ids.shape, width)``."""
    module = importlib.import_module(f"sparkdl.layers.lookups.{keras.backend.backend()}")
    return module.lookup(rows, ids, anchor, width)


def takes_64_bits() -> bool:
    """Whether the backend takes 64-bit integers as they are; JAX does not, unless it is told to."""
    if keras.backend.backend() != "jax":
        return True
    import jax

    return bool(jax.config.jax_enable_x64)
