"""A worker's access to tables whose rows lie on shards, in the ways that rules exchange rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, SparkDLError
from sparkdl.process.closing import Closing
from sparkdl.process.user_warnings import warn_user
from sparkdl.ps.client import Progress
from sparkdl.ps.shards.pushes import NO_CLOCK, PushReply, RowPush
from sparkdl.ps.shards.row_link import Fetched, RowLink
from sparkdl.tables.classes import ClassSpec, Softmax
from sparkdl.tables.index import Slots
from sparkdl.tables.service import CallsOfStep, IdArray, TableSpec
from sparkdl.tables.store import RowStore, merged
from sparkdl.weights import FloatArray

Wanted = Callable[[], Sequence[tuple[str, IdArray]]]
"""The tables and ids that a batch will ask for, each id once and in order."""


@dataclass
class _Coming:
    """The rows of one call of a layer in the next batch."""

    table: str
    ids: IdArray
    rows: Future[Fetched]
    newer: list[tuple[npt.NDArray[np.intp], FloatArray]] = field(default_factory=list)

    def taken(self) -> Fetched:
        """The rows, with what this worker itself has changed since they were asked for."""
        found = self.rows.result()
        for places, values in self.newer:
            found.rows[places] = values
        return found


def _in_sorted(ids: IdArray, ordered: IdArray) -> npt.NDArray[np.bool_]:
    if not len(ordered):
        return np.zeros(len(ids), bool)
    found: npt.NDArray[np.bool_] = ordered.take(np.searchsorted(ordered, ids), mode="clip") == ids
    return found


@dataclass
class Pull:
    """One call of a layer in a step.

    Args:
        ids: Each once.
        clocks: Clocks of the table on each shard, when the rows left it.
        gradients: Gradients of the rows; None while there are none.
        counts: How often the batch has each id.
    """

    table: str
    ids: IdArray
    clocks: list[int]
    gradients: FloatArray | None = None
    counts: IdArray | None = None


class RowsOfWorker(Closing):
    """The rows of a model's tables; a :class:`sparkdl.tables.service.RowService`."""

    def __init__(self, link: RowLink) -> None:
        self._link = link
        self._pulls: CallsOfStep[Pull] = CallsOfStep()

    def pull(self, table: str, ids: IdArray, *, training: bool) -> tuple[FloatArray, int]:
        if training and self._pulls.have_gradients:
            self._pulls.forget()
        ids = np.ascontiguousarray(ids, np.int64)
        found = self._fetch(table, ids, training=training)
        if training:
            self._pulls.append(Pull(table, ids, found.clocks))
        return found.rows, self._pulls.last

    def push(self, pulled: int, gradients: FloatArray, counts: IdArray) -> None:
        """:meth:`end_step` takes them."""
        pull = self._pulls.of(pulled)
        pull.gradients, pull.counts = gradients, counts

    def measure(
        self, table: str, classes: ClassSpec, features: FloatArray, labels: IdArray, *,
        training: bool,
    ) -> tuple[Softmax, int]:  # fmt: skip
        """Refused: the softmax of a ShardedClassifier is spread over the ranks alone."""
        raise _no_classes(table)

    def learn(self, measured: int, upstream: FloatArray, *, trying: bool) -> FloatArray:
        """Refused, as :meth:`measure`."""
        raise _no_classes("")

    def begin_batch(self, wanted: Wanted | None) -> None:
        """A batch begins.

        Args:
            wanted: Finds what the batch after it will ask for; None: it is not known.
        """

    @abstractmethod
    def end_step(
        self, epoch: int, batch: int, learning_rate: float, loss_scale: float = 1.0
    ) -> None:
        """One step of all tables with the gradients of a batch.

        Args:
            loss_scale: The factor that the loss had, by which gradients are divided; infinity where
                it has overflowed, and no step is taken.
        """

    def end_window(self, epoch: int, batch: int) -> None:
        """The model's own weights are exchanged now."""

    def close(self) -> None:
        self._link.close()

    def _fetch(self, table: str, ids: IdArray, *, training: bool) -> Fetched:
        return self._link.fetch(table, ids, training=training)

    def _take_step(self, loss_scale: float) -> list[RowPush]:
        """The step of each table, its ids in order, with the clocks when the first of the rows left
        the shards; nothing where the loss has overflowed.
        """
        pulls = [p for p in self._pulls if p.gradients is not None and np.isfinite(loss_scale)]
        steps = []
        for table in sorted({pull.table for pull in pulls}):
            of = [pull for pull in pulls if pull.table == table]
            ids = np.concatenate([pull.ids for pull in of])
            gradients = np.concatenate([np.asarray(p.gradients, np.float32) for p in of])
            counts = np.concatenate([np.asarray(pull.counts, np.int64) for pull in of])
            if len(of) > 1:
                ids, gradients, counts = merged(ids, gradients, counts)
            if loss_scale != 1.0:
                gradients = gradients / np.float32(loss_scale)
            known = zip(*(pull.clocks for pull in of), strict=True)
            clocks = [min((c for c in each if c != NO_CLOCK), default=NO_CLOCK) for each in known]
            steps.append(RowPush(table, ids, gradients, counts, None, clocks))
        self._pulls.forget()
        return steps


