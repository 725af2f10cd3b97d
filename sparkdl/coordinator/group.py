"""The members of a run over all their attempts, the requests that wait, and their replies.

And what a store is: state that the members share, which plugs into a coordinator.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkdl.coordinator.settings import Settings
from sparkdl.coordinator.telemetry import Telemetry, WorkerStatus
from sparkdl.errors import ProtocolError, SparkDLError, TransportError, WaitTimeoutError
from sparkdl.failures import Failure
from sparkdl.process.host_load import HostLoad
from sparkdl.training.changes import VariableChanges
from sparkdl.training.phases import Usage
from sparkdl.transport import frames
from sparkdl.transport.frames import ByteArray, Flag, FrameKind, FrameLimits, Kind, Message
from sparkdl.transport.service import Buffers, Replies


@dataclass(frozen=True)
class Introduction:
    """A rank's description of itself when it joins.

    Args:
        text: For the other ranks (how they can connect to it).
    """

    rows: int = 0
    batches_per_epoch: int = 0
    host: str = ""
    pid: int = 0
    text: str | None = None


@dataclass
class Worker:
    """One rank over all its attempts.

    ``epoch``, ``batch``, ``rows`` and ``clock`` are *committed* progress, so a retried task
    resumes there. ``member`` says whether the present attempt was let in and takes part.
    """

    rank: int
    attempt: int | None = None
    connection: int | None = None
    superseded: set[int] = field(default_factory=set)
    member: bool = False
    finished: bool = False
    dead: bool = False
    lost_at: float | None = None
    last_seen: float = 0.0
    applied: int = 0
    epoch: int = 0
    batch: int = 0
    rows: int = 0
    batches: int = 0
    commits: int = 0
    clock: int = 0
    pulled_clock: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    said: Introduction = field(default_factory=Introduction)
    usage: Usage | None = None
    load: HostLoad | None = None
    changes_taken: int = 0

    @property
    def alive(self) -> bool:
        """Said HELLO, is neither dead nor finished; a broken connection in grace counts."""
        return self.attempt is not None and not self.dead and not self.finished

    @property
    def reachable(self) -> bool:
        """Alive with an unbroken connection: only such an attempt makes a duplicate wait."""
        return self.alive and self.lost_at is None

    def bind(self, connection: int, message: Message, now: float) -> None:
        """Takes ``connection`` as this rank's, and its attempt as the current one."""
        if self.attempt != message.attempt:
            if self.attempt is not None:
                self.superseded.add(self.attempt)
            self.attempt, self.applied, self.member = message.attempt, 0, False
            self.changes_taken = 0
        self.connection, self.lost_at, self.dead = connection, None, False
        self.last_seen = now

    def refuse_superseded(self, message: Message) -> None:
        """Raises TransportError if another attempt has taken the place of the sender."""
        if message.attempt in self.superseded:
            raise TransportError(
                f"attempt {message.attempt} of rank {message.rank} is superseded",
                expected=f"frames of attempt {self.attempt}",
                received=f"{message.kind.name} of attempt {message.attempt}",
                hint="the task was retried elsewhere; this one can end",
            )

    def advance(self, message: Message) -> None:
        """Takes note of a commit that is applied."""
        self.applied = message.sequence
        self.commits += 1
        self.clock += 1
        self.epoch, self.batch = message.epoch, message.batch
        self.rows += message.rows
        self.batches += message.batches

    def status(self) -> WorkerStatus:
        return WorkerStatus(
            alive=self.alive, attempt=self.attempt, epoch=self.epoch, batch=self.batch,
            batches=self.batches, rows=self.rows, finished=self.finished, clock=self.clock,
            commits=self.commits, batches_per_epoch=self.said.batches_per_epoch,
            host=self.said.host, pid=self.said.pid,
            staleness_mean=self.staleness_sum / max(self.commits, 1),
            staleness_max=self.staleness_max, member=self.member, retries=len(self.superseded),
            usage=self.usage, load=self.load,
        )  # fmt: skip


class RunOrders:
    """The driver's last orders, and what workers are told of them.

    Where workers train in step, every rank must learn of an order at the same step: there orders
    are told only from the next :meth:`latch` on.
    """

    def __init__(self, latched: bool) -> None:
        self._latched = latched
        self._stop, self._learning_rate, self._changes = False, math.nan, 0
        self._told = (False, math.nan)
        self.changes_told = 0
        """How many changes of variables the workers are told to take, since the run began."""
        self.released_epoch = -1

    def take(self, meta: Mapping[str, Any], *, started: bool) -> None:
        """Takes a CONTROL frame's orders."""
        try:
            stop = self._stop or bool(meta.get("stop", False))
            learning_rate = float(meta.get("learning_rate", self._learning_rate))
            released = int(meta.get("release", self.released_epoch))
            changes = int(meta.get("changes", self._changes))
        except (TypeError, ValueError) as error:
            raise ProtocolError(
                "a malformed CONTROL frame",
                expected="stop: a truth value; learning_rate: a number; release: an epoch; "
                "changes: how many there are",
                received=str(error),
            ) from error
        self._stop, self._learning_rate, self._changes = stop, learning_rate, changes
        if not self._latched or "release" in meta or not started:
            self.latch()
        self.released_epoch = max(self.released_epoch, released)

    def latch(self) -> None:
        """From now on workers are told the driver's present orders."""
        self._told = (self._stop, self._learning_rate)
        self.changes_told = self._changes

    def stamp(self, reply: Message) -> None:
        """Writes what workers are told into a reply."""
        stop, reply.learning_rate = self._told
        if stop:
            reply.flags |= Flag.STOP


