"""The seams of training: what the loop, learners, batches and synchronizers ask of each other.

The loop (:mod:`sparkdl.worker`) lets a *learner* (a model) train on *batches*, and a
*synchronizer* exchange what was learned with the other workers. A *strategy* is what the driver
sends to each worker, to make its synchronizer from. NumPy and protocols only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sparkdl.changes import VariableChanges
from sparkdl.finite import LossScaling
from sparkdl.reports import EpochReport, MetricState, Report
from sparkdl.run_state import RunState
from sparkdl.slices import Slices
from sparkdl.weights import FloatArray, Layout

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
        num_batches: Batches in the stack.
        num_rows: Rows in the stack.
    """

    x: Arrays
    y: Arrays
    sample_weight: Arrays | None
    num_batches: int
    num_rows: int

    def part(self, first: int, count: int = 1) -> BatchStack:
        """The batches ``first`` to ``first + count`` as a stack, without a copy."""
        if count == self.num_batches:
            return self

        def cut(arrays: Arrays) -> Arrays:
            return {name: array[first : first + count] for name, array in arrays.items()}

        return BatchStack(
            cut(self.x),
            cut(self.y),
            None if self.sample_weight is None else cut(self.sample_weight),
            count,
            self.num_rows // self.num_batches * count,
        )

    def single_batches(self) -> Iterator[BatchStack]:
        """Each batch as a stack of one."""
        return (self.part(index) for index in range(self.num_batches))


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

        The first may reach beyond the buffer's end.
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

    def is_sound(self, learner: LossScaling) -> bool:
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