class ServedRows(RowsOfWorker):
    """Rows that are exchanged at each batch, those of the next one pulled while a batch trains.

    A step's gradients are sent at its end, to all shards at the same time: each applies them as one
    step of the rows, and the next pull sees them. What this worker pushes meanwhile is not missed:
    of the rows that it pushes, and that the next batch has too, the new values come back with the
    reply to the push. So one worker alone trains as if nothing were pulled ahead.

    Args:
        link, ahead: Used by this object alone, and closed with it; the second for the next batch.
    """

    def __init__(self, link: RowLink, ahead: RowLink) -> None:
        super().__init__(link)
        self._ahead = ahead
        self._own: dict[str, list[list[int]]] = {}  # the clocks after this worker's last pushes
        self._finding = ThreadPoolExecutor(1, thread_name_prefix="sparkdl-ids-ahead")
        self._pulling = ThreadPoolExecutor(1, thread_name_prefix="sparkdl-rows-ahead")
        self._now: list[_Coming] = []
        self._next: Future[list[_Coming]] | None = None
        self._off = False

    def begin_batch(self, wanted: Wanted | None) -> None:
        """A batch begins, for which rows were pulled ahead."""
        self._now = [] if self._next is None else self._next.result()
        self._next = None
        if wanted is not None and not self._off:
            self._next = self._finding.submit(self._ask, wanted)

    def end_step(
        self, epoch: int, batch: int, learning_rate: float, loss_scale: float = 1.0
    ) -> None:
        pushes = [
            replace(
                step, wanted=self._shared(step.table, step.ids), clocks=self._clocks_with_own(step)
            )
            for step in self._take_step(loss_scale)
        ]
        answers = self._link.push(pushes, epoch, batch, learning_rate) if pushes else []
        for push, done in zip(pushes, answers, strict=True):
            self._own[push.table] = [*self._own.get(push.table, [])[-1:], done.clocks]
            self._renew(push.table, push.ids[done.rows], done.values)

    def close(self) -> None:
        """Ends the threads, and closes the connections."""
        self._ahead.give_up()
        for threads in (self._finding, self._pulling):
            threads.shutdown(wait=True, cancel_futures=True)
        self._ahead.close()
        super().close()

    def _fetch(self, table: str, ids: IdArray, *, training: bool) -> Fetched:
        for number, coming in enumerate(self._now if training else ()):
            if coming.table == table and np.array_equal(coming.ids, ids):
                del self._now[number]
                return coming.taken()
        return super()._fetch(table, ids, training=training)

    def _ask(self, wanted: Wanted) -> list[_Coming]:
        try:
            asked = list(wanted())
        except (CancelledError, SparkDLError):  # training ends; or the batch itself will raise it
            return []
        except Exception as error:
            self._off = True
            warn_user(
                "rows of tables are not pulled ahead: the part of the model that finds the ids of "
                f"a batch cannot be computed by itself ({type(error).__name__}: {error})"
            )
            return []
        fetch, pool = self._ahead.fetch, self._pulling
        return [
            _Coming(name, ids, pool.submit(fetch, name, ids, training=True)) for name, ids in asked
        ]

    def _shared(self, table: str, ids: IdArray) -> npt.NDArray[np.bool_] | None:
        """Which of some ids the next batch asks for, too; None: none."""
        coming = [] if self._next is None else self._next.result()
        asked = [each.ids for each in coming if each.table == table]
        if not asked:
            return None
        return _in_sorted(ids, asked[0] if len(asked) == 1 else np.unique(np.concatenate(asked)))

    def _renew(self, table: str, ids: IdArray, values: FloatArray) -> None:
        """Takes new values of some rows, each once, in place of those that were pulled ahead."""
        if self._next is None or not len(ids):
            return
        for coming in self._next.result():
            if coming.table == table:
                there = _in_sorted(ids, coming.ids)
                coming.newer.append((np.searchsorted(coming.ids, ids[there]), values[there]))

    def _clocks_with_own(self, step: RowPush) -> list[int]:
        """The clocks that the shards would have if nobody else had pushed since the pull."""
        mine = self._own.get(step.table, [])
        return [
            clock if clock == NO_CLOCK else clock + sum(after[shard] > clock for after in mine)
            for shard, clock in enumerate(step.clocks)
        ]


