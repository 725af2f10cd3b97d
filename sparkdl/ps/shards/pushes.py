"""The bodies of pushes of rows, and of their replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ProtocolError
from sparkdl.tables.service import IdArray
from sparkdl.transport.frames import ByteArray
from sparkdl.weights import FloatArray

Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]
NO_CLOCK = -1
"""The clock of rows that nobody knows."""


@dataclass(frozen=True)
class RowPush:
    """A change of the rows of one table, or the part of it that one shard has.

    Args:
        ids: Each once.
        values: Gradients, or changes, of shape ``(len(ids), dim)``.
        counts: How often the batches have each id; None where the table does not ask.
        wanted: The rows that are to come back; None: none, or those that others changed.
        clocks: The table's clock on each shard up to which the sender knows the rows; of a part
            that of its shard alone.
    """

    table: str
    ids: IdArray
    values: FloatArray
    counts: IdArray | None = None
    wanted: Mask | None = None
    clocks: Sequence[int] = (NO_CLOCK,)

    @property
    def clock(self) -> int:
        """The clock of a part."""
        return self.clocks[0]

    def piece(self, piece: slice | Mask | Places, clocks: Sequence[int] = ()) -> RowPush:
        """Some of the rows; with other clocks, if these are given."""
        counts = None if self.counts is None else self.counts[piece]
        wanted = None if self.wanted is None else self.wanted[piece]
        return RowPush(
            self.table, self.ids[piece], self.values[piece], counts, wanted, clocks or self.clocks
        )


def row_bytes(dim: int) -> int:
    """Bytes of one row of a push at most: its id, its count, its mark, its numbers."""
    return 24 + 4 * dim


def pack_push(parts: Sequence[RowPush]) -> tuple[list[list[Any]], ByteArray]:
    """Describes the parts of a push for its meta, and joins them to its body."""
    told: list[list[Any]] = []
    arrays: list[ByteArray] = []
    for part in parts:
        counted, wants = part.counts is not None, part.wanted is not None
        told.append([part.table, len(part.ids), counted, wants, part.clock])
        arrays.append(np.ascontiguousarray(part.ids).view(np.uint8))
        if part.counts is not None:
            arrays.append(np.ascontiguousarray(part.counts).view(np.uint8))
        arrays.append(np.ascontiguousarray(part.values).reshape(-1).view(np.uint8))
        if part.wanted is not None:
            arrays.append(np.ascontiguousarray(part.wanted).view(np.uint8))
    return told, np.concatenate(arrays) if arrays else np.empty(0, np.uint8)


def unpack_push(told: object, body: ByteArray, dims: Mapping[str, int]) -> list[RowPush]:
    """The counterpart of :func:`pack_push`.

    Raises:
        ProtocolError: The body does not fit what the meta says.
    """
    parts: list[RowPush] = []
    taken = _Taken(body)
    try:
        for name, count, counted, wants, clock in told:  # type: ignore[attr-defined]
            dim = dims[name]
            ids = taken.next(np.int64, count)
            counts = taken.next(np.int64, count) if counted else None
            values = taken.next(np.float32, count * dim).reshape(-1, dim)
            wanted = taken.next(np.uint8, count) != 0 if wants else None
            if not isinstance(clock, int):
                raise TypeError(f"the clock {clock!r}")
            parts.append(RowPush(name, ids, values, counts, wanted, (clock,)))
        taken.end()
    except (TypeError, ValueError, KeyError) as error:
        raise ProtocolError(
            "a push of gradients for rows is malformed",
            expected=f"tables of {sorted(dims)}, and a body of their ids and gradients",
            received=f"{type(error).__name__}: {str(error)[:200]}",
        ) from error
    return parts


@dataclass(frozen=True)
class PushReply:
    """The answer to a push, or about the part of it that one shard has.

    Args:
        clocks: The table's clock on each shard after the push; of a part that of its shard alone.
        rows: Which of the rows come back.
        values: Theirs, of shape ``(rows that come back, dim)``.
        again: A shard had the push before.
    """

    clocks: list[int]
    rows: Mask
    values: FloatArray
    again: bool = False


def pack_reply(replies: Sequence[PushReply]) -> tuple[list[list[int]], ByteArray]:
    """Describes the answers for the meta of a reply, and joins them to its body."""
    told = [[r.clocks[0], len(r.rows), int(np.count_nonzero(r.rows))] for r in replies]
    arrays: list[ByteArray] = []
    for reply in replies:
        if len(reply.values):
            values = np.ascontiguousarray(reply.values).reshape(-1).view(np.uint8)
            arrays += [np.packbits(reply.rows), values]
    return told, np.concatenate(arrays) if arrays else np.empty(0, np.uint8)


def unpack_reply(
    told: object, body: ByteArray, parts: Sequence[RowPush], dims: Mapping[str, int]
) -> list[PushReply]:
    """The counterpart of :func:`pack_reply`, for the parts that were pushed.

    Raises:
        ProtocolError: The body does not fit what the meta says.
    """
    replies: list[PushReply] = []
    taken = _Taken(body)
    try:
        for part, (clock, count, back) in zip(parts, told, strict=True):  # type: ignore[call-overload]
            dim = dims[part.table]
            rows, values = np.zeros(count, bool), np.empty((0, dim), np.float32)
            if back:
                rows = np.unpackbits(taken.next(np.uint8, -(-count // 8)), count=count) != 0
                values = taken.next(np.float32, back * dim).reshape(-1, dim).copy()
            if count != len(part.ids) or len(values) != np.count_nonzero(rows):
                raise ValueError(f"{back} of {count} rows for {len(part.ids)} ids")
            replies.append(PushReply([int(clock)], rows, values))
        taken.end()
    except (TypeError, ValueError) as error:
        raise ProtocolError(
            "the reply to a push of rows is malformed",
            expected="a clock for each table, and the rows that come back",
            received=f"{type(error).__name__}: {str(error)[:200]}",
        ) from error
    return replies


def joined_replies(
    push: RowPush, places: Sequence[Places], parts: Sequence[Sequence[PushReply]], again: bool
) -> PushReply:
    """The answer to a push, of the answers about its parts, each in pieces.

    Args:
        places: The places of each shard's ids among those of the push.
    """
    rows = np.zeros(len(push.ids), bool)
    whole = zip(places, parts, strict=True)
    found = [(mine, of) for mine, of in whole if any(len(piece.values) for piece in of)]
    for mine, of in found:
        rows[mine] = np.concatenate([piece.rows for piece in of])
    values = np.empty((np.count_nonzero(rows), push.values.shape[1]), np.float32)
    at = np.cumsum(rows) - 1 if found else rows
    for mine, of in found:
        values[at[mine[rows[mine]]]] = np.concatenate([piece.values for piece in of])
    return PushReply([pieces[-1].clocks[0] for pieces in parts], rows, values, again)


class _Taken:
    """Arrays from a body, one after another."""

    def __init__(self, body: ByteArray) -> None:
        self._body, self._at = body, 0

    def next(self, dtype: Any, count: int) -> npt.NDArray[Any]:
        size = count * np.dtype(dtype).itemsize
        if count < 0 or self._at + size > self._body.size:
            raise ValueError(f"{self._body.size} bytes")
        self._at += size
        found = np.frombuffer(self._body, dtype, count, self._at - size)
        return found if found.flags.aligned else found.copy()

    def end(self) -> None:
        if self._at != self._body.size:
            raise ValueError(f"{self._body.size - self._at} bytes are left")
