"""How a worker keeps in step with a parameter server (``Way``): by windows, or by gradients.

NumPy and protocols only: the learner and the client come by argument, so the same code runs
against a server process, shared memory, or a scripted client in a test.
"""

from __future__ import annotations

import abc
import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from sparkdl.errors import ConfigError
from sparkdl.ps.client import Client, Progress
from sparkdl.ps.shards.client import ShardedClient
from sparkdl.ps.shards.rows import RowsOfWorker, Wanted
from sparkdl.rules.damping import Damping
from sparkdl.rules.rule import Rule
from sparkdl.training.changes import VariableChanges
from sparkdl.training.finite import FiniteCheck, finite_state
from sparkdl.training.learning import BatchStack, SharedLearner
from sparkdl.training.phases import current_clock
from sparkdl.weights import FloatArray, Layout, NotFiniteError


class Way(abc.ABC):
    """By windows, in rounds, or gradient by gradient; one thread uses it.

    ``ServerSynchronizer`` joins the run, takes the driver's orders and reports; a way trains and
    exchanges.
    """

    every_batch: ClassVar[bool] = False
    """See :class:`sparkdl.training.syncing.Synchronizer`."""

    @property
    def cuts_stacks(self) -> bool:
        """Whether exchanges may happen inside a learner's call."""
        return False

    @property
    def counted(self) -> float:
        """The part of this worker's changes that counted; see :mod:`sparkdl.rules.damping`."""
        return 1.0

    @abc.abstractmethod
    def start(self, learner: SharedLearner, epoch: int = 0, batch: int = 0) -> bool:
        """Gives ``learner`` the weights to start from, of this position.

        Returns:
            Whether the learner has the optimizer state of that moment, too.
        """

    @abc.abstractmethod
    def take(
        self, learner: SharedLearner, stack: BatchStack | None, window: int, progress: Progress
    ) -> None:
        """Trains a stack and exchanges; None exchanges without a batch.

        Args:
            learner, stack: See :class:`sparkdl.training.syncing.Synchronizer`.
            window: Batches between two exchanges within the stack; 0 for one exchange after it.
            progress: After the stack.
        """

    def take_open(self, learner: SharedLearner, stack: BatchStack, progress: Progress) -> None:
        """Trains a stack whose exchange comes later."""
        learner.train(stack)

    @contextlib.contextmanager
    def weights_of_run(self, learner: SharedLearner, last: bool) -> Iterator[None]:
        """Within, ``learner`` has the weights of the run; see
        :class:`sparkdl.training.syncing.Synchronizer`."""
        yield

    def drain(self, learner: SharedLearner) -> None:  # noqa: B027  (most exchanges end at once)
        """Ends an exchange that runs beside the training: it would land in the client's buffer."""

    def end_epoch(self, learner: SharedLearner, epoch: int) -> None:
        """Called before the epoch is reported; ``epoch`` is the one that ends."""
        self.drain(learner)

    def take_changes(self, learner: SharedLearner, changes: Sequence[VariableChanges]) -> None:
        """Gives ``learner`` the changes, which the server's weights have too."""
        for change in changes:
            learner.take_changes(change)

    def keeps_state(self, holds: bool, epoch: int) -> bool:
        """Whether this worker leaves its optimizer state for the checkpoint after ``epoch`` epochs.

        Args:
            holds: Whether the run keeps this worker's state at its end.
            epoch: Epochs that are done.
        """
        return holds

    def end_run(self, learner: SharedLearner) -> None:
        """Sends what was trained since the last exchange."""
        self.drain(learner)


class Unwrapping:
    """A framework wraps what a Python function raises inside its compiled call; this undoes it."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Around our own code in the call: keeps what it raises."""
        try:
            yield
        except BaseException as error:
            self._error = error
            raise

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Around the framework's call: raises what was kept in place of what the framework does."""
        self._error = None
        try:
            yield
        except Exception:
            error, self._error = self._error, None
            if error is not None:
                raise error from None
            raise


