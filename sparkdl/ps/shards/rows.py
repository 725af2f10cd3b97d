"""``ServedRows``: a worker's access to tables whose rows lie on shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError
from sparkdl.process.closing import Closing
from sparkdl.ps.kinds import StoreKind
from sparkdl.ps.shards.tables import PushPart, pack_push
from sparkdl.tables.classes import ClassSpec, Softmax
from sparkdl.tables.routing import by_owner
from sparkdl.tables.service import IdArray, TableSpec
from sparkdl.tables.store import merged
from sparkdl.transport.connection import Connection
from sparkdl.transport.frames import FrameLimits, Message
from sparkdl.weights import FloatArray


@dataclass
class _Pull:
    """One call of a layer in a step."""

    table: str
    ids: IdArray
    gradients: FloatArray | None = None
    counts: IdArray | None = None


class ServedRows(Closing):
    """The rows of a model's tables; a :class:`sparkdl.tables.service.RowService`.

    A step's gradients are sent at its end, to all shards at the same time: each applies them as one
    step of the rows, and the next pull sees them.

    Args:
        connections: To each shard, in order, used for nothing else; closed with this object.
        limits: Of their frames.
        tables: All tables of the model.
        rank, attempt: Of the worker.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        limits: Sequence[FrameLimits],
        tables: Sequence[TableSpec],
        rank: int,
        attempt: int,
    ) -> None:
        self._connections, self._limits = connections, limits
        self._rank, self._attempt = rank, attempt
        self._sequence = 0
        stores = {spec.name: spec.store() for spec in tables}
        self._dims = {name: store.dim for name, store in stores.items()}
        self._counted = {
            name for name, s in stores.items() if s.entry is not None or s.tracks
        }  # tables whose shards want to know how often an id was seen
        self._pulls: list[_Pull] = []
        self._first = 0
        self._threads = ThreadPoolExecutor(len(connections), thread_name_prefix="sparkdl-rows")

    # -- what layers call --------------------------------------------------------------------------

    def pull(self, table: str, ids: IdArray, *, training: bool) -> tuple[FloatArray, int]:
        """See :class:`sparkdl.tables.service.RowService`."""
        if training and any(pull.gradients is not None for pull in self._pulls):
            self._forget()  # the step computes its gradient once more; the last one counts
        ids = np.ascontiguousarray(ids, np.int64)
        order, edges = by_owner(ids, len(self._connections))
        rows = np.empty((len(ids), self._dims[table]), np.float32)
        meta = {"table": table, "training": training}

        def ask(shard: int) -> None:
            for part in self._pieces(order[edges[shard]], shard, 8 + 4 * self._dims[table]):
                sent = ids[part].view(np.uint8)
                message = Message(StoreKind.ROWS_PULL, total=sent.size, meta=dict(meta))
                reply = self._request(shard, message, sent)
                body = np.empty(0, np.uint8) if reply.body is None else reply.body
                rows[part] = body.view(np.float32).reshape(len(part), -1)

        self._on_all(ask)
        if training:
            self._pulls.append(_Pull(table, ids))
        return rows, self._first + len(self._pulls) - 1

    def push(self, pulled: int, gradients: FloatArray, counts: IdArray) -> None:
        """See :class:`sparkdl.tables.service.RowService`; :meth:`end_step` sends them."""
        pull = self._pulls[pulled - self._first]
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

    # -- what the loop calls -----------------------------------------------------------------------

    def end_step(
        self, epoch: int, batch: int, learning_rate: float, loss_scale: float = 1.0
    ) -> None:
        """One step of all tables with the gradients of a batch.

        Args:
            epoch: Of the batch.
            batch: Batches of that epoch that are done with it.
            learning_rate: Of the model's optimizer in this step.
            loss_scale: The factor that the loss had, by which gradients are divided; infinity where
                it has overflowed, and no step is taken.
        """
        parts: list[list[PushPart]] = [[] for _ in self._connections]
        pulls = [p for p in self._pulls if p.gradients is not None and np.isfinite(loss_scale)]
        for table in sorted({pull.table for pull in pulls}):
            of = [pull for pull in pulls if pull.table == table]
            ids = np.concatenate([pull.ids for pull in of])
            gradients = np.concatenate([np.asarray(p.gradients, np.float32) for p in of])
            counts = np.concatenate([np.asarray(pull.counts, np.int64) for pull in of])
            if len(of) > 1:
                ids, gradients, counts = merged(ids, gradients, counts)
            if loss_scale != 1.0:
                gradients = gradients / np.float32(loss_scale)
            order, edges = by_owner(ids, len(self._connections))
            for shard, edge in enumerate(edges):
                mine = order[edge]
                told = counts[mine] if table in self._counted else None
                parts[shard].append(PushPart(table, ids[mine], gradients[mine], told))
        self._forget()
        if not pulls:
            return
        sequences = [self._sequence] * len(parts)

        def send(shard: int) -> None:
            for pieces in self._split(parts[shard], shard):
                told, body = pack_push(pieces)
                sequences[shard] += 1
                message = Message(
                    StoreKind.ROWS_PUSH, sequence=sequences[shard], epoch=epoch, batch=batch,
                    learning_rate=learning_rate, total=body.size, meta={"parts": told},
                )  # fmt: skip
                self._request(shard, message, body)

        self._on_all(send)
        self._sequence = max(sequences)

    def close(self) -> None:
        """Closes the connections."""
        for connection in self._connections:
            connection.give_up()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for connection in self._connections:
            connection.close()

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Bytes of the frames that were sent and received."""
        made = self._connections
        return sum(c.bytes_sent for c in made), sum(c.bytes_received for c in made)

    # -- inside ------------------------------------------------------------------------------------

    def _pieces(
        self, places: npt.NDArray[np.intp], shard: int, row_bytes: int
    ) -> list[npt.NDArray[np.intp]]:
        """Places in pieces whose rows fit a frame; none where there are no places."""
        most = max(1, self._limits[shard].chunk_bytes // row_bytes)
        return [places[i : i + most] for i in range(0, len(places), most)]

    def _split(self, parts: list[PushPart], shard: int) -> list[list[PushPart]]:
        """The parts in pushes that fit a frame; one push without rows where there are none."""
        pushes: list[list[PushPart]] = [[]]
        room = self._limits[shard].chunk_bytes
        for part in parts:
            row_bytes = 16 + 4 * self._dims[part.table]
            at = 0
            while at < len(part.ids):
                most = room // row_bytes
                if most < 1:
                    pushes.append([])
                    room = self._limits[shard].chunk_bytes
                    most = max(1, room // row_bytes)
                piece = slice(at, min(at + most, len(part.ids)))
                counts = None if part.counts is None else part.counts[piece]
                pushes[-1].append(
                    PushPart(part.table, part.ids[piece], part.gradients[piece], counts)
                )
                room -= (piece.stop - at) * row_bytes
                at = piece.stop
        return pushes

    def _request(self, shard: int, message: Message, body: npt.NDArray[np.uint8]) -> Message:
        message.rank, message.attempt = self._rank, self._attempt
        return self._connections[shard].request(message, body)

    def _on_all(self, do: Callable[[int], None]) -> None:
        """Does something with all shards at the same time; raises the first error."""
        shards = range(len(self._connections))
        if len(shards) == 1:
            do(0)
            return
        jobs = [self._threads.submit(do, shard) for shard in shards]
        errors = [job.exception() for job in jobs]
        for error in errors:
            if error is not None:
                raise error

    def _forget(self) -> None:
        self._first += len(self._pulls)
        self._pulls.clear()


def _no_classes(table: str) -> ConfigError:
    return ConfigError(
        f"the classes of table {table!r} cannot lie on servers",
        expected="mode='allreduce' for a model with a ShardedClassifier",
        received="a mode with a server",
    )
