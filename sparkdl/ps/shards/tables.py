"""``TableService``: the rows of a model's tables that one shard holds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.coordinator.worker import Worker
from sparkdl.errors import ProtocolError
from sparkdl.ps.kinds import StoreKind
from sparkdl.tables.checkpoints import TableReference
from sparkdl.tables.entry import Counts
from sparkdl.tables.files import write_part
from sparkdl.tables.hashing import Hashes, Ids
from sparkdl.tables.index import Slots
from sparkdl.tables.service import IdArray, TableSpec
from sparkdl.tables.store import RowStore, TableRows
from sparkdl.transport.frames import ByteArray, Flag, Kind, Message
from sparkdl.transport.service import Metric
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class PushPart:
    """The gradients for the rows of one table in a push.

    Args:
        table: Its name.
        ids: Each once.
        gradients: Of shape ``(len(ids), dim)``.
        counts: How often the batch has each id; None where the table does not ask.
    """

    table: str
    ids: IdArray
    gradients: FloatArray
    counts: IdArray | None = None


def pack_push(parts: Sequence[PushPart]) -> tuple[list[list[Any]], ByteArray]:
    """Describes the parts of a push for its meta, and joins them to its body."""
    told: list[list[Any]] = []
    arrays: list[ByteArray] = []
    for part in parts:
        told.append([part.table, len(part.ids), part.counts is not None])
        arrays.append(np.ascontiguousarray(part.ids).view(np.uint8))
        if part.counts is not None:
            arrays.append(np.ascontiguousarray(part.counts).view(np.uint8))
        arrays.append(np.ascontiguousarray(part.gradients).reshape(-1).view(np.uint8))
    return told, np.concatenate(arrays) if arrays else np.empty(0, np.uint8)


def unpack_push(told: object, body: ByteArray, dims: Mapping[str, int]) -> list[PushPart]:
    """The counterpart of :func:`pack_push`.

    Args:
        told: From the meta.
        body: The body.
        dims: Numbers of a row, of each table.

    Raises:
        ProtocolError: The body does not fit what the meta says.
    """
    parts: list[PushPart] = []
    at = 0

    def take(dtype: Any, count: int) -> npt.NDArray[Any]:
        nonlocal at
        size = count * np.dtype(dtype).itemsize
        if count < 0 or at + size > body.size:
            raise ValueError(f"{body.size} bytes")
        at += size
        return np.frombuffer(body, dtype, count, at - size)

    try:
        for name, count, counted in told:  # type: ignore[attr-defined]
            dim = dims[name]
            ids = take(np.int64, count)
            counts = take(np.int64, count) if counted else None
            parts.append(
                PushPart(name, ids, take(np.float32, count * dim).reshape(-1, dim), counts)
            )
        if at != body.size:
            raise ValueError(f"{body.size - at} bytes are left")
    except (TypeError, ValueError, KeyError) as error:
        raise ProtocolError(
            "a push of gradients for rows is malformed",
            expected=f"tables of {sorted(dims)}, and a body of their ids and gradients",
            received=f"{type(error).__name__}: {str(error)[:200]}",
        ) from error
    return parts


class _Guarded:
    """A store that is written to files while others push: a block at a time is copied.

    Args:
        store: The rows.
        lock: Of the table; held where the rows are read.
        clock: That is written: all shards write the same.
    """

    def __init__(
        self, store: RowStore, lock: contextlib.AbstractContextManager[object], clock: int
    ) -> None:
        self._store, self._lock, self.clock = store, lock, clock
        self.settings, self.dim = store.settings, store.dim
        self.rule, self.tracks = store.rule, store.tracks

    def waiting_ids(self) -> tuple[Ids, Counts]:
        """See :class:`RowStore`, like the others."""
        with self._lock:
            return self._store.waiting_ids()

    def slots(self, since: int | None = None) -> tuple[Slots, Hashes]:
        with self._lock:
            return self._store.slots(since)

    def rows_at(self, slots: Slots) -> TableRows:
        with self._lock:
            return self._store.rows_at(slots)


class TableService:
    """Answers pulls of rows, applies pushes, writes its rows to files.

    A push is a step of its rows. It counts once for each rank, attempt and sequence number.

    Args:
        specs: The tables.
        number: Of the shard.
        count: Shards.
        folder: In which rows may be written.
        reference: Where the rows to begin with are; empty: there are none.
        ignores_nan: Gradients that are not finite are taken; else they are an error.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        number: int = 0,
        count: int = 1,
        folder: str = "",
        reference: bytes = b"",
        *,
        ignores_nan: bool = False,
    ) -> None:
        self._number, self._count, self._folder = number, count, folder
        self._rates = {spec.name: spec.learning_rate for spec in specs}
        self.stores = {spec.name: spec.store(count) for spec in specs}
        """Table name -> the rows that this shard holds."""
        self._locks = {name: threading.Lock() for name in self.stores}
        self._dims = {name: store.dim for name, store in self.stores.items()}
        self._workers: dict[int, Worker] = {}
        self._reached: dict[int, tuple[int, int]] = {}  # by the former attempts of a rank
        self._lock = threading.Lock()
        self.pulled = self.pushed = 0
        for name, store in self.stores.items():
            store.on_nan = "ignore" if ignores_nan else "raise"
            if reference:
                TableReference.from_bytes(reference).load(name, store, number, count)

    def answer(self, message: Message) -> Message:
        """The reply to a request about rows.

        Raises:
            ProtocolError: It is malformed.
            ModelError: A gradient is not finite.
            ResourceError: The rows cannot be written.
        """
        if message.kind is StoreKind.ROWS_PULL:
            return self._pull(message)
        if message.kind is StoreKind.ROWS_PUSH:
            return self._push(message)
        if message.kind is StoreKind.ROWS_CLOCKS:
            return self._clocks()
        return self._save(message)

    def metrics(self) -> list[Metric]:
        """Numbers for ``/metrics``."""
        stores = self.stores.values()
        return [
            Metric("table_rows", "gauge", "Rows of tables", sum(len(s) for s in stores)),
            Metric("table_bytes", "gauge", "Bytes of tables", sum(s.nbytes for s in stores)),
            Metric("rows_pulled", "counter", "Rows of tables sent", self.pulled),
            Metric("rows_pushed", "counter", "Rows of tables stepped", self.pushed),
        ]

    def _pull(self, message: Message) -> Message:
        name = self._table(message.meta.get("table"))
        body = np.empty(0, np.uint8) if message.body is None else message.body
        if body.size % 8:
            raise ProtocolError(
                "a pull of rows is malformed",
                expected="ids of 8 bytes",
                received=f"{body.size} bytes",
            )
        ids = body.view(np.int64)
        with self._locks[name]:
            rows = self.stores[name].pull(ids, create=bool(message.meta.get("training")))
        self.pulled += len(ids)
        return Message(Kind.CHUNK, total=rows.nbytes, body=rows.reshape(-1).view(np.uint8))

    def _push(self, message: Message) -> Message:
        body = np.empty(0, np.uint8) if message.body is None else message.body
        parts = unpack_push(message.meta.get("parts"), body, self._dims)
        reply = Message(Kind.OK, sequence=message.sequence)
        with self._lock:
            worker = self._identify(message)
            position = message.epoch, message.batch
            if message.sequence <= worker.applied or position <= self._reached[message.rank]:
                # its reply was lost, or a former attempt has brought it
                worker.applied = max(worker.applied, message.sequence)
                reply.flags |= Flag.DUPLICATE
                return reply
            worker.applied = message.sequence
            worker.epoch, worker.batch = max((worker.epoch, worker.batch), position)
        for part in parts:
            own = self._rates[part.table]
            rate = message.learning_rate if own is None else own
            with self._locks[part.table]:
                self.stores[part.table].push(part.ids, part.gradients, rate, part.counts)
            self.pushed += len(part.ids)
        return reply

    def _identify(self, message: Message) -> Worker:
        """The rank that sent a push, over all its attempts."""
        rank = message.rank
        worker = self._workers.setdefault(rank, Worker(rank, epoch=-1))
        worker.refuse_superseded(message)
        if worker.attempt != message.attempt:  # batches that it trains again count no second time
            self._reached[rank] = worker.epoch, worker.batch
            worker.bind(0, message, 0.0)
        return worker

    def _clocks(self) -> Message:
        return Message(Kind.OK, meta={"clocks": {n: s.clock for n, s in self.stores.items()}})

    def _save(self, message: Message) -> Message:
        """Writes the rows; meanwhile others push, unless rows may leave their places."""
        meta = message.meta
        reference = TableReference.from_bytes(str(meta.get("reference")).encode())
        if reference.folder.rpartition("/")[0] != self._folder:
            raise ProtocolError(
                "rows are to be written elsewhere than in the run's folder",
                expected=f"a folder in {self._folder!r}",
                received=reference.folder[:200],
            )
        clocks = meta.get("clocks")
        for name, store in self.stores.items():
            lock, leaves = self._locks[name], store.eviction.on
            clock = clocks.get(name) if isinstance(clocks, dict) else None
            if not isinstance(clock, int):
                raise ProtocolError(
                    "a request to write rows is malformed",
                    expected=f"the clock of table {name!r}",
                    received=repr(clocks)[:200],
                )
            with lock if leaves else contextlib.nullcontext():
                inner = contextlib.nullcontext() if leaves else lock
                guarded = _Guarded(store, inner, clock)
                write_part(guarded, reference.folder_of(name), self._number, self._count)
        return Message(Kind.OK)

    def _table(self, name: object) -> str:
        if not isinstance(name, str) or name not in self.stores:
            raise ProtocolError(
                "a request for rows of an unknown table",
                expected=", ".join(sorted(self.stores)) or "none: the model has no tables",
                received=repr(name)[:100],
            )
        return name
