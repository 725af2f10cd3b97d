"""The connections of a worker, and of the driver, to a center that lies on shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from sparkdl.codecs import Compression
from sparkdl.coordinator.blobs import chunked
from sparkdl.coordinator.driver_client import DriverClient
from sparkdl.coordinator.session import Session, Welcome
from sparkdl.process.closing import Closing
from sparkdl.ps.client import Client, Coder, Progress, commit_message
from sparkdl.ps.kinds import (
    DECISION,
    Decision,
    Range,
    StoreKind,
    compression_of,
    limits_of,
    ranges_of,
)
from sparkdl.ps.shards.row_link import RowLink
from sparkdl.ps.shards.rows import RoundRows, RowsOfWorker, ServedRows, WindowRows
from sparkdl.rules.rule import Rule
from sparkdl.tables.checkpoints import TableReference
from sparkdl.tables.service import TableSpec
from sparkdl.training.changes import VariableChanges
from sparkdl.training.phases import ServerUsage
from sparkdl.training.slices import Slices, pack, unpack
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import Connection, Opener, Timeouts
from sparkdl.transport.frames import Flag, FrameLimits, Message
from sparkdl.transport.openers import explained, openers_of
from sparkdl.weights import FloatArray, Layout


def _open_connection(
    opener: Opener,
    limits: FrameLimits,
    timeouts: Timeouts,
    name: str,
    check: Callable[[], None] | None = None,
) -> Connection:
    connection = Connection(opener, limits, timeouts, buffered=True, name=name, check=check)
    with explained(opener, timeouts):
        connection.open()
    return connection


class ShardClient(Closing):
    """One worker's connection to one shard. One request at a time.

    Args:
        range_: Which values it holds.
        values: The part of the worker's flat buffer that a push sends and a pull fills.
        compression: Compression of the run, for this range.
    """

    def __init__(
        self,
        opener: Opener,
        range_: Range,
        values: FloatArray,
        *,
        rank: int,
        attempt: int,
        number: int,
        compression: Compression | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._values, self.rank, self.attempt = values, rank, attempt
        self._opener, self._timeouts, self._number = opener, timeouts or Timeouts(), number
        self.limits = limits_of(range_.layout, compression)
        self._connections: list[Connection] = []
        self._connection = self.open_another()
        self._coder: Coder | None = None
        if compression is not None and (
            self.transport != "shm" or compression.codec.shapes_training
        ):
            self._coder = Coder(compression, rank, attempt, number)

    def open_another(self) -> Connection:
        """A connection to the shard, beside those that are open; whoever calls this closes it."""
        name = f"worker {self.rank} (server {self._number})"
        connection = _open_connection(self._opener, self.limits, self._timeouts, name)
        self._connections.append(connection)
        return connection

    @property
    def transport(self) -> str:
        """Name of the transport in use, ``'none'`` while there is no connection."""
        channel = self._connection.channel
        return "none" if channel is None else channel.name

    @property
    def encodes(self) -> bool:
        return self._coder is not None

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Bytes of the frames that were sent and received, by all connections."""
        made = self._connections
        return sum(c.bytes_sent for c in made), sum(c.bytes_received for c in made)

    def send(self, message: Message) -> Message:
        """Sends the values with a message; a reply with weights replaces them."""
        connection = self._connection
        if self._coder is not None and message.kind is not StoreKind.SNAPSHOT:
            payload = self._coder.encode(self._values, message.rows)
            return self._taken(connection.request(self._signed(message), payload))
        np.copyto(self.limits.dense(connection.raw), self._values)
        return self._taken(connection.request(self._signed(message), self.limits.dense_bytes))

    def ask(self, message: Message) -> Message:
        """Sends a message alone; a reply with weights replaces the values."""
        return self._taken(self._connection.request(self._signed(message)))

    def give_up(self) -> None:
        """Ends a request that waits in another thread."""
        self._connection.give_up()

    def close(self) -> None:
        self._connection.close()

    def _signed(self, message: Message) -> Message:
        message.rank, message.attempt = self.rank, self.attempt
        if self._coder is not None and message.kind is not StoreKind.SNAPSHOT:
            message.flags |= Flag.ENCODED
            message.meta["held"] = self._coder.version
        return message

    def _taken(self, reply: Message) -> Message:
        if reply.kind is StoreKind.WEIGHTS:
            found = self.limits.dense(self._connection.raw)
            if self._coder is not None:
                self._coder.decode(reply, found)
            np.copyto(self._values, found)
        return reply


