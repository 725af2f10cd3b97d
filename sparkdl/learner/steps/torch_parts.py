"""Parts of a PyTorch gradient that leave while the backward pass computes the next.

PyTorch calls a hook of each parameter when its gradient is complete. Keras' own ``train_step``
hands exactly these gradients to the optimizer, so a part can be sent as soon as all of its
gradients are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch

from sparkdl.errors import ModelError
from sparkdl.training.learning import Reducer
from sparkdl.training.parts import fill_part, leaving
from sparkdl.weights import FloatArray, Slot


class BackwardPass:
    """Watches one backward pass on a CPU, and hands parts to a reducer as they become complete.

    A context manager; within it one batch is computed. Parts leave in their order, the same on all
    ranks: one that is complete before an earlier one waits for that.

    Args:
        reducer: Takes the parts.
        slots: Slots of the reducer's buffer.
        trained: The model's trained variables, in the order of the slots.
        averaged: Its statistics, behind them.
        sends: False: nothing leaves; what comes is only watched.
    """

    def __init__(
        self,
        reducer: Reducer,
        slots: Sequence[Slot],
        trained: Sequence[Any],
        averaged: Sequence[Any],
        *,
        sends: bool,
    ) -> None:
        self.begun = 0
        self._reducer, self._slots, self._sends = reducer, slots, sends
        self._trained, self._averaged = trained, averaged
        self._groups = leaving(reducer.parts, slots)
        self._next = 0  # the group that leaves next
        self._once = True
        self._came: dict[int, tuple[torch.Tensor, int]] = {}  # with the version at that time
        self._flat: dict[int, FloatArray] = {}
        self._versions: list[int] = []  # of the statistics when the first gradient came
        self._hooks: list[Any] = []

    def __enter__(self) -> BackwardPass:
        for index, variable in enumerate(self._trained):
            parameter = variable.value
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook
                self._hooks.append(hook(lambda given, i=index: self._note(i, given.grad)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def ended_as_seen(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether the optimizer is given what came, each gradient once and unchanged since then.

        Args:
            gradients: The gradients of the trained variables that the optimizer is given.
        """
        if not self._once or self._versions != self._now():
            return False
        for index, given in enumerate(gradients):
            seen = self._came.get(index)
            if (seen is None) is not (given is None):
                return False
            if seen is not None and (given is not seen[0] or given._version != seen[1]):
                return False
        return True

    def fill_rest(self) -> None:
        """Writes what has not left into the reducer's buffer; zeros where nothing came."""
        for group in self._groups[self._next :]:
            for number in group.parts:
                self._fill(number, group.variables)

    def refuse(self, name: str) -> ModelError:
        """The error of a model whose gradients changed after parts of them were sent."""
        return ModelError(
            f"the gradients of model {name!r} changed after they were sent",
            expected="each gradient complete when PyTorch calls its hook, as in the first step",
            received="one that came again, was changed or was replaced before the optimizer's step",
            hint="write the step as a train_step of the model's own: its gradients are sent when "
            "it calls the optimizer",
        )

    def _note(self, index: int, gradient: torch.Tensor) -> None:
        if not self._came:
            self._versions = self._now()
        self._once = self._once and index not in self._came
        self._came[index] = gradient, gradient._version
        if self._sends:
            self._send()

    def _send(self) -> None:
        while self._next < len(self._groups):
            group = self._groups[self._next]
            if any(i < len(self._trained) and i not in self._came for i in group.variables):
                return
            self._next += 1
            for number in group.parts:
                self._fill(number, group.variables)
                self._reducer.begin(number)
                self.begun = number + 1

    def _fill(self, number: int, variables: Sequence[int]) -> None:
        slots = [self._slots[i] for i in variables]
        values = [self._values(i) for i in variables]
        fill_part(self._reducer.parts[number], slots, values, self._reducer.buffer)

    def _values(self, index: int) -> FloatArray:
        if index not in self._flat:
            trained = len(self._trained)
            if index >= trained:
                tensor = self._averaged[index - trained].value
            elif index in self._came:
                tensor = self._came[index][0]
            else:
                return np.zeros(self._slots[index].size, np.float32)
            self._flat[index] = tensor.detach().reshape(-1).to(torch.float32).numpy()
        return self._flat[index]

    def _now(self) -> list[int]:
        return [variable.value._version for variable in self._averaged]
