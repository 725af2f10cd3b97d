"""Training in rounds: the mean of all ranks' gradients at each step, through a parameter server."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from sparkdl.files.run_state import RunState
from sparkdl.ps.client import Client, Progress
from sparkdl.ps.shards.client import ShardedClient
from sparkdl.ps.synchronizer import Unwrapping, Way
from sparkdl.training.changes import VariableChanges
from sparkdl.training.finite import FiniteCheck
from sparkdl.training.learning import BatchStack, InGraph, SharedLearner
from sparkdl.training.phases import current_clock
from sparkdl.training.slices import Slices
from sparkdl.weights import FloatArray, Layout


class RoundSynchronizer(Way):
    """Each step is a round: gradients out, their row-weighted mean in, one optimizer step.

    The weights live on the workers and stay equal on all. A stack of batches is one compiled call,
    which makes one round for each of its batches: this object is the
    :class:`~sparkdl.training.learning.Reducer` that the learner calls from inside that call. A
    round waits for the next attempt of a rank that was lost. It gets weights and optimizer state
    from a live rank, as they are before that round; if none is left, it starts from the last
    snapshot.

    Args:
        client: Connected; has said HELLO.
        layout: Layout of the flat buffer ``[gradient | statistics]``.
        check: Looks at the gradients before they are sent; None: nobody does.
        takes_slices: Whether gradients of embeddings may travel as slices.
        with_tables: Whether layers of the model have rows in tables on the servers.
    """

    in_graph: InGraph | None = None
    every_batch: ClassVar[bool] = True

    def __init__(
        self,
        client: Client,
        layout: Layout,
        check: FiniteCheck | None = None,
        *,
        takes_slices: bool = True,
        with_tables: bool = False,
    ) -> None:
        self._with_tables = with_tables
        self._client = client
        self._clock = current_clock()
        self._layout = layout
        self._check = check or FiniteCheck("ignore", layout.trained_size)
        self._statistics = np.zeros(layout.size - layout.trained_size, np.float32)
        self._learner: SharedLearner | None = None
        self._scaled = False
        self._progress = Progress(epoch=-1, batch=0, batches=1, rows=0)
        self._step = -1  # of the present stack
        self._rounds, self._rate = 0, math.nan
        self._first = self._own_steps = 0  # of the present epoch: its first round here, own steps
        self._unwrapping = Unwrapping()
        self.takes_slices = takes_slices
        self._sliced: tuple[int, ...] = ()
        self.slices: Sequence[Slices] = ()
        self._lay_out(layout)
        self.rows = self._sent_rows = 0
        self.refused = False
        self._sums = 0  # of the present round
        self._entered = False  # whether the present step has sent something
        self._unstored: tuple[int, int] | None = None  # the position of weights no snapshot has

    def start(self, learner: SharedLearner, epoch: int = 0, batch: int = 0) -> bool:
        """Brings ``learner`` to where the others are: the server's weights, or a live rank's."""
        if self._with_tables:
            assert isinstance(self._client, ShardedClient)
            learner.tables.serve_from(self._client.open_rows(learner.tables.specs))
        source, with_optimizer = self._client.source, True
        if source == "state":
            RunState.from_bytes(self._client.get_state()).load_into(learner)
        else:
            kept = self._client.kept() if source == "snapshot" else b""
            state = RunState.from_bytes(kept) if kept else RunState(0)
            with_optimizer = state.epoch == epoch and bool(state.optimizer)
            if with_optimizer:
                state.load_into(learner)
            learner.write_weights(self._client.pull())
        self.take_statistics(learner)
        self._learner, self._client.give_state = learner, self._state
        self._unstored = (epoch, batch)
        return with_optimizer

    def take(
        self, learner: SharedLearner, stack: BatchStack | None, window: int, progress: Progress
    ) -> None:
        """See :class:`Way`; each batch is a round."""
        self.train(learner, stack, progress)
        self._unstored = (progress.epoch, progress.batch)

    def take_changes(self, learner: SharedLearner, changes: Sequence[VariableChanges]) -> None:
        super().take_changes(learner, changes)
        self.take_statistics(learner)

    @contextlib.contextmanager
    def weights_of_run(self, learner: SharedLearner, last: bool) -> Iterator[None]:
        """The weights are this worker's; counters are those of a worker with every batch."""
        self._share_carried(learner, self._progress.epoch, self._progress.batch)
        yield

    def _share_carried(self, learner: SharedLearner, epoch: int, batch: int) -> None:
        """Gives this rank, if it had fewer batches, what a rank with all of them has counted."""
        every_step = self._had_every_step
        send, is_there = self._client.carried_wanted(epoch, batch, every_step=every_step)
        if send:
            carried = RunState(epoch, carried=learner.carried_state()).to_bytes()
            self._client.put_carried(carried, epoch, batch)
        elif is_there and not every_step:
            learner.load_carried_state(RunState.from_bytes(self._client.carried()).carried)

    def end_epoch(self, learner: SharedLearner, epoch: int) -> None:
        """Leaves the weights with the server, if no other worker does."""
        self.snapshot(learner, epoch + 1)
        self._unstored = None
        self._share_carried(learner, epoch + 1, 0)

    def keeps_state(self, holds: bool, epoch: int) -> bool:
        """The worker that stores the weights of that moment stores the rest, before it does."""
        return self._client.snapshot_wanted(epoch, every_step=self._had_every_step)

    def end_run(self, learner: SharedLearner) -> None:
        if self._unstored is not None:
            self.snapshot(learner, *self._unstored)

    def take_statistics(self, learner: SharedLearner) -> None:
        """Takes the learner's statistics again, after someone else has changed them."""
        weights = np.empty(self._layout.size, np.float32)
        learner.read_weights(weights)
        self._statistics[...] = weights[self._layout.trained_size :]

    def _state(self) -> bytes:
        """The learner's state before the present round, of which it has done the forward pass."""
        assert self._learner is not None
        state = RunState.of(self._learner, self._progress.epoch)
        state.weights[self._layout.trained_size :] = self._statistics
        carried = self._learner.carried_state(self._own_steps, self._done - 1 - self._first)
        return replace(state, carried=carried).to_bytes()

    @property
    def _had_every_step(self) -> bool:
        """Whether this rank had a batch in every round of the epoch that it took part in."""
        return self._own_steps >= self._progress.batch - self._first

    @property
    def _done(self) -> int:
        """Rounds of the epoch when the present one is done."""
        return self._progress.batch - self._rounds + self._step + 1

    def train(self, learner: SharedLearner, stack: BatchStack | None, progress: Progress) -> None:
        """The rounds of a stack of batches; None is one round without a batch.

        Each batch is a call of its own where a round needs the learning rate of its step: rows on
        servers, and a rule of a user's own beside a schedule.

        Raises:
            NotFiniteError: A gradient was not finite, with ``on_nan='raise'``.
            TransportError: The server is gone.
        """
        rounds = 1 if stack is None else stack.num_batches
        if self._learner is not learner or progress.epoch != self._progress.epoch:
            self._first, self._own_steps = progress.batch - rounds, 0
        self._learner, self._progress, self._step = learner, progress, -1
        self._sums, self._entered, self._scaled = 0, False, learner.optimizer.scales_loss
        self._rounds, self._rate = rounds, progress.learning_rate
        with self._unwrapping.around():
            if stack is None:
                learner.skip_reducing(self)
            elif self._with_tables or (learner.optimizer.has_schedule and not self.takes_slices):
                for batch in stack.single_batches():
                    self._rate = learner.optimizer.learning_rate
                    learner.train_reducing(batch, self)
            else:
                learner.train_reducing(stack, self)
        self._check.settle()

    def snapshot(self, learner: SharedLearner, epoch: int, batch: int = 0) -> None:
        """Returns when the server has the weights of this position: from this rank, or another.

        To be called by all ranks at an epoch's end (``epoch`` being the next one) and at the end.
        """
        if self._client.snapshot_wanted(epoch, batch, every_step=self._had_every_step):
            learner.read_weights(self._client.buffer)
            self._client.snapshot(epoch, batch)

    def send_as_slices(self, places: Sequence[int]) -> None:
        if tuple(places) != self._sliced:
            self._sliced = tuple(places)
            self._lay_out(self._layout.without(self._sliced))

    def _lay_out(self, dense: Layout) -> None:
        self._dense = dense
        self.parts = [slice(0, dense.size)]
        # An encoded gradient is always whole: what is dense of it is put together here.
        apart = bool(self._sliced) and self._client.encodes
        self._apart = np.zeros(dense.size, np.float32) if apart else None

    @property
    def buffer(self) -> FloatArray:
        """The numbers to be sent, and after a round those that came back."""
        if self._apart is not None:
            return self._apart
        if self._sliced:
            return self._client.sliced_buffer(self._dense.size, len(self._sliced))
        return self._client.buffer

    @property
    def skips(self) -> bool:
        return self._check.skips

    def begin(self, part: int) -> None:
        """Takes this rank's gradient in ``buffer``; there is one part, the whole."""
        self._enter_step()
        buffer, first = self.buffer, self._layout.trained_size - self._dense.trained_size
        self.refused = self.rows > 0 and not self._check.notes(
            buffer, first, self._scaled, self._step, self.slices
        )
        self._sent_rows = 0 if self.refused else self.rows
        if not self._sent_rows:
            buffer[...] = 0
            self.slices = self._no_slices

    def _enter_step(self) -> None:
        """Counts a step when its first message is about to go out."""
        if not self._entered:
            self._entered = True
            self._step += 1
            self._own_steps += self.rows > 0

    def _progress_of_step(self) -> Progress:
        return Progress(
            epoch=self._progress.epoch, batch=self._done, batches=1 if self._sent_rows else 0,
            rows=self._sent_rows, learning_rate=self._rate,
        )  # fmt: skip

    def finish(self) -> bool:
        """One round; False if no rank had rows: the buffer then holds no gradient."""
        progress = self._progress_of_step()
        with self._unwrapping.inside(), self._clock.within("exchange", any_thread=True):
            self._exchange(progress)
        self._sums, self._entered = 0, False
        mean = self.buffer
        statistics = mean[self._dense.trained_size :]
        if self._client.round_rows:
            self._statistics[...] = statistics
            return True
        mean[: self._dense.trained_size] = 0
        statistics[...] = self._statistics
        return False

    def _exchange(self, progress: Progress) -> None:
        """One round; ``buffer`` and ``slices`` are then those of all ranks."""
        if not self._sliced:
            self._client.push_pull(progress)
            found = self._client.round_slices
            if found:  # a rank without a batch hears so which gradients are slices
                self.send_as_slices([s.place for s in found])
        else:
            if self._apart is not None:
                self._layout.copy_without(self._sliced, self._client.buffer, self._apart, back=True)
            self._client.push_pull_slices(progress, self._dense.size, self.slices)
        self.slices = self._client.round_slices if self._client.round_rows else self._no_slices
        if self._apart is not None:
            self._layout.copy_without(self._sliced, self._client.buffer, self._apart)

    @property
    def _no_slices(self) -> list[Slices]:
        return [Slices.none(i, self._layout.slots[i].width) for i in self._sliced]

    def agree_on_stop(self, value: float) -> None:
        """Nothing to do: the server tells all ranks at the same round."""

    def agree_on_gradients(self, mine: list[int]) -> list[int]:
        """The kinds that this rank knows, and tells with its rows; without a batch those of the
        round.
        """
        if mine:
            self._client.without_gradient = [i for i, kind in enumerate(mine) if not kind]
            return mine
        without = self._client.round_without_gradient
        if not without:
            return []
        kinds = [1 + (i in self._sliced) for i in range(self._layout.num_trained)]
        for i in without:
            kinds[i] = 0
        return kinds

    @property
    def num_workers(self) -> int:
        return self._client.num_workers

    def agree_on_terms(self, mine: int) -> int:
        """The number that this rank knows; the server waits for no sums of a rank without rows."""
        return max(0, mine) if self._client.num_workers > 1 else 0

    def add_up(self, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sums over all ranks that have a batch; see :class:`sparkdl.training.learning.Reducer`."""
        if not self.rows:
            return np.zeros_like(numbers)
        self._sums += 1
        self._enter_step()
        with self._unwrapping.inside(), self._clock.within("exchange", any_thread=True):
            return self._client.add_up(numbers, self._sums, self._progress_of_step())

    def is_sound(self) -> bool:
        """Whether the gradient in ``buffer`` would be taken."""
        first = self._layout.trained_size - self._dense.trained_size
        return self._check.is_sound(self.buffer, first, self._scaled, self.slices)