class ShardedClient(Client):
    """One worker's access to a center on shards; see :class:`Client`.

    A commit to a rule that does not wait goes to all shards at the same time, each of which applies
    and answers it, and then to the coordinator: a worker that dies in between is tried again from
    where the coordinator knows it, and each shard knows what it has had. How a round goes is in
    :mod:`sparkdl.ps.kinds`.

    Args:
        session: With the coordinator; closed with the client.
        shards: One client for each, whose values are parts of ``flat``; closed with this one.
        flat: The buffer of the whole layout.
    """

    def __init__(
        self,
        session: Session,
        shards: Sequence[ShardClient],
        flat: FloatArray,
        rule: Rule,
        layout: Layout,
    ) -> None:
        super().__init__(session)
        self._layout = layout
        self._dense = np.empty(0, np.float32)
        self._rows: RowsOfWorker | None = None
        self._shards, self._flat, self._rule = shards, flat, rule
        self._decision = Decision()
        self._threads = ThreadPoolExecutor(len(shards), thread_name_prefix="sparkdl-shard")
        session.bytes_beside = self._bytes_moved

    @property
    def buffer(self) -> FloatArray:
        return self._flat

    @property
    def encodes(self) -> bool:
        return any(shard.encodes for shard in self._shards)

    @property
    def transport(self) -> str:
        """The transport that weights travel by: not ``'shm'`` if any of them leaves the host."""
        names = {shard.transport for shard in self._shards}
        return names.pop() if len(names) == 1 else min(names - {"shm"})

    def join(self, *, rows: int = 0, batches_per_epoch: int = 0) -> Welcome:
        welcome = super().join(rows=rows, batches_per_epoch=batches_per_epoch)
        if welcome.decision is not None:
            self._decision = Decision.from_wire(welcome.decision)
        return welcome

    def open_rows(self, tables: Sequence[TableSpec]) -> RowsOfWorker:
        """The rows of a model's tables, by connections of their own; closed with this client.

        Where the rule waits for all workers, they step together; where it exchanges rows in
        windows, with the weights; else at each batch, and the next batch's rows are pulled ahead.
        """
        if self._rule.blocking:
            self._rows = RoundRows(self._open_link(tables))
        elif self._rule.rows_in_windows:
            self._rows = WindowRows(self._open_link(tables), tables, self.num_workers)
        else:
            self._rows = ServedRows(self._open_link(tables), self._open_link(tables))
        return self._rows

    def _open_link(self, tables: Sequence[TableSpec]) -> RowLink:
        decided = (lambda: self._decision.to_wire()) if self._rule.blocking else None
        opened, limits = [s.open_another() for s in self._shards], [s.limits for s in self._shards]
        return RowLink(opened, limits, self.session.rank, self.session.attempt, tables, decided)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        for shard in self._shards:
            shard.give_up()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for shard in self._shards:
            shard.close()
        super().close()

    def pull(self, *, last: bool = False) -> FloatArray:
        message = Message(StoreKind.PULL, flags=Flag.WAIT if last else Flag.NONE)
        self._note(self.session.request(message, deferred=last))
        self._on_all(lambda shard: shard.ask(self._decided(StoreKind.PULL)))
        return self.buffer

    def push(self, progress: Progress) -> None:
        if self._rule.blocking:
            self.push_pull(progress)  # a shard applies a round when a member asks for its result
            return
        self._send(StoreKind.PUSH, progress)
        self._commit(progress, 0, kind=StoreKind.PUSH)

    def push_pull(self, progress: Progress) -> FloatArray:
        if self._rule.blocking:
            self._send_aside(progress)
            self._end_round(self._commit(progress, 0))
        elif self._rule.gated:
            self._send(StoreKind.PUSH, progress)
            self._commit(progress, 0)
            self._on_all(lambda shard: shard.ask(self._decided(StoreKind.PULL)))
        else:
            self._send(StoreKind.PUSH_PULL, progress)
            self._commit(progress, 0)
        return self.buffer

    def sliced_buffer(self, size: int, places: int) -> FloatArray:
        if self._dense.size != size:
            self._dense = np.zeros(size, np.float32)
        return self._dense

    def push_pull_slices(self, progress: Progress, size: int, slices: Sequence[Slices]) -> None:
        """See :meth:`Client.push_pull_slices`.

        The slices go to the coordinator. The shards get the dense rest in their ranges, in which
        the sliced variables are 0.
        """
        places = [part.place for part in slices]
        if not self.encodes:
            self._layout.copy_without(places, self._flat, self._dense, back=True)
        self._send_aside(progress)
        self._end_round(self._commit_slices(progress, pack(np.empty(0, np.uint8), slices)))

    def _end_round(self, reply: Message) -> None:
        """Takes the result of a round: its dense part from the shards, slices from ``reply``."""
        self._note(reply)
        self.round_slices = ()
        if (slices := self._slices_of(reply)) is not None:
            self.round_slices = unpack(slices.copy())[1]
        self._on_all(lambda shard: shard.ask(self._decided(StoreKind.RESULT)))
        if self.round_slices and not self.encodes:
            places = [part.place for part in self.round_slices]
            dense = self.sliced_buffer(self._layout.without(places).size, len(places))
            self._layout.copy_without(places, self._flat, dense)

    def snapshot_wanted(self, epoch: int, batch: int = 0, *, every_step: bool = True) -> bool:
        wanted = super().snapshot_wanted(epoch, batch, every_step=every_step)
        if not wanted:
            self._decision = Decision(self._decision.round, self._decision.members, (epoch, batch))
        return wanted

    def snapshot(self, epoch: int, batch: int = 0) -> None:
        self._keep(epoch, batch)
        super().snapshot(epoch, batch)
        self._decision = Decision(self._decision.round, self._decision.members, (epoch, batch))

    def _send_aside(self, progress: Progress) -> None:
        """The first of the two steps of a round's commit."""
        if isinstance(self._rows, RoundRows):
            self._rows.put_aside(progress, self.session.sequence + 1)
        self._send(StoreKind.STAGE, progress)

    def _send(self, kind: StoreKind, progress: Progress) -> None:
        """Sends the values to all shards, under the number of the commit that follows."""
        number = self.session.sequence + 1
        self._on_all(lambda shard: shard.send(commit_message(kind, progress, number)))

    def _keep(self, epoch: int, batch: int) -> None:
        """The first of the two steps of a snapshot."""

        def keep(shard: ShardClient) -> None:
            message = self._decided(StoreKind.SNAPSHOT)
            message.epoch, message.batch = epoch, batch
            shard.send(message)

        self._on_all(keep)

    def _decided(self, kind: StoreKind) -> Message:
        return Message(kind, meta={DECISION: self._decision.to_wire()})

    def _note(self, reply: Message) -> None:
        if DECISION in reply.meta:
            self._decision = Decision.in_meta(reply.meta)

    def _on_all(self, do: Callable[[ShardClient], object]) -> None:
        """Does something with all shards at the same time; raises the first error."""
        jobs = [self._threads.submit(do, shard) for shard in self._shards]
        for error in [job.exception() for job in jobs]:  # no job that close cancelled is waited for
            if error is not None:
                raise error

    def _bytes_moved(self) -> tuple[int, int]:
        moved = [shard.bytes_moved for shard in self._shards]
        return sum(sent for sent, _ in moved), sum(received for _, received in moved)


