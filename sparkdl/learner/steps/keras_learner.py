"""The half of a learner that the three Keras backends share."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.errors import ModelError
from sparkdl.learner.callback_writes import changed_pairs
from sparkdl.learner.checks.compile_parts import layers_can_add_loss
from sparkdl.learner.signature import has_own, model_signature, unbuilt
from sparkdl.learner.state.carried_state import CarriedState, values_of
from sparkdl.learner.state.metric_state import ModelMetrics
from sparkdl.learner.state.model_weights import (
    averaged_variables,
    constrained,
    layout_of,
    overwritten_variables,
    trained_variables,
)
from sparkdl.learner.state.optimizer_state import ModelOptimizer, build_if_empty, unknown_variables
from sparkdl.learner.state.seed_streams import SeedStreams
from sparkdl.learner.state.served_rows import ModelTables
from sparkdl.learner.steps.denominators import Numbers, factors
from sparkdl.learner.steps.reduced_step import Found, ReducedStep
from sparkdl.training.changes import VariableChanges
from sparkdl.training.learning import BatchStack, Exchanger, Reducer
from sparkdl.training.reports import MetricState
from sparkdl.weights import FloatArray


class KerasLearner(ABC):
    """The part of a learner that is alike on all backends, around one compiled ``keras.Model``.

    See :class:`sparkdl.training.learning.Learner` for its methods.

    Args:
        model: Built and compiled. The learner trains it in place.

    Raises:
        ModelError: The model is not compiled or not built.
    """

    asks_each_term = False
    """Whether a step asks the other workers for the denominator of each term by itself."""

    def __init__(self, model: keras.Model) -> None:
        require_compiled(model)
        self.model = model
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self.trained, self.overwritten = trained_variables(model), overwritten_variables(model)
        self.averaged = averaged_variables(model)
        self.layout = layout_of(self.trained, self.averaged)
        self.metrics, self.tables = ModelMetrics(model), ModelTables(model)
        self.optimizer = ModelOptimizer(model, self.trained)
        self.draws = SeedStreams(model, self.values_of, self.set_values)
        self.found: Found | None = None  # by tracing a step
        self.agreed: tuple[bool, ...] = ()  # by the workers of a run: who has a gradient
        self.agreed_with: weakref.ref[Reducer] | None = None
        self.sliced: tuple[int, ...] | None = None  # the gradients that are slices, once known
        self.sums, self.looked_at_sums = True, False  # see Terms
        self.rank = 0

    @cached_property
    def prepare(self) -> Callable[[BatchStack], BatchStack] | None:
        """Makes batches of rows that the model's preprocessor takes; None: there is none."""
        found = model_signature(self.model).preprocessing
        return None if found is None else found.stack

    @abstractmethod
    def read_weights(self, out: FloatArray) -> None: ...

    @abstractmethod
    def write_weights(self, flat: FloatArray) -> None: ...

    @abstractmethod
    def train(self, stack: BatchStack) -> None: ...

    @abstractmethod
    def gradients(
        self, stack: BatchStack, out: FloatArray, factors: FloatArray | None = None
    ) -> None:
        """The gradient of one batch; see :class:`sparkdl.training.learning.Steps`.

        Args:
            factors: A factor for each term of the loss that is no mean over rows. Where there are
                overwritten variables, the batch's share of all rows follows the factors.
        """

    @abstractmethod
    def find_terms(self, stack: BatchStack) -> Found:
        """Traces a step, of which nothing but its terms has to be known."""

    def denominators(self, stack: BatchStack) -> npt.NDArray[Any]:
        """The denominators of the terms for one batch, before its gradient; 0: a sum."""
        raise NotImplementedError  # nobody calls it where ``asks_each_term``

    @abstractmethod
    def apply_gradients(self, flat: FloatArray) -> None: ...

    @abstractmethod
    def _evaluate_stack(self, stack: BatchStack) -> None:
        """Adds the rows of ``stack`` to the metric variables."""

    def weights_within(self, place: slice) -> Iterator[tuple[slice, FloatArray]]:
        for index, slot in enumerate(self.layout.slots):
            first, stop = max(place.start, slot.offset), min(place.stop, slot.offset + slot.size)
            if first < stop:
                variable = (*self.trained, *self.averaged)[index]
                values = self.values_of([variable])[0].reshape(-1)
                part = values[first - slot.offset : stop - slot.offset]
                yield slice(first, stop), part.astype(np.float32)

    def constrained(self, flat: FloatArray) -> FloatArray:
        return constrained(self.trained, self.layout, flat)

    def train_exchanging(self, stack: BatchStack, window: int, exchanger: Exchanger) -> None:
        for first in range(0, stack.num_batches, window):
            self.train(stack.part(first, min(window, stack.num_batches - first)))
            self.read_weights(exchanger.buffer)
            exchanger.exchange()
            self.write_weights(exchanger.buffer)

    def train_reducing(self, stack: BatchStack, reducer: Reducer) -> None:
        for batch in stack.single_batches():
            ReducedStep(self, reducer).take(batch)

    def skip_reducing(self, reducer: Reducer) -> None:
        ReducedStep(self, reducer).skip()

    def write_gradient(
        self, batch: BatchStack, reducer: Reducer, factors: FloatArray | None = None
    ) -> int:
        """Writes a gradient into the reducer's buffer; returns how many parts have left already."""
        self.gradients(batch, reducer.buffer, factors)
        return 0

    def write_weighed(self, batch: BatchStack, reducer: Reducer) -> tuple[Numbers, Numbers, int]:
        """Writes a gradient with factors, for which all workers tell their denominators.

        Returns:
            This worker's rows and the denominator of each term (0 for a sum over rows); the sums
            of all workers'; and how many parts have left already.
        """
        counted = list(self.denominators(batch)) if self.counted else []
        share = [0.0] if self.overwritten else []  # as many numbers as there are terms
        mine = np.array([batch.num_rows, *share, *counted], np.float64)
        of_all = reducer.add_up(mine)
        return mine, of_all, self.write_gradient(batch, reducer, self.factors(mine, of_all))

    def factors(self, mine: Numbers, of_all: Numbers) -> FloatArray:
        """The factors of :meth:`gradients` for the numbers of :meth:`write_weighed`."""
        if not self.overwritten:
            return factors(self.counted, mine, of_all)
        share = np.float32(mine[0] / of_all[0])
        return np.append(factors(self.counted, np.delete(mine, 1), np.delete(of_all, 1)), share)

    @abstractmethod
    def eager_gradients(
        self, stack: BatchStack, out: FloatArray, factors: FloatArray | None
    ) -> None:
        """:meth:`gradients` that are only looked at: nothing is compiled, and no step counted."""

    def apply_joined(self, reducer: Reducer) -> None:
        """Takes the step with the gradient that ``reducer`` has joined."""
        self.apply_gradients(reducer.buffer)

    def add_nothing_up(self, reducer: Reducer) -> None:  # noqa: B027
        """Takes part in the sums that layers make within a step, without a batch."""

    def note(self, found: Found) -> None:
        """Keeps what a traced step has; the gradients that are slices stay those of the first."""
        self.found = found
        if self.sliced is None:
            self.sliced = found.sliced

    @property
    def counted(self) -> tuple[bool, ...]:
        """For each term of the loss that gets a factor whether it has a denominator."""
        found = () if self.found is None else self.found.counted
        return tuple(c for c in found if c or self.sums)

    @property
    def known(self) -> tuple[bool, ...]:
        """For each trained variable whether it has a gradient, as far as that is known."""
        own = self.found.has_gradient if self.found is not None else (True,) * len(self.trained)
        return self.agreed or own

    def know_gradients(self, agree: Callable[[list[bool]], list[bool]]) -> None:
        own = () if self.found is None else self.found.has_gradient
        self.agreed = tuple(agree(list(own))) or self.agreed

    def evaluate(self, stacks: Iterable[BatchStack]) -> MetricState:
        training: list[Any] | None = None
        seeds = self.draws.kept()
        for stack in stacks:
            self.metrics.build(stack)
            if training is None:
                training = self.metrics.values()
                self.metrics.zero()
            self._evaluate_stack(stack)
        if training is None:
            return np.zeros(0)
        state = self.metrics.state()
        self.metrics.set_values(training)
        self.draws.give_back(seeds)
        return state

    @cached_property
    def _carried(self) -> CarriedState:
        return CarriedState(self.model, self.values_of)

    def carried_state(self, steps: int = 0, wanted: int = 0) -> bytes:
        draws = self.draws
        return self._carried.to_bytes(
            lambda v, value: draws.travelling(v, draws.at(v, value, steps, wanted))
        )

    def load_carried_state(self, state: bytes) -> None:
        pairs = self._carried.pairs(state)
        self.set_values([(v, self.draws.travelling(v, value)) for v, value in pairs])

    def take_stream(self, rank: int, num_ranks: int) -> None:
        """From now on draws the random numbers of one of several ranks."""
        self.rank = rank
        self.draws.take(rank, num_ranks)

    def values_of(self, variables: Sequence[keras.Variable]) -> list[npt.NDArray[Any]]:
        """The present values of variables of the model."""
        return values_of(variables)

    def set_values(self, pairs: list[tuple[keras.Variable, npt.NDArray[Any]]]) -> None:
        """Gives variables of the model new values."""
        for variable, value in pairs:
            variable.assign(value)

    def take_changes(self, changes: VariableChanges) -> None:
        model, optimizer = changed_pairs(self.model, changes)
        self.set_values(model)
        self.optimizer.assign(optimizer)

    def sync_model(self) -> None:  # noqa: B027
        """Writes the training state to the Keras model, for tests and benchmarks.

        Nothing to do where the model itself is trained.
        """

    def reload(self) -> None:
        """Notes that the model was loaded: its frozen variables, and the driver's seeds."""
        self._carried.watch()
        self.draws.loaded()


