"""A learner of a flat buffer: tests of synchronizers say what its gradient and its step are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sparkdl.weights import FloatArray, Layout


class Part:
    """A part of a learner of tests, which has the part's methods itself, under longer names."""

    def __init__(self, learner: Any, **names: str) -> None:
        self._learner, self._names = learner, names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, self._names.get(name, name))


class InOne:
    """A learner of tests that is its own optimizer, metrics and draws."""

    @property
    def optimizer(self) -> Any:
        return Part(
            self, state="optimizer_state", load_state="load_optimizer_state",
            slots="optimizer_slots", load_slots="load_optimizer_slots",
        )  # fmt: skip

    @property
    def metrics(self) -> Any:
        return Part(
            self, state="metric_state", reset="reset_metrics", keep="keep_metrics",
            restore="restore_metrics",
        )  # fmt: skip

    @property
    def draws(self) -> Any:
        return Part(self, mark="mark_draws", fill="fill_draws", skip="skip_draws")


class PlainLearner(InOne):
    """Weights in a buffer of ``layout``. A subclass has ``gradients`` and ``apply_gradients``."""

    step, learning_rate, has_schedule, scales_loss = 0, 0.5, False, False
    loss_scale = None

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.weights = np.zeros(layout.size, np.float32)

    def read_weights(self, out: FloatArray) -> None:
        out[...] = self.weights

    def write_weights(self, flat: FloatArray) -> None:
        self.weights[...] = flat

    def constrained(self, flat: FloatArray) -> FloatArray:
        return flat

    # -- steps in two halves ---------------------------------------------------------------------

    def batches_of(self, stack: Any) -> Iterable[Any]:
        return stack.y["label"]  # type: ignore[no-any-return]

    def rows_of(self, batch: Any) -> int:
        return len(batch)

    def gradients(self, batch: Any, out: FloatArray) -> None:
        raise NotImplementedError

    def apply_gradients(self, flat: FloatArray) -> None:
        raise NotImplementedError

    def write_gradient(self, batch: Any, reducer: Any) -> None:
        self.gradients(batch, reducer.buffer)

    def apply_joined(self, reducer: Any) -> None:
        self.apply_gradients(reducer.buffer)

    def train_reducing(self, stack: Any, reducer: Any) -> None:
        for batch in self.batches_of(stack):
            reducer.rows = self.rows_of(batch)
            self.write_gradient(batch, reducer)
            self._join(reducer)

    def skip_reducing(self, reducer: Any) -> None:
        reducer.rows = 0
        self._join(reducer)

    def _join(self, reducer: Any) -> None:
        for part in range(len(reducer.parts)):
            reducer.begin(part)
        if reducer.finish():
            self.apply_joined(reducer)

    # -- state -----------------------------------------------------------------------------------

    def optimizer_state(self) -> bytes:
        return b""

    def load_optimizer_state(self, state: bytes) -> None: ...

    carried = b""

    def carried_state(self, steps: int = 0, wanted: int = 0) -> bytes:
        return self.carried

    def load_carried_state(self, state: bytes) -> None:
        self.carried = state

    def set_step(self, step: int) -> None: ...

    def mark_draws(self, *place: int) -> None: ...

    def fill_draws(self, steps: int, steps_of_all: int) -> None: ...

    def skip_draws(self, steps: int) -> None: ...

    def metric_state(self) -> Any:
        return np.zeros(2)

    def reset_metrics(self) -> None: ...
