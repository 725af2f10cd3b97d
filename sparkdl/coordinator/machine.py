"""The state machine that every transport feeds: ``receive``, ``disconnect``, ``tick``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sparkdl.coordinator.group import Group, RunOrders
from sparkdl.coordinator.joining import Joining
from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.reporting import Reporting
from sparkdl.coordinator.settings import Settings
from sparkdl.coordinator.store import Store, Work
from sparkdl.errors import ProtocolError, SparkDLError
from sparkdl.transport.frames import ByteArray, FrameKind, FrameLimits, Kind, Message, kinds_of
from sparkdl.transport.service import Metric, Replies


class Coordinator:
    """Members, waits, telemetry and orders of one run; no sockets, no clock of its own.

    A *connection* is an int that a transport chose. It has one outstanding request at a time and
    one buffer. Every request gets exactly one reply, at once or deferred; the replies that became
    due are what ``receive``, ``disconnect`` and ``tick`` return. All three are thread-safe.

    Args:
        settings: Number of workers and time limits.
        store: What the workers share beside; None: nothing, they exchange it among themselves.
    """

    beside: frozenset[FrameKind] = frozenset({CoordinatorKind.HEARTBEAT})
    parting: frozenset[FrameKind] = frozenset({CoordinatorKind.BYE})

    def __init__(self, settings: Settings, store: Store | None = None) -> None:
        self._store = Store() if store is None else store
        limits = self._store.limits
        limits = replace(limits, kinds={**kinds_of(CoordinatorKind), **limits.kinds})
        self.group = Group(settings, limits, RunOrders(self._store.latched))
        self.bytes_in = self.bytes_out = 0
        self._joining = Joining(self.group, self._store)
        most = settings.max_state_bytes
        self._reporting = Reporting(
            self.group, 8 * limits.dense_bytes + (64 << 20) if most is None else most
        )
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
            CoordinatorKind.CONTROL: self._control,
            CoordinatorKind.KEPT: self._reporting.kept,
            CoordinatorKind.TAKE_LINES: self._reporting.take_lines,
            CoordinatorKind.CHANGES: self._changes,
            CoordinatorKind.TAKE_CHANGES: self._reporting.take_changes,
        }

    @property
    def limits(self) -> FrameLimits:
        """The largest bodies that a peer may send."""
        return self.group.limits

    @property
    def settings(self) -> Settings:
        """Number of workers and time limits."""
        return self.group.settings

    @property
    def idle_s(self) -> float:
        """Silence after which an HTTP client is forgotten."""
        return max(10 * self.settings.lease_s, 60.0)

    def buffer(self, connection: int) -> ByteArray:
        """This connection's buffer, allocated at the first call."""
        return self.group.buffer(connection)

    def attach(self, connection: int, buffer: ByteArray) -> None:
        """Makes ``buffer`` (a shared-memory mailbox) this connection's."""
        self.group.attach(connection, buffer)

    def receive(self, connection: int, message: Message, now: float) -> Replies:
        """Takes one request; returns all replies that are due now, of any connection."""
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
        """Ends leases, graces and waits that ran out. To be called a few times per second."""
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
        """Numbers for ``/metrics``."""
        group = self.group
        with group.lock:
            workers = group.workers.values()
            commits = sum(w.commits for w in workers)
            stale = sum(w.staleness_sum for w in workers) / max(commits, 1)
            stalest = max((w.staleness_max for w in workers), default=0)
            return [
                Metric("commits", "counter", "Commits applied", commits),
                Metric("rounds", "counter", "Rounds of a blocking rule", self._store.rounds),
                Metric("clock", "counter", "Commits or rounds applied", group.clock),
                Metric("rows", "counter", "Rows committed", sum(w.rows for w in workers)),
                Metric("bytes_in", "counter", "Bytes received in frames", self.bytes_in),
                Metric("bytes_out", "counter", "Bytes sent in frames", self.bytes_out),
                Metric(
                    "workers_alive", "gauge", "Workers that joined and live",
                    sum(w.alive for w in workers),
                ),
                Metric(
                    "workers_finished", "gauge", "Workers that are done",
                    sum(w.finished for w in workers),
                ),
                Metric("waiting", "gauge", "Requests whose reply is deferred", len(group.waits)),
                Metric(
                    "staleness_mean", "gauge", "Mean commits between a pull and its push", stale
                ),
                Metric(
                    "staleness_max", "gauge", "Most commits between a pull and its push", stalest
                ),
                Metric("failed", "gauge", "1 after a worker failed", group.failure is not None),
            ]  # fmt: skip

    def _route(self, connection: int, message: Message) -> Work | None:
        if message.kind in self._store.kinds:
            return self._store.receive(connection, message)
        if message.kind not in self._routes:
            raise ProtocolError(
                "a frame of a kind that this server does not take",
                expected="a request of the coordinator or its store",
                received=message.kind.name,
            )
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
            group.refuse_all(group.failure.worker_error())

    def _status(self, connection: int, message: Message) -> None:
        status = self._reporting.status(
            connection, message, started=self._joining.started, rounds=self._store.rounds
        )
        meta, body = replace(status, bytes_in=self.bytes_in, bytes_out=self.bytes_out).to_wire()
        reply = Message(Kind.OK, meta=meta)
        if body.size:
            reply.total, reply.body = body.size, body
        self.group.answer(connection, reply)

    def _control(self, connection: int, message: Message) -> None:
        self._reporting.control(connection, message, started=self._joining.started)

    def _changes(self, connection: int, message: Message) -> None:
        changes = self._reporting.changes(connection, message)
        if changes is not None:
            self._store.write(changes)
