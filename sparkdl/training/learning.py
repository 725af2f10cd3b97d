"""The seam between the loop, its learner and its batches: what is trained, and on what.

The loop (:mod:`sparkdl.worker`) lets a *learner* (a model) train on *batches*, and a
*synchronizer* (:mod:`sparkdl.training.syncing`) exchange what was learned with the other workers. A
:class:`Learner` has what the loop asks; a :class:`SharedLearner` what synchronizers ask, too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sparkdl.files.run_state import Stateful, StatefulOptimizer
from sparkdl.tables.service import IdArray, RowService, TableSpec
from sparkdl.tables.store import RowStore
from sparkdl.training.changes import VariableChanges
from sparkdl.training.reports import MetricState
from sparkdl.training.slices import Slices
from sparkdl.weights import FloatArray

MAX_STACK = 16
"""Batches in one stack at most: more gains nothing and takes memory for the rows."""
Arrays = dict[str, npt.NDArray[Any]]
"""Arrays by the name of a model's input or output."""


@dataclass(frozen=True)
class BatchStack:
    """Batches stacked along the first axis, for one compiled call; all have as many rows.

    The arrays may be views of the partition's memory: do not write into them.

    Args:
        x: Input name -> array of shape ``(num_batches, rows per batch, ...)``.
        y: Output name -> array of labels, stacked alike.
        sample_weight: Output name -> array, or None.
        following: Waits for the stack after this one, where there is one; raises
            ``concurrent.futures.CancelledError`` if nobody reads it any more.
        grouped: Whether the rows of a batch were chosen to be compared with each other.
    """

    x: Arrays
    y: Arrays
    sample_weight: Arrays | None
    num_batches: int
    num_rows: int
    following: Callable[[], BatchStack] | None = field(default=None, compare=False, repr=False)
    grouped: bool = False

    def part(self, first: int, count: int = 1) -> BatchStack:
        """The batches ``first`` to ``first + count`` as a stack, without a copy."""
        if count == self.num_batches:
            return self

        def cut(arrays: Arrays) -> Arrays:
            return {name: array[first : first + count] for name, array in arrays.items()}

        return BatchStack(
            cut(self.x), cut(self.y),
            None if self.sample_weight is None else cut(self.sample_weight), count,
            self.num_rows // self.num_batches * count,
        )  # fmt: skip

    def single_batches(self) -> Iterator[BatchStack]:
        for index in range(self.num_batches):
            yield replace(self.part(index), following=self._after(index))

    def _after(self, index: int) -> Callable[[], BatchStack] | None:
        if index + 1 < self.num_batches:
            return lambda: self.part(index + 1)
        following = self.following
        return None if following is None else lambda: following().part(0)


class BatchSource(Protocol):
    """The data, as the loop sees them; :class:`sparkdl.data.batches.Batches` implements it."""

    @property
    def full_batches(self) -> int: ...
    @property
    def steps_per_epoch(self) -> int: ...
    @property
    def stackable(self) -> bool: ...
    @property
    def batch_bytes(self) -> int: ...
    def stacks(
        self, epoch: int, most_batches: int, start_batch: int = 0
    ) -> Generator[BatchStack]: ...


class LearnerOptimizer(StatefulOptimizer, Protocol):
    """The optimizer of a model in training."""

    @property
    def step(self) -> int:
        """Batches that it has taken, whose scaled loss did not overflow."""

    def set_step(self, step: int) -> None:
        """Sets the steps that a learning-rate schedule counts; nothing without a schedule."""

    @property
    def learning_rate(self) -> float:
        """The learning rate now."""

    def set_learning_rate(self, value: float) -> None:
        """Sets the learning rate; refused if it is a schedule."""

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate follows a schedule."""

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled (mixed precision): infinite gradients are part of that."""

    @property
    def loss_scale(self) -> float | None:
        """The factor of the loss and its gradients in the next step; None: there is none."""

    def end_scaled_step(self, finite: bool) -> float:
        """Counts a step that an exchange takes in the optimizer's place, and adapts the scale.

        Args:
            finite: Whether the gradient is finite on all ranks. If not, there is no step.

        Returns:
            The factor that the loss, and so the gradient, had.
        """

    def slots(self, names: list[str]) -> dict[str, FloatArray] | None:
        """The optimizer's variables of some kinds (``'_momentums'``) as flat vectors by name.

        A kind has one variable for each trained variable of the model. None if the optimizer
        lacks one of the kinds.
        """

    def load_slots(self, slots: dict[str, FloatArray], step: int) -> None:
        """The counterpart of :meth:`slots`; ``step`` is the number of steps taken."""


class LearnerMetrics(Protocol):
    """The metric variables of a model in training."""

    def state(self) -> MetricState:
        """All metric variables (loss first) as one vector; vectors of workers add up."""

    def reset(self) -> None:
        """Zeroes the metric variables (at the start of an epoch)."""

    def keep(self) -> None:
        """Remembers the metric variables as they are."""

    def restore(self) -> None:
        """Sets the metric variables to what :meth:`keep` has remembered last.

        Zeroes them if it was not called since the last :meth:`reset`.
        """