class TableBatches:
    """Trains batch by batch: the next batch's rows are pulled meanwhile, gradients pushed after it.

    The model's own variables are exchanged after each window, as without tables. So the rows have a
    clock of their own: between a pull and the push other workers may have changed them. Where the
    rule exchanges rows in windows, they travel with the variables.
    """

    def __init__(self, rows: RowsOfWorker, learner: SharedLearner) -> None:
        self._rows, self._read = rows, learner.tables.id_reader()

    def train(self, learner: SharedLearner, stack: BatchStack, epoch: int, done: int) -> None:
        first = done - stack.num_batches
        for number, batch in enumerate(stack.single_batches(), 1):
            self._rows.begin_batch(self._wanted(batch))
            rate, scale = learner.optimizer.learning_rate, learner.optimizer.loss_scale
            before = 0 if scale is None else learner.optimizer.step
            learner.train(batch)
            taken = scale is None or learner.optimizer.step > before
            factor = (scale or 1.0) if taken else math.inf
            self._rows.end_step(epoch, first + number, rate, factor)

    def end_window(self, epoch: int, done: int) -> None:
        """The variables are exchanged now, and with them rows that are exchanged in windows."""
        self._rows.end_window(epoch, done)

    def _wanted(self, batch: BatchStack) -> Wanted | None:
        following = batch.following
        return None if following is None else lambda: self._read(following())


OVERLAP_FROM = 0.25
"""Share of a worker's time in exchanges from which on these run beside the training."""
_UNTIMED = 2
"""Windows at the start that are not timed: they compile."""


class _Peer:
    """A client as a rule's worker half sees it: the progress filled in, what is sent damped."""

    def __init__(
        self, client: Client, progress: Progress, damping: Damping | None, base: FloatArray
    ) -> None:
        self._client, self._progress = client, progress
        self._damping, self._base = damping, base

    @property
    def buffer(self) -> FloatArray:
        return self._client.buffer

    def push(self) -> None:
        self._damp()
        self._client.push(self._progress)

    def pull(self) -> None:
        self._client.pull()

    def push_pull(self) -> None:
        self._damp()
        self._client.push_pull(self._progress)

    def _damp(self) -> None:
        if self._damping is not None:
            self._damping.apply(self._client.buffer, self._base, self._progress.batches)