class Learner(Protocol):
    """A model in training on one worker. Not thread-safe: one thread trains."""

    @property
    def layout(self) -> Layout:
        """Where each variable is in a flat buffer: [trained | averaged]."""

    def read_weights(self, out: FloatArray) -> None:
        """Copies the model's variables into ``out``, a buffer of the layout."""

    def write_weights(self, flat: FloatArray) -> None:
        """Sets the model's variables from ``flat``, a buffer of the layout.

        An element of a float64 variable that rounds to the given float32 stays as it is.
        """

    def constrained(self, flat: FloatArray) -> FloatArray:
        """Weights of all workers, made to hold the constraints of their variables."""

    def train(self, stack: BatchStack) -> None:
        """Trains every batch of ``stack``, one optimizer step each, in one compiled call."""

    def gradients(self, stack: BatchStack, out: FloatArray) -> None:
        """The gradient of one batch, and the statistics after it, into ``out``; no step is taken.

        ``stack.num_batches`` must be 1. The trained section of ``out`` gets the gradient of the
        mean loss (0 where a variable has none); the averaged section the statistics.
        """

    def apply_gradients(self, flat: FloatArray) -> None:
        """One optimizer step with the trained section; sets the statistics from the other."""

    def train_reducing(self, stack: BatchStack, reducer: Reducer) -> None:
        """Trains every batch of ``stack``; each step applies the gradient that ``reducer`` joins
        over all workers."""

    def train_exchanging(self, stack: BatchStack, window: int, exchanger: Exchanger) -> None:
        """Trains every batch of ``stack``; ``exchanger`` replaces the weights after each
        ``window`` of them, and after the last."""

    def skip_reducing(self, reducer: Reducer) -> None:
        """Takes part in one such step without a batch of its own."""

    def know_gradients(self, agree: Callable[[list[bool]], list[bool]]) -> None:
        """Agrees with the other workers which trained variables have a gradient.

        Args:
            agree: Is called with what this learner knows (empty: nothing yet) and returns what
                all workers know together. From the next :meth:`apply_gradients` on the optimizer
                is given the gradients of exactly these variables; if empty, of those as before.
        """

    def metric_state(self) -> MetricState:
        """All metric variables (loss first) as one vector; vectors of workers add up."""

    def reset_metrics(self) -> None:
        """Zeroes the metric variables (at the start of an epoch)."""

    def keep_metrics(self) -> None:
        """Remembers the metric variables as they are."""

    def restore_metrics(self) -> None:
        """Sets the metric variables to what :meth:`keep_metrics` has remembered last.

        Zeroes them if it was not called since the last :meth:`reset_metrics`.
        """

    def evaluate(self, stacks: Iterable[BatchStack]) -> MetricState:
        """The metric state over ``stacks`` with the present weights.

        The metric state of training is the same afterwards. Empty if there are no stacks.
        """

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
        """Sets the steps that a learning-rate schedule counts; nothing without a schedule."""

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled (mixed precision): infinite gradients are part of that."""

    def optimizer_state(self) -> bytes:
        """Optimizer variables as bytes (npz), for the driver or a joining worker."""

    def load_optimizer_state(self, state: bytes) -> None:
        """The counterpart of :meth:`optimizer_state`."""

    def carried_state(self) -> bytes:
        """The model's variables that a flat buffer does not hold, as bytes (npz).

        Integers, the state of seeds, float64, and frozen variables that were changed.
        """

    def carried_state_at(self, steps: int, wanted: int) -> bytes:
        """The same with the random numbers of ``wanted`` steps since :meth:`mark_draws`.

        This worker has taken ``steps``, of which the last may not be done.
        """

    def load_carried_state(self, state: bytes) -> None:
        """The counterpart of :meth:`carried_state`; to be called before :meth:`write_weights`."""

    def take_stream(self, rank: int, num_ranks: int) -> None:
        """From now on the layers draw the random numbers of a rank's own stream.

        The state of seeds travels without the rank, as the driver has it.
        """

    def mark_draws(self) -> None:
        """An epoch begins; see :meth:`fill_draws`."""

    def fill_draws(self, steps: int, steps_of_all: int) -> None:
        """Counts the random numbers of ``steps_of_all`` steps since :meth:`mark_draws`.

        This worker has taken ``steps`` of them.
        """

    def skip_draws(self, steps: int) -> None:
        """Leaves out what an earlier attempt may have drawn in ``steps`` steps."""

    def optimizer_slots(self, names: list[str]) -> dict[str, FloatArray] | None:
        """The optimizer's variables of some kinds (``'_momentums'``) as flat vectors by name.

        A kind has one variable for each trained variable of the model. None if the optimizer
        lacks one of the kinds.
        """

    def load_optimizer_slots(self, slots: dict[str, FloatArray], step: int) -> None:
        """The counterpart of :meth:`optimizer_slots`; ``step`` is the number of steps taken."""

    def reload(self) -> None:
        """Reads the variables of the Keras model again, after someone else has changed them."""

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


@dataclass(frozen=True)
class Start:
    """Where a worker begins: beyond zero if an earlier attempt at its task did part of the work.

    Args:
        epoch: Epoch to begin with.
        position: How much of that epoch is committed already: windows where all workers take them
            together, batches otherwise.
        windows_per_epoch: Windows that all workers take together (synchronous training), or None
            where each worker takes as many as it has.
        done: All work of this rank is committed already.
        with_optimizer: The learner has the optimizer state of that point, too.
    """

    epoch: int = 0
    position: int = 0
    windows_per_epoch: int | None = None
    done: bool = False
    with_optimizer: bool = False


@dataclass(frozen=True)
class Orders:
    """What the driver asks of a worker.

    Args:
        stopped: All workers stop.
        learning_rate: A learning rate that the driver has set since the start, or None.
    """

    stopped: bool = False
    learning_rate: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What a synchronizer says of the training when it has ended.

    Args:
        transport: Name of the transport or communicator, e.g. ``'shm'`` or ``'horovod'``.
        refused: Updates of this worker that were refused because they were not finite.
        counted: The part of this worker's changes that counted, a mean over its exchanges: below 1
            where a rule adds up the changes of all workers and they were too much together.
        unreported: Epoch -> its final report, where there is no connection to the driver.
        state: What the run keeps of this worker and could not be sent to the driver; else None.
    """

    transport: str
    refused: int = 0
    counted: float = 1.0
    unreported: Mapping[int, EpochReport] = field(default_factory=dict)
    state: RunState | None = None