def connect_shards(
    session: Session,
    endpoints: Sequence[Endpoint],
    layout: Layout,
    rule: Rule,
    *,
    compression: Compression | None = None,
) -> ShardedClient:
    """Connects a worker, which has a session with the coordinator, to all shards.

    Args:
        session: With the coordinator; closed with the client, or if this fails.

    Raises:
        TransportError: A shard cannot be reached.
    """
    flat = np.zeros(layout.size, np.float32)
    shards: list[ShardClient] = []
    try:
        for number, range_ in enumerate(ranges_of(layout, len(endpoints))):
            own = compression_of(compression, range_)
            limits = limits_of(range_.layout, own)
            opener = openers_of(endpoints[number], "auto", limits, Timeouts())
            shard = ShardClient(
                opener, range_, flat[range_.place], rank=session.rank, attempt=session.attempt,
                number=number, compression=own,
            )  # fmt: skip
            shards.append(shard)
        return ShardedClient(session, shards, flat, rule, layout)
    except BaseException:
        for shard in shards:
            shard.close()
        session.close()
        raise


class ShardsDriver(Closing):
    """Reads the center from all shards, and writes to it. One thread uses it.

    Args:
        endpoints: Endpoints of the shards, in order.
        check: Called before a request is tried again; raises if a shard has ended.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], layout: Layout, check: Callable[[], None]
    ) -> None:
        self._endpoints = endpoints
        self._layout, self._ranges = layout, ranges_of(layout, len(endpoints))
        self._connections: list[Connection] = []
        self._decided: dict[str, Any] = {}
        try:
            for number, endpoint in enumerate(endpoints):
                limits = limits_of(self._ranges[number].layout)
                opener = openers_of(endpoint, "auto", limits, Timeouts())
                name = f"the driver (server {number})"
                self._connections.append(_open_connection(opener, limits, Timeouts(), name, check))
        except BaseException:
            self.close()
            raise

    def pull(self, coordinator: DriverClient) -> FloatArray:
        """A copy of the center as the coordinator has decided it."""
        reply = coordinator.request(Message(StoreKind.PULL))
        meta = {DECISION: reply.meta[DECISION]} if DECISION in reply.meta else {}
        self._decided = meta
        center = np.empty(self._layout.size, np.float32)
        for connection, range_ in zip(self._connections, self._ranges, strict=True):
            connection.request(Message(StoreKind.PULL, meta=dict(meta)))
            size = range_.layout.size_bytes
            center[range_.place] = connection.raw[:size].view(np.float32)
        return center

    def write(self, changes: VariableChanges) -> None:
        """Gives the center what callbacks wrote to the weights."""
        content = changes.to_bytes()
        for connection, range_ in zip(self._connections, self._ranges, strict=True):
            limit = limits_of(range_.layout).chunk_bytes
            for frame, chunk in chunked(Message(StoreKind.WRITE), [content], limit):
                connection.request(frame, chunk)

    def usage(self) -> tuple[ServerUsage, ...]:
        """The work of the servers so far, in the order of their ranges."""
        found = []
        for connection, endpoint in zip(self._connections, self._endpoints, strict=True):
            meta = connection.request(Message(StoreKind.TELL)).meta
            numbers = meta["numbers"]
            found.append(
                ServerUsage(
                    endpoint.address.host, int(meta["memory_bytes"]), int(numbers["bytes_in"]),
                    int(numbers["bytes_out"]), int(numbers["table_rows"]),
                    float(numbers["rows_staleness"]), int(numbers["busy"]),
                )
            )  # fmt: skip
        return tuple(found)

    def save_rows(self, reference: TableReference) -> None:
        """Has all shards write the rows of the tables; training goes on meanwhile.

        In rounds they are those of the round of the last :meth:`pull`.
        """
        asked = [
            c.request(Message(StoreKind.ROWS_CLOCKS, meta=dict(self._decided))).meta["clocks"]
            for c in self._connections
        ]
        # Deltas from the earliest clock on miss nothing that a shard with a later one has changed.
        clocks = {name: min(found[name] for found in asked) for name in reference.tables}
        meta = {"reference": reference.to_bytes().decode(), "clocks": clocks}

        def save(connection: Connection) -> None:
            connection.request(Message(StoreKind.ROWS_SAVE, meta=dict(meta)), deferred=True)

        with ThreadPoolExecutor(len(self._connections)) as threads:
            for _ in threads.map(save, self._connections):
                pass

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
