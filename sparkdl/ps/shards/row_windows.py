"""``WindowRows``: rows that a worker trains by itself for a window, and exchanges by changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparkdl.ps.shards.pushes import NO_CLOCK, PushReply, RowPush
from sparkdl.ps.shards.row_link import RowLink
from sparkdl.ps.shards.rows import RowsOfWorker
from sparkdl.tables.index import Slots
from sparkdl.tables.service import IdArray, TableSpec
from sparkdl.tables.store import RowStore
from sparkdl.weights import FloatArray


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

    def pull(self, table: str, ids: IdArray, *, training: bool) -> tuple[FloatArray, int]:
        """See :class:`sparkdl.tables.service.RowService`; evaluation has the rows of the shards."""
        self._begin_pull(training=training)
        ids = np.ascontiguousarray(ids, np.int64)
        if not training:
            return self._link.fetch(table, ids, training=False).rows, self._first
        copies = self._copies[table]
        missing = ids[~copies.has(ids)]
        if len(missing):
            found = self._link.fetch(table, missing, training=True)
            copies.put(missing, found.rows, found.clocks)
        nowhere = [NO_CLOCK] * self._link.num_shards
        return copies.rows(ids), self._noted(table, ids, nowhere, training=True)

    def end_step(
        self, epoch: int, batch: int, learning_rate: float, loss_scale: float = 1.0
    ) -> None:
        """See :class:`RowsOfWorker`; the copies take the step."""
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
        self.clocks = [
            new if known == NO_CLOCK else known
            for known, new in zip(self.clocks, clocks, strict=True)
        ]

    def rows(self, ids: IdArray) -> FloatArray:
        return self._store.values_at(self._store.slots_of(ids))

    def step(self, step: RowPush, learning_rate: float) -> None:
        assert step.counts is not None
        slots = self._store.slots_of(step.ids)
        rate = learning_rate if self._rate is None else self._rate
        self._store.step_at(slots, step.values, rate)
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
