"""A Keras model trained with PyTorch, batch by batch.

PyTorch has no loop inside a graph, so Python loops over the batches of a stack and calls the
model's own ``train_step`` for each. The batches are views of one tensor: on a CPU it is the NumPy
memory itself, to a GPU it is copied once per stack.

On a CPU, parts of a large gradient leave while the backward pass computes the next
(:class:`BackwardPass`). On a GPU they leave when all of it is there: to copy a part earlier would
make Python wait for the GPU in the middle of the pass.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import torch

from sparkdl.errors import ModelError
from sparkdl.learner.framework import overlaid
from sparkdl.learner.signature import has_own
from sparkdl.learner.state.metric_state import logged_step
from sparkdl.learner.steps.captured_gradients import gradients_to_apply
from sparkdl.learner.steps.denominators import Numbers, Terms, factors, forward_terms
from sparkdl.learner.steps.keras_learner import (
    Found,
    KerasLearner,
    captured_step,
    require_one_batch,
    weighing,
)
from sparkdl.learner.steps.repeated_rows import few_rows
from sparkdl.learner.structure import arranged, map_arrays, pack_batch
from sparkdl.training.learning import BatchStack, Reducer
from sparkdl.training.parts import fill_part, leaving
from sparkdl.weights import FloatArray, Slot

# PyTorch has no (or hardly any) operations on these; Keras takes the wider type, too.
_WIDER = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}


class TorchLearner(KerasLearner):
    """See :class:`sparkdl.training.learning.Learner`.

    ``torch.compile`` is used where Keras would: only for a model compiled with
    ``jit_compile=True``.
    """

    asks_each_term = True  # a forward pass for the denominators alone would be a whole one

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        self._device = model.variables[0].value.device
        # Whether parts may leave early; None: no pass has been watched yet.
        self._sends_early = False if has_own(model, "train_step") or self.overwritten else None
        self._logged_step = logged_step(model, "train_step")
        self._train_step = self._compile(self._logged_step)
        self._test_step = self._compile(logged_step(model, "test_step"))
        self.reload()

    def _compile(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if not self.model._should_torch_compile():
            return step
        compiled: Callable[[Any], Any] = torch.compile(step)
        return compiled

    def read_weights(self, out: FloatArray) -> None:
        self.layout.check(out)
        self._concat([v.value for v in self.exchanged], out)

    def write_weights(self, flat: FloatArray) -> None:
        with torch.no_grad():
            self._assign(self.exchanged, self._split(flat))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _concat(self, values: Sequence[torch.Tensor | None], out: FloatArray) -> None:
        """Writes tensors one after the other; zeros for None."""
        pairs = zip(values, self.exchanged, strict=True)
        tensors = [torch.zeros_like(v.value) if t is None else t for t, v in pairs]
        parts = [tensor.reshape(-1).to(torch.float32) for tensor in tensors]
        if self._device.type == "cpu" and out.flags.c_contiguous:
            torch.cat(parts, out=torch.from_numpy(out))
        elif self._device.type == "cuda" and out.flags.c_contiguous:
            self._pinned.copy_(torch.cat(parts))
            torch.from_numpy(out).copy_(self._pinned)
        else:
            np.copyto(out, torch.cat(parts).cpu().numpy())

    @cached_property
    def _pinned(self) -> torch.Tensor:
        """A buffer of the layout that the GPU copies to and from by itself, allocated once."""
        return torch.empty(self.layout.size, dtype=torch.float32, pin_memory=True)

    def _split(self, flat: FloatArray) -> list[torch.Tensor]:
        self.layout.check(flat)
        slots = self.layout.slots
        if self._device.type == "cuda":
            self._pinned.copy_(tensor_of(flat, torch.device("cpu")))
            tensor = self._pinned.to(self._device)
        else:
            tensor = tensor_of(flat, self._device)
        parts = tensor.split([slot.size for slot in slots])
        return [part.view(slot.shape) for part, slot in zip(parts, slots, strict=True)]

    def _assign(self, variables: Any, parts: list[torch.Tensor]) -> None:
        for variable, part in zip(variables, parts, strict=True):
            if variable.value.dtype == torch.float64:  # what rounds to the same is more exact
                part = torch.where(variable.value.to(part.dtype) == part, variable.value, part)
            variable.value.copy_(part)

    def train(self, stack: BatchStack) -> None:
        self.metrics.build(stack)
        self._set_training(True)
        data = self._tensors(stack)
        with self._unreported_metrics():
            for index in range(stack.num_batches):
                self.draws.begin_step()
                self._seed()
                self._train_step(_batch(data, index))

    def _seed(self) -> None:
        """Lets PyTorch's own generator, which a Dropout without a seed draws from, begin anew with
        each step: in a new process it has not drawn what that of a lost one had."""
        number = self.draws.number
        if number is None:
            return
        torch.default_generator.manual_seed(number)
        if self._device.type != "cpu":
            getattr(torch, self._device.type).manual_seed(number)

    def _evaluate_stack(self, stack: BatchStack) -> None:
        self._set_training(False)
        data = self._tensors(stack)
        with torch.no_grad(), self._unreported_metrics():
            for index in range(stack.num_batches):
                self._test_step(_batch(data, index))

    def _unreported_metrics(self) -> contextlib.AbstractContextManager[None]:
        """Within, Keras' own steps do not compute the metrics' values, which nobody reads."""
        if has_own(self.model, "train_step", "test_step", "compute_metrics", "get_metrics_result"):
            return contextlib.nullcontext()
        return overlaid(self.model, get_metrics_result=dict)

    def _set_training(self, mode: bool) -> None:
        """The flag of ``torch.nn.Module``, for plain PyTorch layers inside a Keras model."""
        if self.model.training is not mode:
            torch.nn.Module.train(self.model, mode)

    def _tensors(self, stack: BatchStack) -> Any:
        data = arranged(self.model, stack)
        tensors = map_arrays(lambda array: tensor_of(array, self._device), data)
        # Keras writes to images (RandomBrightness) and weights: on a CPU the partition's own rows.
        return map_arrays(torch.clone, tensors) if self._device.type == "cpu" else tensors

    def find_terms(self, stack: BatchStack) -> Found:
        self._set_training(True)
        batch = map_arrays(
            lambda tensor: tensor[: few_rows(self.model)], _batch(self._tensors(stack), 0)
        )
        # What plain PyTorch layers keep is no variable of Keras, whose changes are left out.
        buffers = [(b, b.clone()) for b in torch.nn.Module.buffers(self.model)]
        with torch.random.fork_rng():
            counted = forward_terms(self.model, batch, sums=self.sums).counted
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        return Found((True,) * len(self.trained), tuple(counted))

    def write_weighed(self, batch: BatchStack, reducer: Reducer) -> tuple[Numbers, Numbers, int]:
        """See :class:`KerasLearner`; each term asks for its factor where the step meets it."""
        mine, of_all, share = [float(batch.num_rows)], [0.0], None

        def factor(index: int, denominator: torch.Tensor | None) -> Any:
            own = 0.0 if denominator is None else float(denominator)
            numbers = np.array([batch.num_rows, own])
            total = reducer.add_up(numbers)
            mine.append(own)
            of_all[0] = float(total[0])
            of_all.append(float(total[1]))
            return factors([denominator is not None], numbers, total)[0]

        if self.overwritten:
            factor(0, None)
            share = mine[0] / of_all[0]
        terms = Terms(factor, sums=self.sums)
        begun = self._write(batch, reducer, terms, share)
        return np.array(mine), np.array(of_all), begun

    def gradients(
        self, stack: BatchStack, out: FloatArray, factors: FloatArray | None = None
    ) -> None:
        self.draws.begin_step()  # of one who takes the step by itself
        self.eager_gradients(stack, out, factors)

    def eager_gradients(
        self, stack: BatchStack, out: FloatArray, factors: FloatArray | None
    ) -> None:
        self._concat(self._computed(stack, *weighing(self, factors), out), out)

    def write_gradient(
        self, batch: BatchStack, reducer: Reducer, factors: FloatArray | None = None
    ) -> int:
        return self._write(batch, reducer, *weighing(self, factors))

    def _write(self, batch: BatchStack, reducer: Reducer, terms: Terms, share: float | None) -> int:
        """Parts of the gradient leave as soon as they are there, if they can.

        The first pass of a model only shows whether they can, and so does the first with a reducer:
        behind it the workers tell each other which variables have a gradient.
        """
        several = len(reducer.parts) > 1 and not reducer.skips and self._device.type == "cpu"
        if not several or self._sends_early is False:
            self._concat(self._computed(batch, terms, share, reducer.buffer), reducer.buffer)
            return 0
        agreed = self.agreed_with is not None and self.agreed_with() is reducer
        slots, sends = self.layout.slots, bool(self._sends_early) and agreed
        with BackwardPass(reducer, slots, self.trained, self.averaged, sends=sends) as watched:
            values = self._computed(batch, terms, share, reducer.buffer)
        self._sends_early = watched.ended_as_seen(values[: len(self.trained)])
        if not watched.begun:
            self._concat(values, reducer.buffer)
        elif self._sends_early:
            watched.fill_rest()
        else:
            raise watched.refuse(self.model.name)
        return watched.begun

    def _computed(
        self, stack: BatchStack, terms: Terms, share: float | None, out: FloatArray
    ) -> list[torch.Tensor | None]:
        """The gradients of one batch, None where there is none, and the statistics after it."""
        require_one_batch(stack)
        self.layout.check(out)
        self.metrics.build(stack)
        self._set_training(True)
        batch = _batch(self._tensors(stack), 0)
        self._seed()
        _, gradients, overwritten, found = captured_step(
            self, lambda: self._logged_step(batch), terms, share
        )
        with torch.no_grad():
            for variable, value in overwritten:
                variable.assign(value)
        self.note(found)
        return [*gradients, *(v.value for v in self.averaged)]

    def apply_gradients(self, flat: FloatArray) -> None:
        parts = self._split(flat)
        pairs = zip(parts[: len(self.trained)], self.trained, strict=True)
        typed = [part.to(variable.value.dtype) for part, variable in pairs]
        given = gradients_to_apply(self.model, typed, self.trained, self.known)
        with torch.no_grad():
            self.model.optimizer.apply(*given)
            self._assign(self.averaged, parts[len(self.trained) :])


def tensor_of(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """``array`` on a device; on a CPU the same memory, which nobody may write to."""
    array = np.ascontiguousarray(array, _WIDER.get(array.dtype.name)).reshape(array.shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).to(device, non_blocking=True)


def _batch(data: object, index: int) -> Any:
    return pack_batch(*map_arrays(lambda tensor: tensor[index], data))


class BackwardPass:
    """Watches one backward pass on a CPU, and hands parts to a reducer as they become complete.

    A context manager; within it one batch is computed. PyTorch calls a hook of each parameter when
    its gradient is complete, and Keras' own ``train_step`` hands exactly these gradients to the
    optimizer. Parts leave in their order, the same on all ranks: one that is complete before an
    earlier one waits for that.

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

    def __exit__(self, *_: object) -> None:
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