def require_compiled(model: keras.Model) -> None:
    """Raises ModelError unless ``model`` is a compiled ``keras.Model`` with built variables.

    It must have a loss: one that it was compiled with, or of its own.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(
            "cannot train this object", expected="a compiled keras.Model (Keras 3)",
            received=f"{type(model).__module__}.{type(model).__qualname__}",
        )  # fmt: skip
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise ModelError(
            f"model {model.name!r} is not compiled",
            expected="model.compile(optimizer, loss) before it is handed over",
            received="no optimizer",
            hint="call model.compile('adam', 'sparse_categorical_crossentropy') first; to predict, "
            "sparkdl.predict(model, df) takes a model that was never compiled",
        )
    if not model.built or not model.variables:
        raise unbuilt(model)
    build_if_empty(model)
    unknown = unknown_variables(model)
    if unknown and not has_own(model, "train_step"):
        raise ModelError(
            f"the optimizer of model {model.name!r} lacks variables that it is to train",
            expected="model.compile after what changes the variables (quantize('float8'), LoRA)",
            received=f"variable {unknown[0].path!r}, which is newer than the optimizer's state",
            hint="model.compile(...) again makes an optimizer of all variables, as in Keras",
        )
    if not _can_have_loss(model):
        raise ModelError(
            f"model {model.name!r} has no loss",
            expected="model.compile(optimizer, loss), add_loss in a layer, or a compute_loss or "
            "train_step of the model's own",
            received="model.compile without a loss",
            hint="e.g. model.compile('adam', 'sparse_categorical_crossentropy')",
        )


def _can_have_loss(model: keras.Model) -> bool:
    own_step = has_own(model, "compute_loss", "train_step")
    if own_step or model._compile_loss is not None or model.losses:
        return True
    return not type(model).__module__.startswith("keras.") or layers_can_add_loss(model)


def share_in(factors: Any, overwritten: Sequence[keras.Variable]) -> Any:
    """The batch's share of all rows, which follows the factors where variables are overwritten."""
    return None if factors is None or not overwritten else factors[-1]


def require_one_batch(stack: BatchStack) -> None:
    """Raises ModelError unless ``stack`` is a single batch, as a gradient is of one."""
    if stack.num_batches != 1:
        raise ModelError(
            "a gradient is of one batch", expected="a stack of 1 batch",
            received=f"{stack.num_batches}",
        )  # fmt: skip