class Synchronizer(Protocol):
    """Exchanges what one worker has learned with the others, through a server or all-reduce."""

    def start(self, learner: Learner, rows: int, batches: int, windows: int) -> Start:
        """Joins the run and sets the learner's weights.

        Args:
            learner: This worker's model.
            rows: Rows that this worker has per epoch.
            batches: Batches that it has per epoch.
            windows: Exchanges that it would make per epoch.
        """

    def train(self, learner: Learner, stack: BatchStack | None, report: Report) -> None:
        """Trains the batches of ``stack``, then exchanges; None exchanges without a batch."""

    def train_on(self, learner: Learner, stack: BatchStack, report: Report) -> None:
        """Trains a stack after which the window goes on, so that no exchange is due yet."""

    def weights_of_run(self, learner: Learner, last: bool) -> AbstractContextManager[None]:
        """Within, ``learner`` has the weights of the run, so that their metrics are evaluated.

        Args:
            learner: Has trained its batches of an epoch.
            last: The weights are those that the driver takes: no epoch follows, or its callbacks
                look at them. Waits until the other workers that take part have trained their
                batches, too.
        """

    def end_epoch(
        self,
        learner: Learner,
        epoch: int,
        metrics: MetricState,
        validation: MetricState | None,
        wait: bool,
    ) -> None:
        """Reports an epoch's metrics; with ``wait``, returns when the driver allows it."""

    def keep_state(self, learner: Learner, epoch: int) -> None:
        """Sends the driver what a checkpoint after ``epoch`` epochs needs from this worker."""

    def finish(self, learner: Learner, epoch: int) -> None:
        """Tells the others that this worker has trained all of its batches, or was stopped.

        What it has trained since the last exchange is exchanged first; then what the run keeps of
        this worker after ``epoch`` epochs goes to the driver, if there is a connection to it.
        """

    @property
    def every_batch(self) -> bool:
        """Whether ``train`` exchanges at every batch of a stack; a batch is a window then."""

    @property
    def cuts_stacks(self) -> bool:
        """Whether ``train`` can exchange after each ``Report.window`` batches of a stack."""

    @property
    def orders(self) -> Orders:
        """What the driver has told, as of a step at which this worker may follow."""

    def take_changes(self, learner: Learner) -> None:
        """Gives ``learner`` what the driver's callbacks wrote to the model, if it is time.

        Where the workers train in step, it is for all of them at the same step.
        """

    def outcome(self, learner: Learner, epoch: int) -> Outcome:
        """What there is to say of the training, after :meth:`finish`.

        Args:
            learner: This worker's.
            epoch: Epochs that are done.
        """


class RankIdentity(Protocol):
    """Which of the run's processes this is, as the launcher numbers them."""

    @property
    def rank(self) -> int:
        """From 0."""

    @property
    def attempt(self) -> int:
        """A number that no other attempt at the work of this rank has."""

    def all_gather(self, text: str) -> list[str]:
        """Every rank's text in rank order. Only where all ranks are launched together."""


class Strategy(Protocol):
    """How updates travel, made on the driver, pickled, and opened by each rank's process."""

    @property
    def independent(self) -> bool:
        """Whether the ranks' models never meet, so that each returns its own."""

    def meet(self, rank: RankIdentity) -> AbstractContextManager[RankIdentity]:
        """Begins to meet the other ranks; called only where all ranks are launched together.

        :meth:`open` takes what the context manager gives. It is entered before the framework
        starts, so that ranks wait for each other meanwhile.
        """

    def open(self, rank: RankIdentity, layout: Layout) -> AbstractContextManager[Synchronizer]:
        """The connected synchronizer of this rank; leaving it closes the connection.

        Raises:
            TransportError: A server or another rank cannot be reached.
            ModelError: ``layout`` is not that of the driver's model.
        """

    def report_failure(self, rank: RankIdentity, error: BaseException) -> None:
        """Tells the other ranks and the driver that this rank failed and is not tried again."""


class BatchSource(Protocol):
    """What the loop asks of the data; :class:`sparkdl.data.batches.Batches` implements it."""

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
