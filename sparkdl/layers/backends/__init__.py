"""How each Keras backend reaches rows and classes outside of a step, and computes a part again.

Each module has ``lookup(rows, ids, anchor, width)``: the rows of ``ids`` as a tensor. The forward
pass calls ``rows.pull``, the backward pass ``rows.push``, each in the order of the program. The
``anchor`` is a variable that the rows do not depend on: frameworks differentiate with respect to
variables only, and its gradient is what the backward pass returns: 0, or infinity where a scaled
loss has overflowed in the rows alone, so that the step is none. ``losses(classes,
features, labels, anchor)`` is the loss of each row in the same way, by ``classes.measure`` and
``classes.learn``; ``after(function, like)`` calls a function of this process after them.
``recompute(function, inputs, weights)`` gives results whose gradients compute them once more.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.weights import FloatArray

Ids = npt.NDArray[np.int64] | npt.NDArray[np.int32]
Places = npt.NDArray[np.int32]
Forgotten = Callable[..., tuple[list[Any], list[Any]]]
"""Takes tensors; returns results, and values that no gradient flows through."""


class HostRows(Protocol):
    """The rows of one call of a layer, as NumPy arrays."""

    def pull(self, ids: Ids, differentiated: bool) -> tuple[FloatArray, Places]:
        """Rows of shape ``(n, dim)``, each once, and the place of each id among them.

        Args:
            ids: Ids of any shape, which the places have, too.
            differentiated: Whether the framework keeps this call for a gradient.
        """

    def push(self, sums: FloatArray) -> np.float32:
        """Takes the gradient of the rows that :meth:`pull` returned, or of more, of which the last
        are none; returns the anchor's."""


class HostClasses(Protocol):
    """The classes of one call of a loss, as NumPy arrays."""

    def measure(self, features: FloatArray, labels: Ids, differentiated: bool) -> FloatArray:
        """The loss of each row, of shape ``(rows,)``; see :meth:`HostRows.pull`."""

    def learn(self, upstream: FloatArray) -> FloatArray:
        """Takes the gradient by the losses; returns that by the features."""


def lookup(rows: HostRows, ids: object, anchor: object, width: int) -> Any:
    """The rows of ``ids`` as a float32 tensor of shape ``(*ids.shape, width)``."""
    return _of_backend().lookup(rows, ids, anchor, width)


def losses(classes: HostClasses, features: object, labels: object, anchor: object) -> Any:
    """The loss of each row as a float32 tensor of shape ``(rows,)``.

    Args:
        classes: Compute it.
        features: Floats of shape ``(rows, dim)``.
        labels: Numbers of shape ``(rows,)``.
        anchor: See the module.
    """
    return _of_backend().losses(classes, features, labels, anchor)


def after(function: Callable[[], FloatArray], like: object) -> Any:
    """The result of ``function``, called after the calls that the program has before this one.

    Args:
        function: Returns an array of shape ``(rows,)``.
        like: A tensor with as many rows.
    """
    return _of_backend().after(function, like)


def recompute(
    function: Forgotten, inputs: Sequence[Any], weights: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Both lists of ``function``, which the gradients of the results compute once more.

    Args:
        function: Computes the same when it is called again.
        inputs: What it takes first: the tensors that are kept.
        weights: What it takes then. Gradients flow to floating-point numbers among both.
    """
    results: tuple[list[Any], list[Any]] = _of_backend().recompute(function, inputs, weights)
    return results


def _of_backend() -> Any:
    return importlib.import_module(f"sparkdl.layers.backends.{keras.backend.backend()}")