HelloReason = Literal["start", "gather", "duplicate", "join", "begin"]
WaitReason = HelloReason | Literal["round", "gate", "last", "snapshot", "epoch", "sums", "carried"]


@dataclass
class Wait:
    """A request whose reply is deferred."""

    reason: WaitReason
    message: Message
    since: float


class Group(Buffers):
    """Workers, connections, buffers and deferred replies of one run.

    The coordinator and its store both act on the group: the coordinator lets workers in and out,
    the store answers what they ask of it. Whoever calls a method holds ``lock``.
    """

    def __init__(self, settings: Settings, limits: FrameLimits, orders: RunOrders) -> None:
        super().__init__(limits)
        self.settings, self.orders = settings, orders
        self.telemetry = Telemetry()
        self.workers: dict[int, Worker] = {}
        self.failure: Failure | None = None
        self.started = False
        """Whether the ranks that begin together have begun."""
        self.clock = 0
        self.now = 0.0
        self.on_leave: Callable[[Worker], None] = lambda worker: None
        """Called with each worker that was marked dead, or has finished."""
        self._mailboxes: set[int] = set()
        self.waits: dict[int, Wait] = {}
        """The requests whose reply is deferred, by their connection; read with the lock held."""
        self._outbox: Replies = []

    def attach(self, connection: int, buffer: ByteArray) -> None:
        with self.lock:
            super().attach(connection, buffer)
            self._mailboxes.add(connection)

    def disconnect(self, connection: int) -> None:
        """Forgets a connection; its worker is dead unless it comes back within the grace time."""
        self.waits.pop(connection, None)
        self._buffers.pop(connection, None)
        self._mailboxes.discard(connection)
        for worker in self.workers.values():
            if worker.connection == connection:
                worker.connection = None
                if worker.alive and worker.lost_at is None:
                    worker.lost_at = self.now

    def answer(self, connection: int, reply: Message, worker: Worker | None = None) -> None:
        """Ends the connection's wait with ``reply``."""
        self.waits.pop(connection, None)
        self.answer_beside(connection, reply, worker)

    def answer_beside(self, connection: int, reply: Message, worker: Worker | None) -> None:
        """Replies to a HEARTBEAT, which over HTTP may overtake a request that waits."""
        self.stamp(reply, worker)
        self._outbox.append((connection, reply))

    def refuse(self, connection: int, error: SparkDLError) -> None:
        self.answer(connection, Message(Kind.ERROR, meta=frames.error_to_meta(error)))

    def time_out(
        self, connection: int, what: str, missing: list[int] | list[str], limit_s: float, hint: str
    ) -> None:
        """Ends the connection's wait with an error that names who was missing."""
        names = ", ".join(str(m) for m in missing) or "nobody"
        error = WaitTimeoutError(
            f"waited too long for {what}; missing: {names}",
            expected=f"within {limit_s:g} s",
            received=f"nothing from {names}",
            hint=hint,
        )
        self.refuse(connection, error)

    def defer(self, connection: int, reason: WaitReason, message: Message) -> None:
        """The reply to ``message`` comes later."""
        self.waits[connection] = Wait(reason, message, self.now)

    def waiting(self, *reasons: WaitReason) -> list[tuple[int, Wait]]:
        """Connections whose request waits for one of ``reasons``, by rank and time."""
        found = [(c, w) for c, w in self.waits.items() if w.reason in reasons]
        return sorted(found, key=lambda item: (item[1].message.rank, item[1].since))

    def flush(self) -> Replies:
        """The replies that are due, to be sent now."""
        replies, self._outbox = self._outbox, []
        return replies

    def stamp(self, reply: Message, worker: Worker | None) -> None:
        """Fills what every reply carries: clock, orders, abort, lead."""
        reply.clock = self.clock
        self.orders.stamp(reply)
        if self.failure is not None:
            reply.flags |= Flag.ABORT
        if worker is not None:
            reply.rank = worker.rank
            if worker.changes_taken < self.orders.changes_told:
                reply.meta["changes"] = self.orders.changes_told
            if worker is self._lead(worker):
                reply.flags |= Flag.LEAD

    def _lead(self, alone: Worker) -> Worker:
        """The worker whose state the run keeps: with the most batches, and of these the lowest.

        One with fewer has counted fewer, and has drawn fewer random numbers. One that is done has
        left its state, and no other is to leave one after it.
        """
        found = [w for w in self.workers.values() if w.finished or (w.member and w.alive)]
        return max(found, key=lambda w: (w.said.batches_per_epoch, -w.rank), default=alone)

    def members(self) -> list[Worker]:
        """Workers that take part now, by rank."""
        found = [w for w in self.workers.values() if w.member and w.alive]
        return sorted(found, key=lambda worker: worker.rank)

    def identify(self, connection: int, message: Message) -> Worker:
        """The worker that sent ``message``, bound to this connection.

        Raises:
            ProtocolError: The sender has not said HELLO.
            TransportError: Another attempt has taken the sender's place.
            WorkerError: A rank has failed.
        """
        worker = self.workers.get(message.rank)
        if worker is not None:
            worker.refuse_superseded(message)
        if worker is None or worker.attempt != message.attempt:
            raise ProtocolError(
                f"attempt {message.attempt} of rank {message.rank} sent {message.kind.name} "
                "before HELLO",
                expected="HELLO first",
                received="none of this attempt",
            )
        if self.failure is not None:
            raise self.failure.worker_error()
        self.bind(connection, message, worker)
        return worker

    def bind(self, connection: int, message: Message, worker: Worker) -> None:
        """Makes ``connection`` the worker's; a request over an older one is refused."""
        old = worker.connection
        worker.bind(connection, message, self.now)
        if old is None or old == connection:
            return
        if old not in self._mailboxes:  # over HTTP nobody tells when a connection is gone
            self._buffers.pop(old, None)
        if old in self.waits:
            error = TransportError(
                "this connection was replaced by a newer one",
                expected="requests over one connection of a worker at a time",
                received=f"a newer connection of rank {worker.rank}",
            )
            self.refuse(old, error)

    def mark_dead(self, worker: Worker) -> None:
        """The worker takes no part any more, unless another attempt comes."""
        worker.dead, worker.member = True, False
        self.on_leave(worker)

    def mark_finished(self, worker: Worker) -> None:
        """The worker's work is done, whatever happens to its process from now on."""
        worker.finished, worker.member = True, False
        self.on_leave(worker)

    def fail(self, error: Exception, hint: str) -> SparkDLError:
        """The service's own code, or the user's rule, raised: ends the run for everybody.

        Returns:
            What all ranks are told.
        """
        if self.failure is None:
            described = f"{type(error).__name__}: {error}"
            told = {"error": described, "traceback": traceback.format_exc(), "hint": hint}
            self.failure = Failure.from_wire(told, rank=-1)
        return self.failure.worker_error()