class WindowSynchronizer(Way):
    """Exchanges weights with the server after each window, by the rule's worker half.

    With ``overlap`` the exchange of one window runs in a thread while the next is trained; then
    ``local = center + (local_now - local_at_push)``: the worker's own progress since the push is
    kept on top of the center. Only for rules whose exchange is the base class's. A delta then
    counts one window later, so it is done only where it pays: on a slow network.

    Args:
        rule: Its ``exchange`` is called.
        client: Connected; has said HELLO.
        overlap: Whether to exchange while training; None measures, and begins with it when
            exchanges take more than :data:`OVERLAP_FROM` of the time and the rule allows it.
        check: Looks at the weights before they are sent; None: nobody does.
        at_once: Workers that train at the same time; 0: all that the server knows of.
        with_tables: Whether layers of the model have rows in tables on the servers.

    Raises:
        ConfigError: ``overlap`` with a rule that has an exchange of its own, or blocks.
    """

    def __init__(
        self,
        rule: Rule,
        client: Client,
        layout: Layout,
        *,
        overlap: bool | None = None,
        check: FiniteCheck | None = None,
        at_once: int = 0,
        with_tables: bool = False,
    ) -> None:
        can_overlap = type(rule).exchange is Rule.exchange and not rule.blocking
        if overlap and not can_overlap:
            raise ConfigError(
                f"rule {rule.name!r} cannot overlap its exchange with training",
                expected="a non-blocking rule with the plain delta exchange",
                received="overlap=True", hint="overlap=False",
            )  # fmt: skip
        self._rule, self._at_once = rule, at_once
        self._client = client
        self._clock = current_clock()
        self._check = check or FiniteCheck("ignore", layout.trained_size)
        self._trained_size = layout.trained_size
        self._damping: Damping | None = None
        self.overlaps = bool(overlap)
        self._measures = overlap is None and can_overlap
        self._windows = 0
        self._exchange_s = self._train_s = self._ended = 0.0
        self._local = np.zeros(layout.size, np.float32)
        self._base = np.zeros(layout.size, np.float32)
        self._pushed = np.zeros(layout.size if overlap else 0, np.float32)  # or when it begins
        self._flight: threading.Thread | None = None
        self._error: BaseException | None = None
        self._unwrapping = Unwrapping()
        self._progress = Progress(epoch=0, batch=0, batches=1, rows=0)  # of the present stack
        self._window = self._done = 0
        self._open: Progress | None = None  # a window whose exchange is to come
        self._with_tables = with_tables
        self._tables: TableBatches | None = None

    def start(self, learner: SharedLearner, epoch: int = 0, batch: int = 0) -> bool:
        """Takes the center as the weights to start from."""
        if self._with_tables:
            assert isinstance(self._client, ShardedClient)
            rows = self._client.open_rows(learner.tables.specs)
            learner.tables.serve_from(rows)
            self._tables = TableBatches(rows, learner)
        together = self._at_once or self._client.num_workers
        if self._rule.damps and together > 1:
            self._damping = Damping(together, self._trained_size)
        center = self._client.pull()
        self._local[...] = center
        self._base[...] = center
        learner.write_weights(self._local)
        self._keep_metrics(learner)
        return False

    def take(
        self, learner: SharedLearner, stack: BatchStack | None, window: int, progress: Progress
    ) -> None:
        self._open = None
        if stack is not None and window:
            self.train(learner, stack, window, progress)
            return
        if stack is not None:
            self._train(learner, stack, progress)
        self.after_window(learner, progress)

    def take_open(self, learner: SharedLearner, stack: BatchStack, progress: Progress) -> None:
        """The exchange comes with the rest of the window, or at the end."""
        self._train(learner, stack, progress)
        self._open = progress

    def _train(self, learner: SharedLearner, stack: BatchStack, progress: Progress) -> None:
        if self._tables is None:
            learner.train(stack)
        else:
            self._tables.train(learner, stack, progress.epoch, progress.batch)

    def end_run(self, learner: SharedLearner) -> None:
        """The exchange of a window that was not trained to its end."""
        if self._open is not None:
            self.after_window(learner, self._open)
        self.drain(learner)

    def after_window(self, learner: SharedLearner, progress: Progress) -> None:
        """One exchange: what was trained since the last one goes out, the center comes in."""
        if self._tables is not None:
            self._tables.end_window(progress.epoch, progress.batch)
        if not self.overlaps:
            began = time.perf_counter()
            with self._clock.within("exchange"):
                learner.read_weights(self._local)
                if not self._check.admits(self._local):
                    progress = self._begin_again(learner, progress)
                    np.copyto(self._local, self._base)
                self._rule.exchange(self._local, self._base, self._peer(progress))
                learner.write_weights(self._local)
                self._keep_metrics(learner)
            if self._measures:
                self._measure(began, time.perf_counter())
            return
        self.drain(learner)  # the exchange of the window before
        learner.read_weights(self._pushed)
        if not self._check.admits(self._pushed):
            progress = self._begin_again(learner, progress)
            np.copyto(self._pushed, self._base)
        self._keep_metrics(learner)
        peer = self._peer(progress)
        np.subtract(self._pushed, self._base, out=peer.buffer)
        self._flight = threading.Thread(
            target=self._fly, args=(peer,), name="sparkdl-ps-exchange", daemon=True
        )
        self._flight.start()

    @property
    def cuts_stacks(self) -> bool:
        """Whether exchanges may happen inside a learner's call.

        They cannot run beside the training there, nor give the optimizer a new state, nor serve
        rows of tables.
        """
        overlaps = self.overlaps or self._measures or self._with_tables
        return not (overlaps or self._rule.blocking or self._check.skips)

    def train(
        self, learner: SharedLearner, stack: BatchStack, window: int, progress: Progress
    ) -> None:
        """Trains a stack, with an exchange after each window, and after the last batch.

        This object is the :class:`~sparkdl.training.learning.Exchanger` that the learner calls.
        """
        self._progress, self._window, self._done = progress, window, 0
        with self._unwrapping.around():
            learner.train_exchanging(stack, window, self)

    @property
    def buffer(self) -> FloatArray:
        """The worker's weights."""
        return self._local

    def exchange(self) -> None:
        """The exchange of one window of the stack."""
        whole, first = self._progress, self._done
        self._done = min(first + self._window, whole.batches)
        progress = replace(
            whole,
            batch=whole.batch - whole.batches + self._done,
            batches=self._done - first,
            rows=whole.rows // whole.batches * (self._done - first),
        )
        with self._unwrapping.inside(), self._clock.within("exchange", any_thread=True):
            try:
                self._check.admits(self._local)
            except NotFiniteError:
                raise NotFiniteError(among=(first, self._done)) from None
            self._rule.exchange(self._local, self._base, self._peer(progress))

    @contextlib.contextmanager
    def weights_of_run(self, learner: SharedLearner, last: bool) -> Iterator[None]:
        """The center, of which a worker of a blocking rule has the last one anyway; where workers
        are independent, its own."""
        if self._rule.independent:
            yield
            return
        with self.center_loaded(learner, last and not self._rule.blocking):
            yield

    @contextlib.contextmanager
    def center_loaded(self, learner: SharedLearner, last: bool) -> Iterator[None]:
        """Within, ``learner`` has the center as it is now.

        A worker whose weights were the center of its last exchange goes on from there; one with
        weights of its own (elastic rules) gets these back.
        """
        self.drain(learner)
        learner.read_weights(self._local)
        own = None if np.array_equal(self._local, self._base) else self._local.copy()
        center = self._client.pull(last=last)
        if own is None:
            self._base[...] = center
        learner.write_weights(learner.constrained(center))
        yield
        if own is not None:
            learner.write_weights(own)

    @property
    def counted(self) -> float:
        return 1.0 if self._damping is None else self._damping.counted

    def _begin_again(self, learner: SharedLearner, progress: Progress) -> Progress:
        """Gives the learner the center, an optimizer without NaN, and the metrics of before."""
        self._base[...] = self._client.pull()
        learner.write_weights(self._base)
        learner.optimizer.load_state(finite_state(learner.optimizer.state()))
        learner.metrics.restore()
        return replace(progress, rows=0)

    def _keep_metrics(self, learner: SharedLearner) -> None:
        if self._check.skips:
            learner.metrics.keep()

    def take_changes(self, learner: SharedLearner, changes: Sequence[VariableChanges]) -> None:
        """Gives ``learner`` the changes, which the center has too: no part of the next commit."""
        for change in changes:
            learner.take_changes(change)
            change.write_into(self._base)

    def _measure(self, began: float, ended: float) -> None:
        """Notes the last window's times; older ones count less and less."""
        if self._windows >= _UNTIMED:
            self._train_s = 0.7 * self._train_s + began - self._ended
            self._exchange_s = 0.7 * self._exchange_s + ended - began
        self._windows, self._ended = self._windows + 1, ended
        share = self._exchange_s / max(self._exchange_s + self._train_s, 1e-9)
        if self._windows >= _UNTIMED + 4 and share > OVERLAP_FROM:
            self.overlaps, self._measures = True, False
            self._pushed = np.zeros_like(self._local)

    def _peer(self, progress: Progress) -> _Peer:
        return _Peer(self._client, progress, self._damping, self._base)

    def _fly(self, peer: _Peer) -> None:
        try:
            peer.push_pull()
        except BaseException as error:  # raised again in the training thread
            self._error = error

    def drain(self, learner: SharedLearner) -> None:
        """Ends an exchange that is under way; to be called at an epoch's end, and at the end."""
        if self._flight is None:
            return
        with self._clock.within("exchange"):
            self._flight.join()
        self._flight = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        learner.read_weights(self._local)
        self._local -= self._pushed
        self._base[...] = self._client.buffer
        self._local += self._base
        learner.write_weights(self._local)


