"""One step of a learner whose gradient is joined with those of all workers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.learner.steps.captured_gradients import largest_of_all
from sparkdl.learner.steps.repeated_rows import has_own_loss, sums_stay, takes_any_rows
from sparkdl.training.learning import BatchStack, Reducer
from sparkdl.weights import FloatArray

if TYPE_CHECKING:
    from sparkdl.learner.steps.keras_learner import KerasLearner


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