def require_driver(message: Message) -> None:
    """Raises ProtocolError for what only the driver may send, from a worker."""
    if message.rank >= 0:
        raise ProtocolError(
            f"only the driver may send {message.kind.name}", expected="rank -1",
            received=f"rank {message.rank}",
        )  # fmt: skip


@dataclass(frozen=True)
class Work:
    """The part of a request that is done after the lock is given back."""

    run: Callable[[], Message]
    worker: Worker


class Store:
    """State that the ranks share, beside a coordinator; as it stands there is none.

    Each overrides what differs. All methods but :meth:`decoded` are called under the group's lock.
    """

    limits = FrameLimits()
    """The bodies that it takes."""
    kinds: frozenset[FrameKind] = frozenset()
    """The requests that it answers."""
    rounds = 0
    """Rounds that were completed."""
    together = True
    """Whether all ranks begin at the same moment."""
    in_step = True
    """Whether the ranks train in step to the end, so that one that is done ends all."""
    latched = False
    """Whether the driver's orders are told only between two rounds."""

    @property
    def name(self) -> str:
        return "none"

    def attach(self, group: Group) -> None:
        """Called once, before anything else, with the run's group."""
        self._group = group

    def check(self, message: Message) -> None:
        """Refuses a HELLO whose sender does not fit the store."""

    def decoded(self, connection: int, message: Message) -> Message:
        """The request as :meth:`receive` takes it; called without the lock."""
        return message

    def receive(self, connection: int, message: Message) -> Work | None:
        """Answers or defers a request of ``kinds``; returns what is left without the lock."""
        raise NotImplementedError(message.kind.name)

    def enter(self, worker: Worker, *, late: bool) -> str | None:
        """Lets a worker in; None: not yet. ``late``: the others have begun before.

        Returns:
            Where its state comes from, see :class:`~sparkdl.coordinator.session.Welcome`; ``''``
            where the store has none.
        """
        return ""

    def gives_way(self, since: float) -> bool:
        """Whether a live attempt leaves its rank to the next one, which has waited ``since``."""
        return False

    def welcome(self) -> Mapping[str, Any]:
        """More that a worker is told when it joins."""
        return {}

    def leave(self, worker: Worker) -> None:
        """The worker is dead or done."""

    def disconnect(self, connection: int) -> None:
        """The connection is gone."""

    def write(self, changes: VariableChanges) -> None:
        """Takes what the driver's callbacks wrote, as far as the store has those variables."""

    def settle(self) -> None:
        """Answers the deferred requests that can be answered now."""

    def expire(self) -> None:
        """Ends the deferred requests that waited too long."""

    def missing(self) -> list[int]:
        """Ranks that a joiner waits for."""
        return []