class LearnerDraws(Protocol):
    """The random numbers that the layers of a model draw in training."""

    def mark(self, seed: int, epoch: int, step: int) -> None:
        """An epoch of a run with this seed begins at a step; see :meth:`fill`."""

    def fill(self, steps: int, steps_of_all: int) -> None:
        """Counts the random numbers of ``steps_of_all`` steps since :meth:`mark`.

        This worker has taken ``steps`` of them.
        """

    def skip(self, steps: int) -> None:
        """Leaves out what an earlier attempt may have drawn in ``steps`` steps."""


class Learner(Protocol):
    """A model in training, as the loop sees it. Not thread-safe: one thread trains."""

    @property
    def optimizer(self) -> LearnerOptimizer: ...
    @property
    def metrics(self) -> LearnerMetrics: ...
    @property
    def draws(self) -> LearnerDraws: ...
    def evaluate(self, stacks: Iterable[BatchStack]) -> MetricState:
        """The metric state over ``stacks`` with the present weights.

        The metric state of training is the same afterwards. Empty if there are no stacks.
        """


class Reducer(Protocol):
    """Joins the gradients of all workers, between the two halves of a learner's step.

    For each step the learner sets ``rows`` to the rows of its batch (0: it takes part without a
    batch), writes its gradient into ``buffer``, hands over each of ``parts`` in order with
    ``begin``, calls ``finish``, and then takes the joined gradient from ``buffer``. Where
    ``in_graph`` is not None, a TensorFlow learner calls Horovod's own operations inside the
    compiled step instead.
    """

    rows: int
    slices: Sequence[Slices]
    """This worker's gradients that travel as slices, and after ``finish`` those of all workers.

    The learner sets them before the first ``begin`` where gradients may be left out, else before
    ``finish``.
    """

    @property
    def takes_slices(self) -> bool:
        """Whether gradients of embeddings may travel as slices; otherwise all are dense."""

    def send_as_slices(self, places: Sequence[int]) -> None:
        """From now on the gradients of these variables travel as slices.

        ``buffer`` and ``parts`` are then those of the layout without them.

        Args:
            places: Numbers of the variables in the layout.
        """

    @property
    def buffer(self) -> FloatArray:
        """A buffer of the layout: ``[gradient | statistics]``."""

    @property
    def parts(self) -> list[slice]:
        """Slices of the buffer, in the order in which the learner hands them over.

        The first may reach beyond the buffer's end; others may begin and end within a variable.
        """

    @property
    def num_workers(self) -> int:
        """How many workers train together."""

    @property
    def in_graph(self) -> InGraph | None:
        """How to reduce inside the compiled step, or None."""

    @property
    def skips(self) -> bool:
        """Whether a gradient of this worker that is not finite is left out, and training goes on.

        Then the learner writes the whole gradient before it hands over the first part, takes only
        the statistics where ``finish`` returns False, and goes back to the metrics of before a
        batch that was ``refused``.
        """

    @property
    def refused(self) -> bool:
        """Whether this worker's gradient of the present step was left out."""

    def begin(self, part: int) -> None:
        """Takes one part of this worker's gradient, which is in ``buffer``."""

    def finish(self) -> bool:
        """Waits until ``buffer`` holds the joined gradient; False if no worker had rows."""

    def agree_on_stop(self, value: float) -> None:
        """After an exchange inside the step: above 0 if any worker was told to stop."""

    def agree_on_gradients(self, mine: list[int]) -> list[int]:
        """Tells the other workers which trained variables have a gradient, and is told by them.

        A worker without a batch cannot know. In its first call a worker waits until all have
        called, before any of them applies a step; later calls return at once.

        Args:
            mine: For each trained variable 0 (none), 1 (dense) or 2 (it travels as slices);
                empty on a worker that does not know.

        Returns:
            What the workers know together; empty if none of them knows.
        """

    def agree_on_terms(self, mine: int) -> int:
        """Tells the other workers how many terms of the loss have a denominator of their own.

        As :meth:`agree_on_gradients`: a worker without a batch cannot know, and its first call
        waits for those of the others.

        Args:
            mine: Terms that are no means over rows; below 0 on a worker that does not know.

        Returns:
            What the workers know together; 0 where there is no other worker, or where one without
            a batch has no part in :meth:`add_up`.
        """

    def add_up(self, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The sums of a few numbers over all workers, before ``begin`` of a step.

        Args:
            numbers: As many on each worker, which all call it equally often. Zeros on a worker
                without a batch.
        """

    def is_sound(self) -> bool:
        """Whether ``begin`` would take the gradient in ``buffer``, where ``skips``."""


class Exchanger(Protocol):
    """Exchanges weights with the other workers, between two batches of a learner's stack."""

    @property
    def buffer(self) -> FloatArray:
        """A buffer of the layout: the weights as trained, then those to train on from."""

    def exchange(self) -> None:
        """Replaces what ``buffer`` holds."""


class InGraph(Protocol):
    """An exchange inside the compiled step, by Horovod's operations."""

    @property
    def scale(self) -> float:
        """Most rows per batch of any worker: gradients are weighted by rows / scale."""

    @property
    def wire(self) -> str | None:
        """``'float16'``, ``'bfloat16'`` or None: what gradients travel as."""

    @property
    def stop_wanted(self) -> bool:
        """Whether this worker was told to stop."""

    @property
    def checks_gradients(self) -> bool:
        """Whether the step looks for NaN and infinity in the gradients."""

    def tell_not_finite(self, batch: int, own: bool) -> None:
        """After a call whose joined gradients were not finite.

        Args:
            batch: The first such batch of the stack, from 0.
            own: Whether this worker's own gradient was not finite.
        """


class Steps(Protocol):
    """The ways in which a synchronizer lets a model train, alone or with the other workers."""

    def train(self, stack: BatchStack) -> None:
        """Trains every batch of ``stack``, one optimizer step each, in one compiled call."""

    def gradients(self, stack: BatchStack, out: FloatArray) -> None:
        """The gradient of one batch, and the statistics after it, into ``out``; no step is taken.

        ``stack.num_batches`` must be 1. The trained section of ``out`` gets the gradient of the
        mean loss (0 where a variable has none); the averaged section the statistics.
        """

    def apply_gradients(self, flat: FloatArray) -> None:
        """One optimizer step with the trained section; sets the statistics from the other."""

    def know_gradients(self, agree: Callable[[list[bool]], list[bool]]) -> None:
        """Agrees with the other workers which trained variables have a gradient.

        Args:
            agree: Is called with what this learner knows (empty: nothing yet) and returns what
                all workers know together. From the next :meth:`apply_gradients` on the optimizer
                is given the gradients of exactly these variables; if empty, of those as before.
        """

    def train_reducing(self, stack: BatchStack, reducer: Reducer) -> None:
        """Trains every batch of ``stack``; each step applies the gradient that ``reducer`` joins
        over all workers."""

    def skip_reducing(self, reducer: Reducer) -> None:
        """Takes part in one such step without a batch of its own."""

    def train_exchanging(self, stack: BatchStack, window: int, exchanger: Exchanger) -> None:
        """Trains every batch of ``stack``; ``exchanger`` replaces the weights after each
        ``window`` of them, and after the last."""

    def constrained(self, flat: FloatArray) -> FloatArray:
        """Weights of all workers, made to hold the constraints of their variables."""


class LearnerTables(Protocol):
    """The tables outside of a model whose rows its layers look up."""

    @property
    def specs(self) -> list[TableSpec]:
        """The tables with all that they depend on, in the order of their names.

        Raises:
            ModelError: One cannot be trained with the model's optimizer, or two layers differ
                about one.
        """

    def id_reader(self) -> Callable[[BatchStack], list[tuple[str, IdArray]]]:
        """Finds what the layers will ask for in a batch: table and ids, each once and in order.

        Calls whose ids are known only inside of the model's own step are left out. The reader may
        be called in another thread than that which trains.
        """

    def give_rows(self, stores: Mapping[str, RowStore], rank: int, num_ranks: int) -> None:
        """Puts the rows that came with the model into the stores of the rank that owns them."""

    def serve_from(self, service: RowService) -> None:
        """From now on the layers have the rows of ``service``."""


class SharedLearner(Learner, Stateful, Steps, Protocol):
    """A model in training whose updates are exchanged with other workers."""

    @property
    def tables(self) -> LearnerTables:
        """Those of the model."""

    def carried_state(self, steps: int = 0, wanted: int = 0) -> bytes:
        """See :class:`Stateful`; with the random numbers of ``wanted`` steps since ``draws.mark``.

        This worker has taken ``steps``, of which the last may not be done. If 0, they are those of
        now.
        """

    def take_changes(self, changes: VariableChanges) -> None:
        """Gives variables of the model and of its optimizer what the driver's callbacks wrote."""


class Predictor(Protocol):
    """A model that only runs forward. Not thread-safe."""

    @property
    def passes(self) -> int:
        """Forward passes that :meth:`predict` can make in one call; may change between calls."""

    def predict(self, x: Arrays, batch_size: int) -> Arrays:
        """The model's outputs by name, one row for each row of the inputs.

        Args:
            x: Input name -> array of shape ``(rows, ...)``: 1 to ``batch_size`` rows, or
                ``passes * batch_size``.
            batch_size: Rows of every forward pass: fewer are filled up, and cut off again.
        """

    def reload(self) -> None:
        """Reads the variables of the model again, after someone else has changed them."""