class RoundRows(RowsOfWorker):
    """Rows whose step is the row-weighted mean of all workers' gradients.

    A worker's part of a round is put aside on the shards before the coordinator hears of its
    commit; the members that the coordinator names then make one step of each row. Pulls bring that
    decision along (:mod:`sparkdl.ps.kinds`), so that a worker sees the rounds it has been told
    of.
    """

    def end_step(
        self, epoch: int, batch: int, learning_rate: float, loss_scale: float = 1.0
    ) -> None:
        """Nothing to do: :meth:`put_aside` has sent what the step brings."""

    def put_aside(self, progress: Progress, sequence: int) -> None:
        """Sends this worker's part of the present round, also where it has no rows."""
        steps = self._take_step(1.0) if progress.rows else []
        self._pulls.forget()
        self._link.put_aside(steps, progress, sequence)


def _no_classes(table: str) -> ConfigError:
    return ConfigError(
        f"the classes of table {table!r} cannot lie on servers",
        expected="mode='allreduce' for a model with a ShardedClassifier",
        received="a mode with a server",
    )


class WindowRows(RowsOfWorker):
    """Geo-SGD for rows: a worker steps its own copies, and sends a share of their changes.

    At the end of a window, for each row that it has trained (``old`` is what the shards had)::

        d = (local - old) / p;   push d;   old += d
        pull center;             local += center - old;   old = center

    and on the shard ``row += d``. Of the rows come back those that others have changed. A row that
    no batch of a window has touched is asked for again at its next use, so that no copy is older
    than a window. The state of the rows' optimizer stays with the worker.

    Reference: PaddlePaddle's Geo mode (``GeoCommunicator``, ``MemorySparseGeoTable``), Baidu, 2020;
    the equations are written from its description.
    """

    def __init__(self, link: RowLink, tables: Sequence[TableSpec], num_workers: int) -> None:
        super().__init__(link)
        self._share = np.float32(1.0 / num_workers)
        self._copies = {
            spec.name: _Copies(spec.store(), spec.learning_rate, link.num_shards) for spec in tables
        }

    def _fetch(self, table: str, ids: IdArray, *, training: bool) -> Fetched:
        """Evaluation has the rows of the shards."""
        if not training:
            return super()._fetch(table, ids, training=False)
        copies = self._copies[table]
        missing = ids[~copies.has(ids)]
        if len(missing):
            found = self._link.fetch(table, missing, training=True)
            copies.put(missing, found.rows, found.clocks)
        return Fetched(copies.rows(ids), [NO_CLOCK] * self._link.num_shards)

    def end_step(
        self, epoch: int, batch: int, learning_rate: float, loss_scale: float = 1.0
    ) -> None:
        """The copies take the step."""
        for step in self._take_step(loss_scale):
            self._copies[step.table].step(step, learning_rate)

    def end_window(self, epoch: int, batch: int) -> None:
        """Sends the changes of the window, and takes those of the other workers."""
        trained = {name: c for name, c in self._copies.items() if len(c.trained)}
        if not trained:
            return
        pushes = [copies.changes(name, self._share) for name, copies in trained.items()]
        done = self._link.push(pushes, epoch, batch, 0.0, changes=True)
        for (_, copies), push, back in zip(trained.items(), pushes, done, strict=True):
            if back.again:  # a former attempt has brought this window
                copies.forget()
                continue
            copies.end_window(push, back)


