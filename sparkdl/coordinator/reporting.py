"""The reports of the workers, and the questions and orders of the driver."""

from __future__ import annotations

from sparkdl.coordinator import telemetry
from sparkdl.coordinator.blobs import Assembly, KeptBlobs, chunk_reply
from sparkdl.coordinator.group import Group
from sparkdl.coordinator.telemetry import EpochTotals, LogLines, Status
from sparkdl.errors import ProtocolError
from sparkdl.failures import Failure
from sparkdl.training.changes import VariableChanges
from sparkdl.transport.frames import BLOB_BYTES, ByteArray, Flag, Kind, Message


class KeptChanges:
    """Changes of variables, numbered from 1 in the order in which the driver sent them.

    Each worker takes them in that order. One that joins late takes all of them; those whose
    variables a later one sets again are forgotten when all members have taken them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._assembly = Assembly("the changes of variables", max_bytes)
        self._kept: dict[int, tuple[ByteArray, VariableChanges]] = {}
        self._count = 0

    def put(self, message: Message) -> VariableChanges | None:
        """Takes one chunk from the driver; returns the changes once they are whole.

        Raises:
            ProtocolError: They are too large, malformed, or a chunk is out of order.
        """
        blob = self._assembly.put(message)
        if blob is None:
            return None
        changes = VariableChanges.from_bytes(blob.tobytes())
        self._count += 1
        self._kept[self._count] = (blob, changes)
        return changes

    def read(self, message: Message, limit: int) -> Message:
        """One chunk of the first changes that are kept from number ``message.sequence`` on.

        Raises:
            ProtocolError: There are none, or the chunk lies outside of them.
        """
        number = min((n for n in self._kept if n >= message.sequence), default=0)
        if not number:
            raise ProtocolError(
                "changes of variables that nobody has sent",
                expected=f"a number up to {self._count}", received=str(message.sequence),
            )  # fmt: skip
        reply = chunk_reply(self._kept[number][0], message.offset, limit)
        reply.sequence = number
        return reply

    def forget(self, taken: int) -> None:
        """Forgets what nobody will ask for, once all members have taken the first ``taken``."""
        later: frozenset[tuple[str, int]] = frozenset()
        for number in sorted(self._kept, reverse=True):
            keys = self._kept[number][1].keys
            if number <= taken and keys <= later:
                del self._kept[number]
            later |= keys


class Reporting:
    """Reports, heartbeats, failures, kept blobs and log lines of workers."""

    def __init__(self, group: Group, max_blob_bytes: int) -> None:
        self._group = group
        self._kept = KeptBlobs(max_blob_bytes)
        self._changes = KeptChanges(max_blob_bytes)
        self._lines = LogLines()
        self._driver_seen = 0.0

    def report(self, connection: int, message: Message) -> None:
        """Metrics of an epoch; with WAIT, the reply comes when the driver releases the epoch."""
        group = self._group
        worker = group.identify(connection, message)
        report, usage = telemetry.report_of(message), telemetry.usage_of(message)
        group.telemetry.record(worker.rank, message.attempt, report, group.now)
        worker.usage = usage or worker.usage
        if not worker.commits and report.rows_done:
            worker.epoch, worker.batch = report.epoch, report.batches_done
            worker.rows = report.rows_done
        if message.flags & Flag.WAIT:
            message.body = None  # lies in a buffer that the next request uses
            group.defer(connection, "epoch", message)
        else:
            group.answer(connection, Message(Kind.OK), worker)

    def heartbeat(self, connection: int, message: Message) -> None:
        """A sign of life, over a connection of its own; may bring the host's load, and lines."""
        worker = self._group.workers.get(message.rank)
        if worker is not None and worker.attempt == message.attempt:
            worker.last_seen = self._group.now
            worker.load = telemetry.load_of(message) or worker.load
            self._lines.add(worker.rank, telemetry.lines_of(message))
        self._group.answer_beside(connection, Message(Kind.OK), worker)

    def keep(self, connection: int, message: Message) -> None:
        """One chunk of a state for the driver."""
        worker = self._group.identify(connection, message)
        self._kept.put(message)
        self._group.answer(connection, Message(Kind.OK), worker)

    def log(self, connection: int, message: Message) -> None:
        """Lines that a rank printed; also of a rank that has not joined yet."""
        if not 0 <= message.rank < self._group.settings.num_workers:
            raise ProtocolError(
                "lines of an unknown rank", expected=f"0 .. {self._group.settings.num_workers - 1}",
                received=str(message.rank),
            )  # fmt: skip
        self._lines.put(message)
        self._group.answer(connection, Message(Kind.OK))

    def fail(self, connection: int, message: Message) -> None:
        """A worker failed for good: every other rank's next request raises."""
        group = self._group
        worker = group.workers.get(message.rank)
        stale = worker is not None and message.attempt in worker.superseded
        if group.failure is None and not stale:
            group.failure = Failure.from_wire(message.meta, message.rank)
        if worker is not None and worker.attempt == message.attempt:
            group.mark_dead(worker)
        group.answer(connection, Message(Kind.OK))

    def bye(self, connection: int, message: Message) -> None:
        """A worker closes its connection; one that has not finished is dead."""
        group = self._group
        worker = group.workers.get(message.rank)
        if worker is not None and worker.connection == connection and worker.alive:
            group.mark_dead(worker)
        group.answer(connection, Message(Kind.OK))

    def take_changes(self, connection: int, message: Message) -> None:
        """One chunk of what the driver's callbacks wrote to the model."""
        group = self._group
        worker = group.identify(connection, message)
        reply = self._changes.read(message, group.limits.chunk_bytes)
        if reply.offset + reply.body_bytes == reply.total:
            worker.changes_taken = max(worker.changes_taken, reply.sequence)
            self._changes.forget(min((w.changes_taken for w in group.members()), default=0))
        group.answer(connection, reply, worker)

    def changes(self, connection: int, message: Message) -> VariableChanges | None:
        """One chunk of changes that a CONTROL will tell of; the changes, once they are whole."""
        require_driver(message)
        whole = self._changes.put(message)
        self._group.answer(connection, Message(Kind.OK))
        return whole

    def status(self, message: Message, rounds: int) -> Status:
        """The run as it is now; epochs from ``message.epoch`` on."""
        group = self._group
        self._driver_seen = group.now
        return Status(
            workers={r: w.status() for r, w in sorted(group.workers.items())},
            epochs=bounded(group.telemetry.totals(message.epoch)), failure=group.failure,
            clock=group.clock, rounds=rounds, released_epoch=group.orders.released_epoch,
            started=group.started, waiting={w.message.rank: w.reason for w in group.waits.values()},
        )  # fmt: skip

    def control(self, connection: int, message: Message) -> None:
        require_driver(message)
        self._driver_seen = self._group.now
        self._group.orders.take(message.meta, started=self._group.started)
        self._group.answer(connection, Message(Kind.OK))

    def kept(self, connection: int, message: Message) -> None:
        """One chunk of the run's blob, or of a rank's own; an empty one where there is none."""
        limit = self._group.limits.chunk_bytes
        rank = message.meta.get("of")
        kept = self._kept.of(rank if isinstance(rank, int) else None)
        reply = chunk_reply(kept.content, message.offset, limit, max(kept.epoch, 0))
        self._group.answer(connection, reply)

    def take_lines(self, connection: int, message: Message) -> None:
        """The lines that came since the last look; they are forgotten here."""
        ranks, lines = self._lines.take(telemetry.MAX_LINES_BYTES)
        body = telemetry.pack_lines(lines)
        reply = Message(
            Kind.CHUNK, total=body.size, meta={"ranks": ranks}, body=body if body.size else None
        )
        self._group.answer(connection, reply)

    def settle(self) -> None:
        """Lets workers pass the epochs that the driver has released."""
        group = self._group
        for connection, wait in group.waiting("epoch"):
            if wait.message.epoch <= group.orders.released_epoch:
                group.answer(connection, Message(Kind.OK), group.workers.get(wait.message.rank))

    def expire(self) -> None:
        """Ends waits for a driver that says nothing at all."""
        group = self._group
        limit_s = group.settings.release_timeout_s
        for connection, wait in group.waiting("epoch"):
            if group.now - max(wait.since, self._driver_seen) > limit_s:
                group.time_out(
                    connection, "the driver's release of the next epoch", ["driver"], limit_s,
                    "is the driver's process stopped or busy?",
                )  # fmt: skip


def require_driver(message: Message) -> None:
    """Raises ProtocolError for what only the driver may send, from a worker."""
    if message.rank >= 0:
        raise ProtocolError(
            f"only the driver may send {message.kind.name}", expected="rank -1",
            received=f"rank {message.rank}",
        )  # fmt: skip


def bounded(epochs: dict[int, EpochTotals]) -> dict[int, EpochTotals]:
    """The first epochs, as many as one frame has room for; the driver asks for the rest later."""
    result: dict[int, EpochTotals] = {}
    size = 0
    for number, epoch in epochs.items():
        size += epoch.metrics.nbytes + epoch.val_metrics.nbytes
        if not result:
            telemetry.require_sendable(number, size)
        if size > BLOB_BYTES:
            break
        result[number] = epoch
    return result
