"""The state machine that every transport feeds: ``receive``, ``disconnect``, ``tick``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sparkdl.coordinator import telemetry
from sparkdl.coordinator.blobs import Assembly, KeptBlobs, chunk_reply
from sparkdl.coordinator.group import (
    Group,
    Introduction,
    RunOrders,
    Store,
    Wait,
    Work,
    Worker,
    require_driver,
)
from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.settings import Settings
from sparkdl.coordinator.telemetry import EpochTotals, LogLines, Status, is_count
from sparkdl.errors import ProtocolError, SparkDLError
from sparkdl.failures import Failure
from sparkdl.training.changes import VariableChanges
from sparkdl.transport import frames
from sparkdl.transport.frames import BLOB_BYTES, ByteArray, Flag, FrameKind, Kind, Message
from sparkdl.transport.service import Metric, Replies


class Joining:
    """HELLO and all that may follow from it."""

    def __init__(self, group: Group, store: Store) -> None:
        self._group, self._store = group, store
        group.started = not store.together
        self._gathered = group.settings.gather <= 1
        self.group_done = False
        """Whether the ranks that train in step are through: nobody joins any more."""

    def hello(self, connection: int, message: Message) -> None:
        """A worker joins, or tells more of itself.

        Raises:
            ProtocolError: It cannot be a worker of this run.
        """
        group = self._group
        count = group.settings.num_workers
        if not 0 <= message.rank < count:
            raise ProtocolError(
                "a worker with an impossible rank said HELLO", expected=f"0 .. {count - 1}",
                received=str(message.rank),
            )  # fmt: skip
        self._store.check(message)
        introduction_of(message)
        if group.failure is not None:
            raise group.failure.worker_error()
        worker = group.workers.setdefault(message.rank, Worker(message.rank))
        worker.refuse_superseded(message)
        group.defer(connection, "duplicate", message)
        if worker.finished or worker.attempt in (None, message.attempt):
            self._enter(connection, message, worker)

    def settle(self) -> None:
        """Answers the HELLOs that can be answered now."""
        group = self._group
        if not group.waiting("duplicate", "start", "gather", "join"):
            return
        for connection, wait in group.waiting("duplicate"):
            worker = group.workers[wait.message.rank]
            if worker.finished or not worker.reachable or self._store.gives_way(wait.since):
                self._enter(connection, wait.message, worker)
        starters = group.waiting("start")
        if starters and len(starters) == group.settings.num_workers:
            group.started = True
            group.orders.latch()
            self._let_in(starters)
        early = group.waiting("gather")
        if early:
            waited = group.now - min(wait.since for _, wait in early)
            if len(early) >= group.settings.gather or waited >= group.settings.gather_s:
                self._gathered = True
                self._let_in(early)
        self._let_in(group.waiting("join"), late=True)

    def expire(self) -> None:
        """Ends the HELLOs that waited too long for the others."""
        group, limits = self._group, self._group.settings
        starters = group.waiting("start")
        if starters and group.now - min(w.since for _, w in starters) > limits.start_timeout_s:
            present = {w.message.rank for _, w in starters}
            missing = [r for r in range(limits.num_workers) if r not in present]
            for connection, _ in starters:
                group.time_out(
                    connection, "the start of all workers", missing, limits.start_timeout_s,
                    "fewer free slots than workers?",
                )  # fmt: skip
        for connection, wait in group.waiting("join"):
            if group.now - wait.since > limits.round_timeout_s:
                group.time_out(
                    connection, f"rank {wait.message.rank}'s turn after its HELLO",
                    self._store.missing(), limits.round_timeout_s, "raise round_timeout_s?",
                )  # fmt: skip

    def finish(self, connection: int, message: Message) -> None:
        """A worker's work is done."""
        group = self._group
        worker = group.workers.get(message.rank)
        if worker is None or not (worker.finished and worker.attempt == message.attempt):
            worker = group.identify(connection, message)
        self.group_done = self._store.in_step
        group.mark_finished(worker)
        group.answer(connection, Message(Kind.OK), worker)

    def _enter(self, connection: int, message: Message, worker: Worker) -> None:
        """Admits a HELLO whose rank no other live attempt holds."""
        group = self._group
        if worker.finished or (self.group_done and not worker.member):
            self._welcome(connection, worker, Flag.DONE)
            return
        if worker.attempt not in (None, message.attempt):
            group.mark_dead(worker)
        group.bind(connection, message, worker)
        said = introduction_of(message)
        if worker.member and said.text is None:  # it tells more of itself
            said = replace(said, text=worker.said.text)
        worker.said = said
        if not self._store.together and not self._gathered:
            group.defer(connection, "gather", message)
        elif worker.member:
            self._welcome(connection, worker, Flag.NONE)
        else:
            group.defer(connection, "join" if group.started else "start", message)

    def _let_in(self, waits: list[tuple[int, Wait]], *, late: bool = False) -> None:
        for connection, wait in waits:
            worker = self._group.workers[wait.message.rank]
            if late and self.group_done:
                self._welcome(connection, worker, Flag.DONE)
                continue
            source = self._store.enter(worker, late=late)
            if source is not None:
                worker.member = True
                self._welcome(connection, worker, Flag.NONE, source)

    def _welcome(self, connection: int, worker: Worker, flag: Flag, source: str = "center") -> None:
        group = self._group
        known = group.workers.values()
        meta: dict[str, Any] = {
            "num_workers": group.settings.num_workers,
            "source": source,
            "lease_s": group.settings.lease_s,
            "steps_per_epoch": max((w.said.batches_per_epoch for w in known), default=0),
            "texts": {str(w.rank): w.said.text for w in known if w.said.text is not None},
            "released_epoch": group.orders.released_epoch,
            **self._store.welcome(),
        }
        reply = Message(
            Kind.OK, flags=flag, sequence=worker.applied, rows=worker.rows, batches=worker.batches,
            epoch=worker.epoch, batch=worker.batch, meta=meta,
        )  # fmt: skip
        group.answer(connection, reply, worker)