class _Copies:
    """A worker's copies of rows of one table."""

    def __init__(self, store: RowStore, rate: float | None, num_shards: int) -> None:
        self._store, self._rate = store, rate
        self._old = np.zeros((0, store.dim), np.float32)
        self._seen = np.zeros(0, np.int64)  # how often, in this window
        self._fresh = np.zeros(0, bool)  # by place, as the next two
        self._touched = np.zeros(0, bool)
        self.clocks = [NO_CLOCK] * num_shards
        """Up to which the copies are known to be those of the shards."""

    @property
    def trained(self) -> Slots:
        return np.flatnonzero(self._touched)

    def has(self, ids: IdArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which rows are here, and not older than a window."""
        slots = self._store.slots_of(ids)
        found = slots >= 0
        found[found] = self._fresh[slots[found]]
        return found

    def put(self, ids: IdArray, rows: FloatArray, clocks: Sequence[int]) -> None:
        """Takes rows from the shards; the optimizer's state of those that were here stays."""
        slots = self._store.make_rows(ids)
        self._make_room(int(slots.max()) + 1)
        self._store.set_values(slots, rows)
        self._old[slots] = rows
        self._fresh[slots] = True
        pairs = zip(self.clocks, clocks, strict=True)
        self.clocks = [new if known == NO_CLOCK else known for known, new in pairs]

    def rows(self, ids: IdArray) -> FloatArray:
        return self._store.values_at(self._store.slots_of(ids))

    def step(self, step: RowPush, learning_rate: float) -> None:
        assert step.counts is not None
        slots = self._store.slots_of(step.ids)
        self._store.step_at(slots, step.values, learning_rate if self._rate is None else self._rate)
        self._touched[slots] = True
        self._seen[slots] += step.counts

    def changes(self, table: str, share: np.float32) -> RowPush:
        """The rows that were trained, this worker's share of their changes, how often each was."""
        slots = self.trained
        changes = (self._store.values_at(slots) - self._old[slots]) * share
        ids = self._store.ids_at(slots)
        return RowPush(table, ids, changes, self._seen[slots], None, self.clocks)

    def end_window(self, sent: RowPush, back: PushReply) -> None:
        """Takes the rows that others have changed; the next window begins.

        Args:
            sent: The changes that were sent.
            back: The answer, with the values on the shards after them.
        """
        slots = self._store.slots_of(sent.ids)
        self._old[slots] += sent.values
        changed = slots[back.rows]
        moved = self._store.values_at(changed) + (back.values - self._old[changed])
        self._store.set_values(changed, moved)
        self._old[changed] = back.values
        self._fresh[:] = self._touched
        self._begin_window()
        self.clocks = list(back.clocks)

    def forget(self) -> None:
        """All rows are asked for again; the next window begins."""
        self._fresh[:] = False
        self._begin_window()
        self.clocks = [NO_CLOCK] * len(self.clocks)

    def _begin_window(self) -> None:
        self._touched[:] = False
        self._seen[:] = 0

    def _make_room(self, rows: int) -> None:
        if rows > len(self._fresh):
            rows = max(1024, rows, len(self._fresh) * 3 // 2)
            self._old.resize((rows, self._old.shape[1]), refcheck=False)
            for array in (self._seen, self._fresh, self._touched):
                array.resize(rows, refcheck=False)
