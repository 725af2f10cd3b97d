"""The half of a learner that the three Keras backends share, and its step among several workers."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.errors import ModelError
from sparkdl.learner.callback_sink import changed_pairs
from sparkdl.learner.checks.compile_parts import layers_can_add_loss
from sparkdl.learner.signature import has_own, model_signature, unbuilt
from sparkdl.learner.state.carried_state import CarriedState, paired, values_of
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
from sparkdl.learner.steps.captured_gradients import (
    captured_gradients,
    largest_of_all,
    match_gradients,
    overwriting,
)
from sparkdl.learner.steps.denominators import Numbers, Terms, factors, followed
from sparkdl.learner.steps.repeated_rows import has_own_loss, sums_stay, takes_any_rows
from sparkdl.training.changes import VariableChanges
from sparkdl.training.learning import BatchStack, Exchanger, Reducer
from sparkdl.training.reports import MetricState
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class Found:
    """Facts of a model that tracing one of its steps finds; the same for all batches of one form.

    Args:
        has_gradient: For each trained variable whether it has a gradient.
        counted: For each term of the loss that is no mean over rows whether it has a denominator;
            see :class:`sparkdl.learner.steps.denominators.Terms`.
        sliced: Numbers of the variables whose gradients are slices; None where nobody looked, as
            only TensorFlow has any.
    """

    has_gradient: tuple[bool, ...]
    counted: tuple[bool, ...]
    sliced: tuple[int, ...] | None = None


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
        self.exchanged = (*self.trained, *self.averaged)
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
                values = self.values_of([self.exchanged[index]])[0].reshape(-1)
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
        self.set_values(seeds)
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
        pairs = paired(self._carried.variables, state)
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


class ReducedStep:
    """One step of a worker, and what it tells the others in it; in the same order on all workers.

    They agree how many terms of the loss have denominators, add these up, agree which variables
    have a gradient, hand over the parts of the gradient and wait for the joined one.
    """

    def __init__(self, learner: KerasLearner, reducer: Reducer) -> None:
        self._learner, self._reducer = learner, reducer
        self._begun = 0  # parts that have left while the gradient was computed

    def take(self, batch: BatchStack) -> None:
        """A step with a batch of one."""
        learner, reducer = self._learner, self._reducer
        reducer.rows = batch.num_rows
        learner.draws.begin_step()
        if reducer.skips:
            learner.metrics.keep()
        if self.agree_on_terms(batch):
            self._compute_weighed(batch)
            self._join_overwritten(batch.num_rows > 0)
        else:
            self._begun = learner.write_gradient(batch, reducer)
        self.agree_on_gradients()
        for part in range(self._begun, len(reducer.parts)):
            reducer.begin(part)
        if reducer.finish() or not reducer.skips:
            learner.apply_joined(reducer)
        else:
            self._write_statistics(reducer.buffer)
        if reducer.skips and reducer.refused:
            learner.metrics.restore()

    def skip(self) -> None:
        """Takes part in a step without a batch."""
        reducer = self._reducer
        reducer.rows = 0
        self._add_nothing_up(reducer.agree_on_terms(-1))
        self.learn_gradients()
        for part in range(len(reducer.parts)):
            reducer.begin(part)
        if reducer.finish():
            self.learn_gradients()
            self._learner.apply_joined(reducer)

    def agree_on_terms(self, batch: BatchStack) -> int:
        """How many terms of the loss need a factor; 0 where this is the only worker."""
        learner = self._learner
        if learner.found is None:
            learner.metrics.build(batch)
            learner.note(learner.find_terms(batch))
        self.look_at_sums(batch)
        return self._reducer.agree_on_terms(len(learner.counted) + bool(learner.overwritten))

    def look_at_sums(self, stack: BatchStack) -> None:
        """Finds out whether code of the user's own divides sums of Keras' losses; looks once.

        Raises:
            ModelError: See :func:`sparkdl.learner.steps.repeated_rows.sums_stay`.
        """
        learner, model = self._learner, self._learner.model
        if learner.looked_at_sums or self._reducer.num_workers < 2:
            return
        learner.looked_at_sums = True
        if stack.grouped or not (has_own_loss(model) and takes_any_rows(model)):
            return
        variables = [*model.non_trainable_variables, *learner.overwritten]
        values = [np.array(value) for value in learner.values_of(variables)]
        before = list(zip(variables, values, strict=True))

        def gradient(batch: BatchStack, factors: FloatArray | None) -> FloatArray:
            flat = np.empty(learner.layout.size, np.float32)
            if learner.overwritten and factors is not None:
                factors = np.append(factors, np.float32(1))
            learner.eager_gradients(batch, flat, factors)
            learner.set_values(before)
            learner.metrics.restore()
            return flat[: learner.layout.trained_size]

        with learner.metrics.untouched(), learner.tables.trying():
            learner.sums = sums_stay(gradient, stack.part(0), learner.counted, model)

    def agree_on_gradients(self) -> None:
        """Tells the other workers which variables have a gradient, and of which form."""
        learner, reducer = self._learner, self._reducer
        assert learner.found is not None
        sliced = (learner.sliced or ()) if reducer.takes_slices else ()
        own = enumerate(learner.found.has_gradient)
        self._know(reducer.agree_on_gradients([int(has) + (i in sliced) for i, has in own]))

    def learn_gradients(self) -> None:
        """The same for a worker without a batch, which does not know."""
        learner, reducer = self._learner, self._reducer
        kinds = reducer.agree_on_gradients([])
        if kinds:
            self._know(kinds)
            learner.sliced = tuple(i for i, kind in enumerate(kinds) if kind > 1)
        learner.agreed_with = weakref.ref(reducer)
        if learner.sliced and reducer.takes_slices:
            reducer.send_as_slices(learner.sliced)

    def _know(self, kinds: list[int]) -> None:
        self._learner.agreed = tuple(kind > 0 for kind in kinds)
        self._learner.agreed_with = weakref.ref(self._reducer)

    def _compute_weighed(self, batch: BatchStack) -> None:
        """Writes the gradient of a loss whose terms have denominators of their own."""
        learner, reducer = self._learner, self._reducer
        before = np.empty(learner.layout.size if reducer.skips else 0, np.float32)
        if reducer.skips:
            learner.read_weights(before)
        mine, of_all, self._begun = learner.write_weighed(batch, reducer)
        if not reducer.skips:
            return
        # What is left out leaves its denominators out, too.
        sound = reducer.is_sound()
        left = reducer.add_up(mine if sound else np.zeros_like(mine))
        if sound and left[0] != of_all[0]:
            learner.write_weights(before)  # the statistics of before
            learner.metrics.restore()
            self._begun = learner.write_gradient(batch, reducer, learner.factors(mine, left))

    def _add_nothing_up(self, num_terms: int) -> None:
        """Takes part, without a batch, in all that the others add up."""
        learner, reducer = self._learner, self._reducer
        if num_terms:
            together = 1 if learner.asks_each_term else num_terms
            for _ in range(num_terms // together):
                reducer.add_up(np.zeros(1 + together))
            if reducer.skips:
                reducer.add_up(np.zeros(1 + num_terms))
            self._join_overwritten(False)
        learner.add_nothing_up(reducer)

    def _join_overwritten(self, has_batch: bool) -> None:
        learner, reducer = self._learner, self._reducer
        if learner.overwritten and reducer.num_workers > 1:
            mine = learner.values_of(learner.overwritten)
            joined = largest_of_all(mine, learner.rank if has_batch else None, reducer)
            learner.set_values(list(zip(learner.overwritten, joined, strict=True)))

    def _write_statistics(self, flat: FloatArray) -> None:
        layout = self._learner.layout
        weights = np.empty(layout.size, np.float32)
        self._learner.read_weights(weights)
        statistics = layout.size - layout.trained_size
        weights[layout.trained_size :] = flat[flat.size - statistics :]
        self._learner.write_weights(weights)


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


def weighing(learner: KerasLearner, factors: Any) -> tuple[Terms, Any]:
    """The terms of a step, and the batch's share of all rows, which follows their factors where
    variables are overwritten."""
    if factors is None:
        return Terms(sums=learner.sums), None
    share = factors[-1] if learner.overwritten else None
    return Terms(lambda index, _: factors[index], sums=learner.sums), share


def captured_step(
    learner: KerasLearner, step: Callable[[], Any], terms: Terms, share: Any
) -> tuple[Any, list[Any], list[tuple[Any, Any]], Found]:
    """Takes or traces a step whose gradients the optimizer does not get.

    Returns:
        What the step returned; the gradient of each trained variable, None where there is none;
        overwritten variables with their new values; and what was found.
    """
    model = learner.model
    with followed(terms, model), captured_gradients(model, share) as captured:
        result = step()
    gradients = match_gradients(model, captured, learner.trained)
    found = Found(tuple(g is not None for g in gradients), tuple(terms.counted))
    return result, gradients, overwriting(captured), found


def require_one_batch(stack: BatchStack) -> None:
    """Raises ModelError unless ``stack`` is a single batch, as a gradient is of one."""
    if stack.num_batches != 1:
        raise ModelError(
            "a gradient is of one batch", expected="a stack of 1 batch",
            received=f"{stack.num_batches}",
        )  # fmt: skip
