"""What a worker trains: the protocol that the loop and the synchronizers use.

A learner owns a compiled Keras model and turns windows of batches into changed weights. It hides
the backend; all it exchanges with the outside is NumPy.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sparkdl.weights import FloatArray, Layout

Arrays = dict[str, npt.NDArray[Any]]


class WindowLike(Protocol):
    """Batches stacked along the first axis: each array is ``(num_batches, batch_size, ...)``."""

    @property
    def x(self) -> Arrays: ...
    @property
    def y(self) -> Arrays: ...
    @property
    def sample_weight(self) -> Arrays | None: ...
    @property
    def num_batches(self) -> int: ...
    @property
    def num_rows(self) -> int: ...


class Learner(Protocol):
    """A model in training on one worker. Not thread-safe: one thread trains."""

    @property
    def layout(self) -> Layout:
        """Where each variable is in a flat buffer: [trained | averaged]."""

    def read_weights(self, out: FloatArray) -> None:
        """Copies the model's variables into ``out``, a buffer of the layout."""

    def write_weights(self, flat: FloatArray) -> None:
        """Sets the model's variables from ``flat``, a buffer of the layout."""

    def train(self, window: WindowLike) -> None:
        """Trains every batch of ``window``, one optimizer step each, in one compiled call."""

    def gradients(self, window: WindowLike, out: FloatArray) -> None:
        """The gradient of one batch, and the statistics after it, into ``out``; no step is taken.

        ``window.num_batches`` must be 1. The trained segment of ``out`` gets the gradient of the
        mean loss (0 where a variable has none); the averaged segment the statistics.
        """

    def apply_gradients(self, flat: FloatArray) -> None:
        """One optimizer step with the trained segment; sets the statistics from the other."""

    def metric_state(self) -> npt.NDArray[np.float64]:
        """All metric variables (loss first) as one vector; vectors of workers add up."""

    def reset_metrics(self) -> None:
        """Zeroes the metric variables (at the start of an epoch)."""

    def evaluate(self, windows: Any) -> npt.NDArray[np.float64]:
        """The metric state over ``windows`` with the present weights; training's is untouched."""

    def predict(self, x: Arrays) -> Arrays:
        """The model's outputs by name for one batch of inputs ``(rows, ...)``."""

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate now."""

    def set_learning_rate(self, value: float) -> None:
        """Sets the learning rate; refused if it is a schedule."""

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate follows a schedule."""

    @property
    def step(self) -> int:
        """Steps that the optimizer has taken."""

    def set_step(self, step: int) -> None:
        """Tells a learning-rate schedule how many steps all workers have taken together."""

    def optimizer_state(self) -> bytes:
        """Optimizer variables as bytes (npz), for the driver or a joining worker."""

    def load_optimizer_state(self, state: bytes) -> None:
        """The counterpart of :meth:`optimizer_state`."""

    def sync_model(self) -> None:
        """Writes the training state back to the Keras model, where the backend keeps it apart."""

    def reload(self) -> None:
        """Takes over the Keras model's variables after they were changed from outside."""