def introduction_of(message: Message) -> Introduction:
    meta = message.meta
    rows, batches, pid = (meta.get(key, 0) for key in ("rows", "batches_per_epoch", "pid"))
    host, text = meta.get("host", ""), meta.get("text")
    for name, value in (("rows", rows), ("batches_per_epoch", batches), ("pid", pid)):
        if not is_count(value):
            raise ProtocolError(
                "a malformed HELLO", expected="whole numbers from 0 on, below 2**63",
                received=f"{name}={value!r}"[:200],
            )  # fmt: skip
    if not isinstance(host, str) or not (text is None or isinstance(text, str)):
        received = f"host={host!r}, text={text!r}"
        raise ProtocolError("a malformed HELLO", expected="texts", received=received)
    return Introduction(rows, batches, host, pid, text)


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


class Coordinator:
    """Members, waits, telemetry and orders of one run; no sockets, no clock of its own.

    A *connection* is an int that a transport chose. It has one outstanding request at a time and
    one buffer. Every request gets exactly one reply, at once or deferred; the replies that became
    due are what ``receive``, ``disconnect`` and ``tick`` return. All three are thread-safe.

    Args:
        store: What the workers share beside; None: nothing, they exchange it among themselves.
    """

    beside: frozenset[FrameKind] = frozenset({CoordinatorKind.HEARTBEAT})
    parting: frozenset[FrameKind] = frozenset({CoordinatorKind.BYE})

    def __init__(self, settings: Settings, store: Store | None = None) -> None:
        self._store = Store() if store is None else store
        limits = self._store.limits
        limits = replace(limits, kinds={**frames.kinds_of(CoordinatorKind), **limits.kinds})
        self.group = Group(settings, limits, RunOrders(self._store.latched))
        self.limits, self.buffer, self.attach = limits, self.group.buffer, self.group.attach
        self.idle_s = max(10 * settings.lease_s, 60.0)
        self.bytes_in = self.bytes_out = 0
        self._joining = Joining(self.group, self._store)
        most = settings.max_state_bytes
        most = 8 * limits.dense_bytes + (64 << 20) if most is None else most
        self._reporting = Reporting(self.group, most)
        self.group.on_leave = self._store.leave
        self._store.attach(self.group)
        self._routes: dict[FrameKind, Callable[[int, Message], None]] = {
            CoordinatorKind.HELLO: self._joining.hello,
            CoordinatorKind.FINISH: self._joining.finish,
            CoordinatorKind.HEARTBEAT: self._reporting.heartbeat,
            CoordinatorKind.REPORT: self._reporting.report,
            CoordinatorKind.KEEP: self._reporting.keep,
            CoordinatorKind.LOG: self._reporting.log,
            CoordinatorKind.FAIL: self._reporting.fail,
            CoordinatorKind.BYE: self._reporting.bye,
            CoordinatorKind.STATUS: self._status,
            CoordinatorKind.CONTROL: self._reporting.control,
            CoordinatorKind.KEPT: self._reporting.kept,
            CoordinatorKind.TAKE_LINES: self._reporting.take_lines,
            CoordinatorKind.CHANGES: self._changes,
            CoordinatorKind.TAKE_CHANGES: self._reporting.take_changes,
        }

    def receive(self, connection: int, message: Message, now: float) -> Replies:
        group = self.group
        work: Work | None = None
        refusal: Exception | None = None
        if message.kind in self._store.kinds:
            try:
                message = self._store.decoded(connection, message)
            except Exception as error:  # raised again below, where the group's lock is held
                refusal = error
        with group.lock:
            group.now = max(now, group.now)
            try:
                if refusal is not None:
                    raise refusal
                work = self._route(connection, message)
            except SparkDLError as error:
                group.refuse(connection, error)
            except Exception as error:
                group.refuse(connection, self._broken(error))
            self._settle()
            replies = group.flush()
        if work is None:
            return replies
        try:
            reply = work.run()
        except Exception as error:
            with group.lock:
                group.refuse(connection, self._broken(error))
                return replies + group.flush()
        with group.lock:
            group.stamp(reply, work.worker)
        return [*replies, (connection, reply)]

    def disconnect(self, connection: int, now: float) -> Replies:
        """The connection is gone; its worker is dead unless it comes back within the grace."""
        with self.group.lock:
            self.group.now = max(now, self.group.now)
            self.group.disconnect(connection)
            self._store.disconnect(connection)
            self._settle()
            return self.group.flush()

    def tick(self, now: float) -> Replies:
        group = self.group
        with group.lock:
            group.now = max(now, group.now)
            limits = group.settings
            for worker in group.workers.values():
                lost = worker.lost_at is not None and group.now - worker.lost_at >= limits.grace_s
                if worker.alive and (lost or group.now - worker.last_seen > limits.lease_s):
                    group.mark_dead(worker)
            self._joining.expire()
            self._store.expire()
            self._reporting.expire()
            self._settle()
            return group.flush()

    def metrics(self) -> list[Metric]:
        group = self.group
        with group.lock:
            workers = group.workers.values()
            commits, alive = sum(w.commits for w in workers), sum(w.alive for w in workers)
            finished = sum(w.finished for w in workers)
            stale = sum(w.staleness_sum for w in workers) / max(commits, 1)
            stalest = max((w.staleness_max for w in workers), default=0)
            return [
                Metric("commits", "counter", "Commits applied", commits),
                Metric("rounds", "counter", "Rounds of a blocking rule", self._store.rounds),
                Metric("clock", "counter", "Commits or rounds applied", group.clock),
                Metric("rows", "counter", "Rows committed", sum(w.rows for w in workers)),
                Metric("bytes_in", "counter", "Bytes received in frames", self.bytes_in),
                Metric("bytes_out", "counter", "Bytes sent in frames", self.bytes_out),
                Metric("workers_alive", "gauge", "Workers that joined and live", alive),
                Metric("workers_finished", "gauge", "Workers that are done", finished),
                Metric("waiting", "gauge", "Requests whose reply is deferred", len(group.waits)),
                Metric("staleness_mean", "gauge", "Mean commits from a pull to its push", stale),
                Metric("staleness_max", "gauge", "Most commits from a pull to its push", stalest),
                Metric("failed", "gauge", "1 after a worker failed", group.failure is not None),
            ]

    def _route(self, connection: int, message: Message) -> Work | None:
        if message.kind in self._store.kinds:
            return self._store.receive(connection, message)
        if message.kind not in self._routes:
            raise ProtocolError(
                "a frame of a kind that this server does not take",
                expected="a request of the coordinator or its store", received=message.kind.name,
            )  # fmt: skip
        self._routes[message.kind](connection, message)
        return None

    def _broken(self, error: Exception) -> SparkDLError:
        return self.group.fail(error, f"raised on the parameter server by rule {self._store.name}")

    def _settle(self) -> None:
        """Re-examines every deferred reply; cheap, so it runs after each event."""
        group = self.group
        if not group.waits:
            return
        try:
            if group.failure is None:
                self._joining.settle()
                self._store.settle()
                self._reporting.settle()
        except Exception as error:
            self._broken(error)
        if group.failure is not None:
            for connection in list(group.waits):
                group.refuse(connection, group.failure.worker_error())

    def _status(self, connection: int, message: Message) -> None:
        status = self._reporting.status(message, self._store.rounds)
        meta, body = replace(status, bytes_in=self.bytes_in, bytes_out=self.bytes_out).to_wire()
        reply = Message(Kind.OK, meta=meta)
        if body.size:
            reply.total, reply.body = body.size, body
        self.group.answer(connection, reply)

    def _changes(self, connection: int, message: Message) -> None:
        changes = self._reporting.changes(connection, message)
        if changes is not None:
            self._store.write(changes)
