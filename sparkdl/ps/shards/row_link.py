"""``RowLink``: requests for rows of tables, to the shards that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.process.closing import Closing
from sparkdl.ps.client import Progress
from sparkdl.ps.kinds import DECISION, StoreKind
from sparkdl.ps.shards.pushes import (
    NO_CLOCK,
    Places,
    PushReply,
    RowPush,
    joined_replies,
    pack_push,
    row_bytes,
    unpack_reply,
)
from sparkdl.tables.index import by_owner
from sparkdl.tables.service import IdArray, TableSpec
from sparkdl.transport.connection import Connection
from sparkdl.transport.frames import Flag, FrameLimits, Message
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class Fetched:
    """Rows that came from the shards.

    Args:
        rows: Of shape ``(ids, dim)``.
        clocks: The table's clock on each shard when the rows left it; ``NO_CLOCK`` where none did.
    """

    rows: FloatArray
    clocks: list[int]


class RowLink(Closing):
    """A worker's connections to the rows on all shards; one thread uses it at a time.

    Args:
        connections: One to each shard, in order, for rows alone; closed with the link.
        limits: The limits of each connection.
        decided: The coordinator's last decision, as requests carry it; None where rows have no
            rounds.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        limits: Sequence[FrameLimits],
        rank: int,
        attempt: int,
        tables: Sequence[TableSpec],
        decided: Callable[[], list[Any]] | None = None,
    ) -> None:
        self._connections, self._limits = connections, limits
        stores = {spec.name: spec.store() for spec in tables}
        self._dims = {name: store.dim for name, store in stores.items()}
        self._counted = {name for name, s in stores.items() if s.entry is not None or s.tracks}
        self._decided = decided
        self._rank, self._attempt = rank, attempt
        self._sequence = 0
        self._threads = ThreadPoolExecutor(len(connections), thread_name_prefix="sparkdl-rows")

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self._connections)

    def fetch(self, table: str, ids: IdArray, *, training: bool) -> Fetched:
        """The rows of some ids.

        Args:
            ids: Each once.
            training: Whether ids without a row have their start values; else zeros.
        """
        order, edges = by_owner(ids, self.num_shards)
        rows = np.empty((len(ids), self._dims[table]), np.float32)
        clocks = [NO_CLOCK] * self.num_shards
        meta = {"table": table, "training": training}

        def ask(shard: int) -> None:
            places = order[edges[shard]]
            most = max(1, self._limits[shard].chunk_bytes // (8 + 4 * self._dims[table]))
            for first in range(0, len(places), most):
                part = places[first : first + most]
                sent = ids[part].view(np.uint8)
                message = Message(StoreKind.ROWS_PULL, total=sent.size, meta=dict(meta))
                reply = self._request(shard, message, sent)
                rows[part] = reply.content.view(np.float32).reshape(len(part), -1)
                if clocks[shard] == NO_CLOCK:
                    clocks[shard] = int(reply.meta["clock"])

        self._on_all(ask)
        return Fetched(rows, clocks)

    def push(
        self,
        pushes: Sequence[RowPush],
        epoch: int,
        batch: int,
        learning_rate: float,
        *,
        changes: bool = False,
    ) -> list[PushReply]:
        """One step of rows on all shards at the same time.

        Args:
            pushes: One for each table.
            epoch, batch: The worker's position after it.
            changes: The values are added to the rows, instead of being gradients of a step, and
                rows that others have changed since ``clocks`` come back.
        """
        parts, places = self._parts(pushes)
        back: list[list[list[PushReply]]] = [[[] for _ in pushes] for _ in parts]
        again = [False] * len(parts)
        sequences = [self._sequence] * len(parts)

        def send(shard: int) -> None:
            for pieces in self._split(parts[shard], shard):
                told, body = pack_push([piece for _, piece in pieces])
                sequences[shard] += 1
                message = Message(
                    StoreKind.ROWS_PUSH, sequence=sequences[shard], epoch=epoch, batch=batch,
                    learning_rate=learning_rate, total=body.size,
                    meta={"parts": told, "changes": changes},
                )  # fmt: skip
                reply = self._request(shard, message, body)
                again[shard] |= Flag.DUPLICATE in reply.flags
                told_back, sent = reply.meta.get("parts"), [p for _, p in pieces]
                found = unpack_reply(told_back, reply.content, sent, self._dims)
                for (number, _), answer in zip(pieces, found, strict=True):
                    back[shard][number].append(answer)

        self._on_all(send)
        self._sequence = max(sequences)
        return [
            joined_replies(push, places[number], [of[number] for of in back], any(again))
            for number, push in enumerate(pushes)
        ]

    def put_aside(self, pushes: Sequence[RowPush], progress: Progress, sequence: int) -> None:
        """Sends this worker's part of a round to all shards, which apply it when it is decided.

        Args:
            progress: After the round.
            sequence: Number of the commit to the coordinator that follows.
        """
        parts, _ = self._parts(pushes)

        def send(shard: int) -> None:
            pieces = self._split(parts[shard], shard)
            for number, piece in enumerate(pieces):
                told, body = pack_push([part for _, part in piece])
                message = Message(
                    StoreKind.ROWS_STAGE, sequence=sequence, epoch=progress.epoch,
                    batch=progress.batch, rows=progress.rows,
                    learning_rate=progress.learning_rate, total=body.size,
                    meta={"parts": told, "piece": [number, len(pieces)]},
                )  # fmt: skip
                self._request(shard, message, body)

        self._on_all(send)

    def _parts(self, pushes: Sequence[RowPush]) -> tuple[list[list[RowPush]], list[list[Places]]]:
        """The pushes shard by shard; and for each push, and each shard, the places of its ids."""
        parts: list[list[RowPush]] = [[] for _ in self._connections]
        places: list[list[Places]] = [[] for _ in pushes]
        for number, push in enumerate(pushes):
            if push.table not in self._counted:
                push = replace(push, counts=None)
            order, edges = by_owner(push.ids, self.num_shards)
            for shard, edge in enumerate(edges):
                places[number].append(order[edge])
                parts[shard].append(push.piece(order[edge], [push.clocks[shard]]))
        return parts, places

    def give_up(self) -> None:
        """Ends requests that wait in other threads."""
        for connection in self._connections:
            connection.give_up()

    def close(self) -> None:
        self.give_up()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for connection in self._connections:
            connection.close()

    def _split(self, parts: Sequence[RowPush], shard: int) -> list[list[tuple[int, RowPush]]]:
        """Numbered parts in pushes that fit a frame; each part is there, also without rows."""
        pushes: list[list[tuple[int, RowPush]]] = [[]]
        room = self._limits[shard].chunk_bytes
        for number, part in enumerate(parts):
            size = row_bytes(self._dims[part.table])
            at = 0
            while at < len(part.ids) or not at:
                most = room // size
                if most < 1:
                    pushes.append([])
                    room = self._limits[shard].chunk_bytes
                    most = max(1, room // size)
                piece = part.piece(slice(at, min(at + most, len(part.ids))))
                pushes[-1].append((number, piece))
                room -= len(piece.ids) * size
                at += len(piece.ids)
                if not len(part.ids):
                    break
        return pushes

    def _request(self, shard: int, message: Message, body: npt.NDArray[np.uint8]) -> Message:
        message.rank, message.attempt = self._rank, self._attempt
        if self._decided is not None:
            message.meta[DECISION] = self._decided()
        return self._connections[shard].request(message, body)

    def _on_all(self, do: Callable[[int], None]) -> None:
        if self.num_shards == 1:
            do(0)
            return
        jobs = [self._threads.submit(do, shard) for shard in range(self.num_shards)]
        for error in [job.exception() for job in jobs]:  # no job that close cancelled is waited for
            if error is not None:
                raise error
