"""``TableService``: the rows of a model's tables that one shard holds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sparkdl.coordinator.group import Worker
from sparkdl.errors import ProtocolError, RowsAheadError
from sparkdl.ps.kinds import DECISION, Decision, Member, StoreKind
from sparkdl.ps.shards.pushes import NO_CLOCK, Mask, PushReply, RowPush, pack_reply, unpack_push
from sparkdl.tables.checkpoints import TableReference
from sparkdl.tables.files import write_part
from sparkdl.tables.hashing import Ids
from sparkdl.tables.service import TableSpec
from sparkdl.tables.store import merged
from sparkdl.transport.frames import Flag, Kind, Message
from sparkdl.transport.service import Metric

_STALE = "Steps of other workers between a pull of rows and their push"
_MOST_PIECES = 1 << 14
"""Most frames in which a worker's part of a round may come."""


class _Changed:
    """The clock of the last change of each row, by its place in the store."""

    def __init__(self) -> None:
        self._clocks = np.zeros(0, np.uint32)

    def since(self, slots: npt.NDArray[np.int64], clock: int) -> Mask:
        """Which rows have changed after a step of the clock; all where it is not known."""
        there = slots >= 0
        if clock == NO_CLOCK:
            return there
        known = there & (slots < len(self._clocks))
        found = np.zeros(len(slots), bool)
        found[known] = self._clocks[slots[known]] > clock
        return found

    def note(self, slots: npt.NDArray[np.int64], clock: int) -> None:
        slots = slots[slots >= 0]
        if len(slots) and slots.max() >= len(self._clocks):
            more = max(1024, int(slots.max()) + 1, len(self._clocks) * 3 // 2)
            self._clocks.resize(more, refcheck=False)
        self._clocks[slots] = clock


@dataclass(frozen=True)
class _Brought:
    """The last push of a rank: it may be of several frames, of which some came."""

    position: tuple[int, int] = (-1, 0)
    ids: dict[str, list[Ids]] = field(default_factory=dict)

    def lacks(self, part: RowPush, position: tuple[int, int]) -> Mask:
        """Which rows of a part of a push have not taken the step."""
        known = self.ids.get(part.table)
        if position < self.position:
            return np.zeros(len(part.ids), bool)
        if position > self.position or not known:
            return np.ones(len(part.ids), bool)
        return ~np.isin(part.ids, np.concatenate(known))


@dataclass
class _StagedRows:
    """A worker's part of a round.

    Args:
        position: After the round.
        count: Pieces in which it comes.
    """

    position: tuple[int, int]
    rows: int
    learning_rate: float
    count: int
    pieces: dict[int, list[RowPush]] = field(default_factory=dict)

    def parts_of(self, table: str) -> list[RowPush]:
        pieces = [self.pieces[number] for number in sorted(self.pieces)]
        return [p for piece in pieces for p in piece if p.table == table and len(p.ids)]


class TableService:
    """Answers pulls of rows, applies pushes, writes its rows to files.

    A push is a step of its rows, or adds changes to them. It counts once for each rank, attempt and
    sequence number.

    Args:
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
        self.stores = {spec.name: spec.store(count, ignores_nan=ignores_nan) for spec in specs}
        """Table name -> the rows that this shard holds."""
        self._locks = {name: threading.Lock() for name in self.stores}
        self._dims = {name: store.dim for name, store in self.stores.items()}
        self._workers: dict[int, Worker] = {}
        self._brought: dict[int, _Brought] = {}  # by each rank
        self._former: dict[int, _Brought] = {}  # by the attempts of a rank before the present one
        self._lock = threading.Lock()
        self._staged: dict[Member, _StagedRows] = {}
        self._round, self._position = 0, (0, 0)
        self._changed = {name: _Changed() for name in self.stores}
        self.pulled = self.pushed = 0
        self._known_pushes = self._stale_steps = self._most_stale = 0
        for name, store in self.stores.items():
            if reference:
                TableReference.from_bytes(reference).load(name, store, number, count)

    def answer(self, message: Message) -> Message:
        """The reply to a request about rows.

        Raises:
            ProtocolError: It is malformed.
            ModelError: A gradient is not finite.
            ResourceError: The rows cannot be written.
        """
        if DECISION in message.meta:
            self._follow(Decision.in_meta(message.meta), message.rank)
        if message.kind is StoreKind.ROWS_STAGE:
            return self._stage(message)
        if message.kind is StoreKind.ROWS_PULL:
            return self._pull(message)
        if message.kind is StoreKind.ROWS_PUSH:
            return self._push(message)
        if message.kind is StoreKind.ROWS_CLOCKS:
            clocks = {name: store.clock for name, store in self.stores.items()}
            return Message(Kind.OK, meta={"clocks": clocks})
        return self._save(message)

    def metrics(self) -> list[Metric]:
        stores, mean = self.stores.values(), self._stale_steps / max(1, self._known_pushes)
        return [
            Metric("table_rows", "gauge", "Rows of tables", sum(len(s) for s in stores)),
            Metric("table_bytes", "gauge", "Bytes of tables", sum(s.nbytes for s in stores)),
            Metric("rows_pulled", "counter", "Rows of tables sent", self.pulled),
            Metric("rows_pushed", "counter", "Rows of tables stepped", self.pushed),
            Metric("rows_staleness", "gauge", f"{_STALE}, a mean", mean),
            Metric("rows_staleness_most", "gauge", f"{_STALE}, at most", self._most_stale),
        ]

    def _pull(self, message: Message) -> Message:
        name = self._table(message.meta.get("table"))
        body = message.content
        if body.size % 8:
            raise ProtocolError(
                "a pull of rows is malformed", expected="ids of 8 bytes",
                received=f"{body.size} bytes",
            )  # fmt: skip
        ids = body.view(np.int64)
        with self._locks[name]:
            rows = self.stores[name].pull(ids, create=bool(message.meta.get("training")))
            clock = self.stores[name].clock
        self.pulled += len(ids)
        body = rows.reshape(-1).view(np.uint8)
        return Message(Kind.CHUNK, total=rows.nbytes, meta={"clock": clock}, body=body)

    def _push(self, message: Message) -> Message:
        parts = unpack_push(message.meta.get("parts"), message.content, self._dims)
        adds, position = message.meta.get("changes") is True, (message.epoch, message.batch)
        with self._lock:
            worker, former = self._identify(message), self._former.get(message.rank, _Brought())
            again = message.sequence <= worker.applied  # its reply was lost
            if again:
                fresh = [np.zeros(len(part.ids), bool) for part in parts]
            else:  # without what a former attempt has brought
                worker.applied, again = message.sequence, position <= former.position
                fresh = [former.lacks(part, position) for part in parts]
                self._note_brought(message.rank, position, parts, fresh)
        replies = []
        for part, new in zip(parts, fresh, strict=True):
            own = self._rates[part.table]
            rate = message.learning_rate if own is None else own
            with self._locks[part.table]:
                came_back = part.wanted
                if adds:  # what others have changed, and the sender does not know
                    slots = self.stores[part.table].slots_of(part.ids)
                    came_back = self._changed[part.table].since(slots, part.clock)
                if new.any() or not (again or len(new)):
                    self._step(part if new.all() else part.piece(new), rate, adds=adds)
                replies.append(self._reply(part, came_back))
        told, back = pack_reply(replies)
        flags = Flag.DUPLICATE if again else Flag.NONE
        return Message(
            Kind.CHUNK, sequence=message.sequence, flags=flags, total=back.size,
            meta={"parts": told}, body=back,
        )  # fmt: skip

    def _note_brought(
        self, rank: int, position: tuple[int, int], parts: Sequence[RowPush], fresh: Sequence[Mask]
    ) -> None:
        """Notes whose rows take the step of a push, which is locked."""
        brought = self._brought.get(rank, _Brought())
        if position > brought.position:
            brought = self._brought[rank] = _Brought(position)
        if position == brought.position:
            for part, new in zip(parts, fresh, strict=True):
                brought.ids.setdefault(part.table, []).append(part.ids[new])

    def _step(self, part: RowPush, rate: float, *, adds: bool) -> None:
        """Applies a part of a push to its table, which is locked."""
        store = self.stores[part.table]
        if part.clock != NO_CLOCK and not adds:
            stale = max(0, store.clock - part.clock)
            self._known_pushes += 1
            self._stale_steps += stale
            self._most_stale = max(self._most_stale, stale)
        if adds:
            store.add(part.ids, part.values, part.counts)
            self._changed[part.table].note(store.slots_of(part.ids), store.clock)
        else:
            store.push(part.ids, part.values, rate, part.counts)
        self.pushed += len(part.ids)

    def _reply(self, part: RowPush, rows: Mask | None) -> PushReply:
        store = self.stores[part.table]
        if rows is None or not rows.any():
            values = np.empty((0, store.dim), np.float32)
            return PushReply([store.clock], np.zeros(len(part.ids), bool), values)
        return PushReply([store.clock], rows, store.pull(part.ids[rows]))

    def _stage(self, message: Message) -> Message:
        """Puts a part of a round aside until a decision names it."""
        parts = unpack_push(message.meta.get("parts"), message.content.copy(), self._dims)
        piece = message.meta.get("piece")
        number = count = 0
        if isinstance(piece, list) and len(piece) == 2 and all(type(n) is int for n in piece):
            number, count = piece
        if not 0 <= number < count <= _MOST_PIECES:
            raise ProtocolError(
                "a part of a round's step of rows is malformed",
                expected=f"its number, and the number of parts, at most {_MOST_PIECES}",
                received=repr(piece)[:100],
            )
        position = message.epoch, message.batch
        with self._lock:
            self._identify(message)
            if position <= self._position:
                raise RowsAheadError(
                    "the rows of tables are ahead of the weights",
                    expected=f"a round after epoch {self._position[0]}, batch {self._position[1]}",
                    received=f"epoch {position[0]}, batch {position[1]}",
                    hint="fit(..., resume=True) goes on from the last checkpoint",
                )
            key = message.rank, message.attempt, message.sequence
            staged = self._staged.setdefault(
                key, _StagedRows(position, message.rows, message.learning_rate, count)
            )
            staged.pieces[number] = parts
        return Message(Kind.OK, sequence=message.sequence)

    def _follow(self, decision: Decision, rank: int) -> None:
        """Takes the step of the round that is decided, unless this shard has."""
        with self._lock:
            driver_is_late = rank < 0 and decision.round < self._round
            if driver_is_late or not decision.follows(self._round):
                return
            found = [self._staged.get(member) for member in decision.members]
            whole = [s for s in found if s is not None and len(s.pieces) == s.count]
            if len(whole) < len(found):
                raise ProtocolError(
                    "a worker's rows of a round are not on this shard",
                    expected=f"those of the commits {list(decision.members)}",
                    received=f"those of {sorted(self._staged)}",
                )
            self._take_round(whole)
            self._round += 1
            self._staged.clear()

    def _take_round(self, members: list[_StagedRows]) -> None:
        """One step of each row, by the mean of the members' gradients, weighed by their rows."""
        self._position = max([self._position, *(m.position for m in members)])
        total = sum(member.rows for member in members)
        for name, store in self.stores.items():
            parts = ((part, m.rows) for m in members if m.rows for part in m.parts_of(name))
            given = [(part, np.float32(rows / total)) for part, rows in parts]
            if not given:
                continue
            ids = np.concatenate([part.ids for part, _ in given])
            values = np.concatenate([part.values * share for part, share in given])
            counts = None
            if all(part.counts is not None for part, _ in given):
                counts = np.concatenate([np.asarray(part.counts) for part, _ in given])
            ids, values, seen = merged(ids, values, counts)
            own = self._rates[name]
            rate = members[0].learning_rate if own is None else own
            with self._locks[name]:
                store.push(ids, values, rate, seen)
            self.pushed += len(ids)

    def _identify(self, message: Message) -> Worker:
        rank = message.rank
        worker = self._workers.setdefault(rank, Worker(rank, epoch=-1))
        worker.refuse_superseded(message)
        if worker.attempt != message.attempt:  # batches that it trains again count no second time
            brought = self._brought.get(rank, _Brought())
            self._former[rank] = _Brought(
                brought.position, {n: list(ids) for n, ids in brought.ids.items()}
            )
            worker.bind(0, message, 0.0)
        return worker

    def _save(self, message: Message) -> Message:
        """Writes the rows; meanwhile others push, unless rows may leave their places."""
        reference = TableReference.from_bytes(str(message.meta.get("reference")).encode())
        if reference.folder.rpartition("/")[0] != self._folder:
            raise ProtocolError(
                "rows are to be written elsewhere than in the run's folder",
                expected=f"a folder in {self._folder!r}", received=reference.folder[:200],
            )  # fmt: skip
        clocks = message.meta.get("clocks")
        for name, store in self.stores.items():
            lock, leaves = self._locks[name], store.eviction.on
            clock = clocks.get(name) if isinstance(clocks, dict) else None
            if not isinstance(clock, int):
                raise ProtocolError(
                    "a request to write rows is malformed", expected=f"the clock of table {name!r}",
                    received=repr(clocks)[:200],
                )  # fmt: skip
            with lock if leaves else contextlib.nullcontext():
                inner = contextlib.nullcontext() if leaves else lock
                folder = reference.folder_of(name)
                write_part(store, folder, self._number, self._count, clock=clock, lock=inner)
        return Message(Kind.OK)

    def _table(self, name: object) -> str:
        if not isinstance(name, str) or name not in self.stores:
            raise ProtocolError(
                "a request for rows of an unknown table",
                expected=", ".join(sorted(self.stores)) or "none: the model has no tables",
                received=repr(name)[:100],
            )
        return name
