"""A Keras model trained with PyTorch, batch by batch.

PyTorch has no loop inside a graph, so Python loops over the batches of a stack and calls the
model's own ``train_step`` for each. The batches are views of one tensor: on a CPU it is the NumPy
memory itself, to a GPU it is copied once per stack.

On a CPU, parts of a large gradient leave while the backward pass computes the next (see
:mod:`sparkdl.learner.steps.torch_parts`). On a GPU they leave when all of it is there: to copy a
part earlier would make Python wait for the GPU in the middle of the pass.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import torch

from sparkdl.learner.signature import has_own
from sparkdl.learner.steps.captured_gradients import (
    captured_gradients,
    gradients_to_apply,
    match_gradients,
    overwriting,
)
from sparkdl.learner.steps.denominators import Numbers, Terms, factors, followed, forward_terms
from sparkdl.learner.steps.keras_learner import KerasLearner, require_one_batch
from sparkdl.learner.steps.repeated_rows import few_rows
from sparkdl.learner.steps.step_logs import logged_step
from sparkdl.learner.steps.torch_parts import BackwardPass
from sparkdl.learner.structure import map_arrays, pack_batch
from sparkdl.training.learning import BatchStack, Reducer
from sparkdl.weights import FloatArray

# PyTorch has no (or hardly any) operations on these; Keras takes the wider type, too.
_WIDER = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}


class TorchLearner(KerasLearner):
    """See :class:`sparkdl.training.learning.Learner`.

    ``torch.compile`` is used where Keras would: only for a model compiled with
    ``jit_compile=True``.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        self._device = model.variables[0].value.device
        self._has_gradient: list[bool] = [True] * len(self.trained)
        self._pass: BackwardPass | None = None  # the one that is watched
        # Whether parts may leave early; None: no pass has been watched yet.
        self._sends_early = False if has_own(model, "train_step") or self.overwritten else None
        self._agreed_with: weakref.ref[Reducer] | None = None
        self._logged_step = logged_step(model, "train_step")
        self._train_step = self._compile(self._logged_step)
        self._test_step = self._compile(logged_step(model, "test_step"))
        self.reload()

    def _compile(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if not self.model._should_torch_compile():
            return step
        compiled: Callable[[Any], Any] = torch.compile(step)
        return compiled

    # -- weights -------------------------------------------------------------------------------

    def read_weights(self, out: FloatArray) -> None:
        self._layout.check(out)
        with torch.no_grad():
            self._concat([v.value for v in (*self.trained, *self.averaged)], out)

    def write_weights(self, flat: FloatArray) -> None:
        with torch.no_grad():
            self._assign((*self.trained, *self.averaged), self._split(flat))

    def _concat(self, values: list[torch.Tensor], out: FloatArray) -> None:
        parts = [value.reshape(-1).to(torch.float32) for value in values]
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
        return torch.empty(self._layout.size, dtype=torch.float32, pin_memory=True)

    def _split(self, flat: FloatArray) -> list[torch.Tensor]:
        """The parts of a flat buffer as views, on the model's device."""
        self._layout.check(flat)
        slots = self._layout.slots
        if self._device.type == "cuda":
            self._pinned.copy_(tensor_of(flat, torch.device("cpu")))
            tensor = self._pinned.to(self._device)
        else:
            tensor = self._tensor(flat)
        parts = tensor.split([slot.size for slot in slots])
        return [part.view(slot.shape) for part, slot in zip(parts, slots, strict=True)]

    def _assign(self, variables: Any, parts: list[torch.Tensor]) -> None:
        for variable, part in zip(variables, parts, strict=True):
            if variable.value.dtype == torch.float64:  # what rounds to the same is more exact
                part = torch.where(variable.value.to(part.dtype) == part, variable.value, part)
            variable.value.copy_(part)

    def take_stream(self, rank: int, num_ranks: int) -> None:
        super().take_stream(rank, num_ranks)
        number = self._streams.number
        if num_ranks > 1 and number is not None:
            # A Dropout without a seed draws from PyTorch's own generator, which begins with the
            # same number in every process.
            torch.manual_seed(number)

    # -- training ------------------------------------------------------------------------------

    def train(self, stack: BatchStack) -> None:
        self.build_metrics(stack)
        self._set_training(True)
        data = self._tensors(stack)
        with self._unreported_metrics():
            for index in range(stack.num_batches):
                self._train_step(_batch(data, index))

    def _evaluate_stack(self, stack: BatchStack) -> None:
        self._set_training(False)
        data = self._tensors(stack)
        with torch.no_grad(), self._unreported_metrics():
            for index in range(stack.num_batches):
                self._test_step(_batch(data, index))

    @contextlib.contextmanager
    def _unreported_metrics(self) -> Iterator[None]:
        """Within, Keras' own steps do not compute the metrics' values, which nobody reads."""
        kind = type(self.model)
        own = ("train_step", "test_step", "compute_metrics", "get_metrics_result")
        if any(getattr(kind, name) is not getattr(keras.Model, name) for name in own):
            yield
            return
        object.__setattr__(self.model, "get_metrics_result", dict)
        try:
            yield
        finally:
            object.__delattr__(self.model, "get_metrics_result")

    def _set_training(self, mode: bool) -> None:
        """The flag of ``torch.nn.Module``, for plain PyTorch layers inside a Keras model."""
        if self.model.training is not mode:
            torch.nn.Module.train(self.model, mode)

    def _tensors(self, stack: BatchStack) -> Any:
        tensors = map_arrays(self._tensor, self.arranged(stack))
        # Keras writes to images (RandomBrightness) and weights: on a CPU the partition's own rows.
        return map_arrays(torch.clone, tensors) if self._device.type == "cpu" else tensors

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return tensor_of(array, self._device)

    def find_terms(self, stack: BatchStack) -> None:
        self._set_training(True)
        batch = map_arrays(
            lambda tensor: tensor[: few_rows(self.model)], _batch(self._tensors(stack), 0)
        )
        # What plain PyTorch layers keep is no variable of Keras, whose changes are left out.
        buffers = [(b, b.clone()) for b in torch.nn.Module.buffers(self.model)]
        with torch.random.fork_rng():
            self._counted = forward_terms(self.model, batch, sums=self._sums).counted
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    def denominators(self, stack: BatchStack) -> npt.NDArray[Any]:
        """Never called: a step asks for the factors itself."""
        raise NotImplementedError

    def compute_weighed(self, batch: BatchStack, reducer: Reducer) -> tuple[Numbers, Numbers]:
        """See :class:`KerasLearner`. PyTorch computes what it is told, so a forward pass for the
        denominators alone would be a whole one: each term asks for its factor where it is met."""
        mine, of_all, share = [float(batch.num_rows)], [0.0], None

        def factor(index: int, denominator: Any) -> Any:
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
        with self._watched(reducer):
            self._compute_gradients(batch, reducer.buffer, Terms(factor, sums=self._sums), share)
        return np.array(mine), np.array(of_all)

    def skip_weighed(self, reducer: Reducer, num_terms: int) -> None:
        for _ in range(num_terms):
            reducer.add_up(np.zeros(2))

    def weighed_gradients(
        self, stack: BatchStack, out: FloatArray, factors: FloatArray | None
    ) -> None:
        share = self.share_in(factors)
        terms = Terms.with_factors(factors, sums=self._sums)
        self._compute_gradients(stack, out, terms, share)

    def _gradients_for(
        self, batch: BatchStack, reducer: Reducer, factors: FloatArray | None = None
    ) -> None:
        with self._watched(reducer):
            super()._gradients_for(batch, reducer, factors)

    @contextlib.contextmanager
    def _watched(self, reducer: Reducer) -> Iterator[None]:
        """Within, parts of the gradient leave as soon as they are there, if they can.

        The first pass of a model only shows whether they can, and so does the first with a reducer:
        behind it the workers tell each other which variables have a gradient.
        """
        self._begun = 0
        several = len(reducer.parts) > 1 and not reducer.skips and self._device.type == "cpu"
        if not several or self._sends_early is False:
            yield
            return
        agreed = self._agreed_with is not None and self._agreed_with() is reducer
        slots, sends = self._layout.slots, bool(self._sends_early) and agreed
        with BackwardPass(reducer, slots, self.trained, self.averaged, sends=sends) as watched:
            self._pass = watched
            try:
                yield
            finally:
                self._pass = None
        self._begun = watched.begun

    def _agree_with(self, reducer: Reducer) -> None:
        super()._agree_with(reducer)
        self._agreed_with = weakref.ref(reducer)

    def _learn_from(self, reducer: Reducer) -> None:
        super()._learn_from(reducer)
        self._agreed_with = weakref.ref(reducer)

    def _compute_gradients(
        self, stack: BatchStack, out: FloatArray, terms: Terms, share: float | None
    ) -> None:
        require_one_batch(stack)
        self._layout.check(out)
        self.build_metrics(stack)
        self._set_training(True)
        batch = _batch(self._tensors(stack), 0)
        with followed(terms, self.model), captured_gradients(self.model, share) as captured:
            self._logged_step(batch)
        with torch.no_grad():
            for variable, value in overwriting(captured):
                variable.assign(value)
        gradients = match_gradients(self.model, captured, self.trained)
        self._has_gradient = [g is not None for g in gradients]
        if self._pass is not None:
            self._sends_early = self._pass.ended_as_seen(gradients)
            if self._pass.begun:
                if not self._sends_early:
                    raise self._pass.refuse(self.model.name)
                self._pass.fill_rest()
                return
        with torch.no_grad():
            parts = [
                torch.zeros_like(v.value) if g is None else g
                for g, v in zip(gradients, self.trained, strict=True)
            ]
            self._concat([*parts, *(v.value for v in self.averaged)], out)

    def apply_gradients(self, flat: FloatArray) -> None:
        parts = self._split(flat)
        typed = [
            part.to(variable.value.dtype)
            for part, variable in zip(parts[: len(self.trained)], self.trained, strict=True)
        ]
        given = gradients_to_apply(self.model, typed, self.trained, self._has_gradient)
        with torch.no_grad():
            self.model.optimizer.apply(*given)
            self._assign(self.averaged, parts[len(self.trained) :])


def tensor_of(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """``array`` on a device; on a CPU the same memory, which nobody may write to."""
    wider = _WIDER.get(array.dtype.name)
    array = np.ascontiguousarray(array, wider).reshape(array.shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).to(device, non_blocking=True)


def _batch(data: Any, index: int) -> Any:
    return pack_batch(*map_arrays(lambda tensor: tensor[index], data))