class ServerGradientSynchronizer(Way):
    """Each step: gradients out, and the weights in that the server's optimizer makes of them.

    For rules that take gradients and do not wait. The rules that wait train in rounds
    (:class:`sparkdl.ps.round_synchronizer.RoundSynchronizer`).
    """

    def __init__(self, client: Client, layout: Layout, check: FiniteCheck | None = None) -> None:
        self._client = client
        self._check = check or FiniteCheck("ignore", layout.trained_size)

    def start(self, learner: SharedLearner, epoch: int = 0, batch: int = 0) -> bool:
        self._take(learner, self._client.pull())
        return False

    def take(
        self, learner: SharedLearner, stack: BatchStack | None, window: int, progress: Progress
    ) -> None:
        """See :class:`Way`; the stack has one batch."""
        if stack is not None:
            self.step(learner, stack, progress)

    @contextlib.contextmanager
    def weights_of_run(self, learner: SharedLearner, last: bool) -> Iterator[None]:
        """The center, from which the worker trains on, too."""
        self._take(learner, self._client.pull(last=last))
        yield

    @staticmethod
    def _take(learner: SharedLearner, center: FloatArray) -> None:
        """The server's optimizer knows nothing of the constraints of variables."""
        learner.write_weights(learner.constrained(center))

    def step(self, learner: SharedLearner, batch: BatchStack, progress: Progress) -> None:
        """Sends the gradient of one batch, and trains on from the center."""
        if self._check.skips:
            learner.metrics.keep()
        learner.gradients(batch, self._client.buffer)
        if self._check.admits(self._client.buffer, learner.optimizer.scales_loss):
            self._take(learner, self._client.push_pull(progress))
        else:
            learner.metrics.restore()
            self._take(learner, self._client.pull())
