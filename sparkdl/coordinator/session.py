"""A rank's connection to the coordinator of its run."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkdl.coordinator.blobs import chunked, read_blob, read_kept
from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.telemetry import bodies_of, report_message
from sparkdl.failures import Failure
from sparkdl.files.run_state import Blob
from sparkdl.process.closing import Closing
from sparkdl.process.host_load import LoadMeter
from sparkdl.process.log_lines import current_box
from sparkdl.training.changes import VariableChanges
from sparkdl.training.phases import current_clock
from sparkdl.training.reports import EpochReport
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import Connection, Opener, Timeouts
from sparkdl.transport.frames import ByteArray, Flag, FrameKind, FrameLimits, Message
from sparkdl.transport.openers import explained, openers_of

_WAITS = frozenset({CoordinatorKind.HELLO, CoordinatorKind.REPORT})
"""Requests whose time is the wait for other ranks or the driver, not for an exchange."""


@dataclass(frozen=True)
class Welcome:
    """The answer to HELLO: where this rank goes on.

    Args:
        done: This rank's work was finished by another attempt; there is nothing to do.
        batch: Batches of that epoch that are committed already.
        source: Where the weights come from: ``'center'`` (pull), ``'state'`` (a member's weights
            and optimizer state), ``'snapshot'`` (pull: the last snapshot).
        steps_per_epoch: Most batches per epoch of any rank; agreed among ranks that train in step.
        lease_s: Silence after which the coordinator gives this worker up.
        decision: What a store whose values lie on shards has decided; None for others.
        texts: Rank -> the ``text`` that it gave with its HELLO.
    """

    done: bool
    epoch: int
    batch: int
    source: str
    steps_per_epoch: int
    num_workers: int
    lease_s: float
    decision: list[Any] | None = None
    texts: Mapping[int, str] = field(default_factory=dict)


class Session(Closing):
    """One rank's connection to the coordinator. Thread-safe, one request at a time.

    A heartbeat keeps the rank's lease from :meth:`join` or :meth:`meet` on. Closing the session
    of a rank that has not finished marks the rank dead.
    """

    def __init__(
        self,
        opener: Opener,
        limits: FrameLimits | None = None,
        *,
        rank: int,
        attempt: int,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.rank, self.attempt = rank, attempt
        self.limits = FrameLimits() if limits is None else limits
        self.welcome: Welcome | None = None
        self.stopped = False
        self.learning_rate: float | None = None
        self.changes = 0
        """How many changes of variables the driver asks this rank to have taken."""
        self._changes_taken = self._changes_read = 0
        self.clock = 0
        self.lead = False
        self.sequence = 0
        self.bytes_beside: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Bytes that this rank has sent to other servers and received from them."""
        self._clock, self._lines = current_clock(), current_box()
        self._timeouts = timeouts or Timeouts()
        self._opener = opener
        self._connection = Connection(
            opener, self.limits, self._timeouts, buffered=True, name=f"worker {rank}"
        )
        self._connection.open()
        self._heartbeat: threading.Thread | None = None
        self._ended = threading.Event()

    def join(
        self,
        *,
        rows: int = 0,
        batches_per_epoch: int = 0,
        text: str | None = None,
        weights_bytes: int | None = None,
    ) -> Welcome:
        """Joins the run. Waits for ranks that begin together, and for a live attempt of this rank.

        Args:
            text: For the other ranks, in :attr:`Welcome.texts`.
            weights_bytes: Size of this worker's model, which a store refuses if it differs.

        Raises:
            WaitTimeoutError: Some ranks did not come in time; they are named.
        """
        self._period_s = self._timeouts.heartbeat_s or 1.0
        if self._heartbeat is None:
            name = f"sparkdl-ps-heartbeat-{self.rank}"
            self._heartbeat = threading.Thread(target=self._beat, name=name, daemon=True)
            self._heartbeat.start()
        meta: dict[str, Any] = {"rows": rows, "batches_per_epoch": batches_per_epoch}
        meta |= {"host": socket.gethostname(), "pid": os.getpid()}
        if text is not None:
            meta["text"] = text
        if weights_bytes is not None:
            meta["weights_bytes"] = weights_bytes
        reply = self.request(Message(CoordinatorKind.HELLO, meta=meta), deferred=True)
        known = reply.meta
        self.sequence = reply.sequence
        self.welcome = Welcome(
            done=bool(reply.flags & Flag.DONE), epoch=reply.epoch, batch=reply.batch,
            source=str(known["source"]), steps_per_epoch=int(known["steps_per_epoch"]),
            num_workers=int(known["num_workers"]), lease_s=float(known["lease_s"]),
            decision=known.get("decision"),
            texts={int(rank): str(text) for rank, text in known["texts"].items()},
        )  # fmt: skip
        if self._timeouts.heartbeat_s is None:
            self._period_s = min(self.welcome.lease_s / 3, 10.0)
        return self.welcome

    def meet(self, text: str) -> list[str]:
        """Every rank's text in rank order; waits until all ranks that begin together have come.

        Raises:
            WaitTimeoutError: Some ranks did not come in time; they are named.
        """
        texts = self.join(text=text).texts
        return [texts[rank] for rank in sorted(texts)]

    all_gather = meet
    """The name that :class:`sparkdl.training.syncing.RankIdentity` has for it."""

    def finish(self) -> None:
        """Says that this rank's work is done, whatever happens to its process from now on."""
        self.request(Message(CoordinatorKind.FINISH))

    def fail(self, failure: Failure) -> None:
        """Says that this rank failed for good: every other rank's next request raises."""
        self.request(Message(CoordinatorKind.FAIL, meta=failure.to_wire()))

    def close(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        self._connection.close(self._signed(Message(CoordinatorKind.BYE)))
        if self._heartbeat is not None and self._heartbeat is not threading.current_thread():
            self._heartbeat.join(5)

    def report(self, report: EpochReport, *, wait: bool = False) -> None:
        """Sends metrics of an epoch, and what this rank has used so far.

        With ``wait``, returns when the driver releases the epoch.

        Raises:
            ProtocolError: The metric states are larger than a frame can be.
        """
        usage = self._clock.usage(self.bytes_sent, self.bytes_received)
        message = report_message(report, wait=wait, usage=usage)
        self.request(message, 0 if message.body is None else message.body, deferred=wait)

    def keep(self, state: Blob, epoch: int, *, own: bool = False) -> None:
        """Leaves ``state``, of the end of ``epoch`` epochs, for the driver.

        The coordinator keeps the last whole one of the run; what it means is between worker and
        driver. With ``own`` it keeps one of each rank.
        """
        self.send_blob(CoordinatorKind.KEEP, state, epoch, own=own)

    def take_changes(self, count: int) -> list[VariableChanges]:
        """The changes that the driver's callbacks made since the last call. Overwrites ``raw``.

        Args:
            count: How many there are since the run began, at most :attr:`changes` of any rank.
        """
        taken = []
        while self._changes_taken < count:
            content = read_blob(self._changes_at)
            self._changes_taken = self._changes_read
            taken.append(VariableChanges.from_bytes(bytes(content)))
        return taken

    def _changes_at(self, offset: int) -> Message:
        """A chunk of the changes after those taken; of the number that the first chunk names."""
        number = self._changes_read if offset else self._changes_taken + 1
        reply = self.request(Message(CoordinatorKind.TAKE_CHANGES, sequence=number, offset=offset))
        self._changes_read = reply.sequence
        return reply

    def kept(self) -> bytearray:
        """The state that a rank has left last; empty if none has. Overwrites ``raw``."""
        return read_kept(self.request)

    def log(self, lines: list[str]) -> None:
        """Sends lines that this rank printed; the driver shows them."""
        for body in bodies_of(lines):
            self.request(Message(CoordinatorKind.LOG, total=body.size), body)

    @property
    def raw(self) -> ByteArray:
        """The buffer that bodies are sent from and received into.

        With shm it is the mailbox itself; it changes identity after a reconnect, so ask for it
        each time instead of keeping it.
        """
        return self._connection.raw

    @property
    def transport(self) -> str:
        """Name of the transport in use, ``'none'`` while there is no connection."""
        channel = self._connection.channel
        return "none" if channel is None else channel.name

    @property
    def bytes_sent(self) -> int:
        """Bytes of the frames sent so far (over shm their bodies stay in memory)."""
        return self._connection.bytes_sent + self.bytes_beside()[0]

    @property
    def bytes_received(self) -> int:
        """Bytes of the frames received so far."""
        return self._connection.bytes_received + self.bytes_beside()[1]

    def request(
        self, message: Message, body: int | ByteArray = 0, *, deferred: bool = False
    ) -> Message:
        """Sends a frame of this rank and returns the reply; see :meth:`Connection.request`."""
        with self._clock.within("wait" if message.kind in _WAITS else "exchange"):
            reply = self._connection.request(self._signed(message), body, deferred=deferred)
        self.clock = reply.clock
        self.stopped = bool(reply.flags & Flag.STOP)
        self.lead = bool(reply.flags & Flag.LEAD)
        rate = reply.learning_rate
        self.learning_rate = None if math.isnan(rate) else rate
        self.changes = max(self.changes, int(reply.meta.get("changes", 0)))
        return reply

    def send_blob(
        self, kind: FrameKind, blob: Blob, epoch: int, batch: int = 0, *, own: bool = False
    ) -> None:
        """Sends bytes in chunks. Overwrites ``raw``."""
        message = Message(kind, epoch=epoch, batch=batch, meta={"own": True} if own else {})
        for frame, chunk in chunked(message, blob, self.limits.chunk_bytes):
            self.request(frame, chunk)

    def _signed(self, message: Message) -> Message:
        message.rank, message.attempt = self.rank, self.attempt
        return message

    def _beat(self) -> None:
        """Keeps the lease; a server that stays silent wakes up a request that waits for it."""
        timeouts = Timeouts(connect_s=self._timeouts.connect_s, reconnect_s=0.0, reply_s=30.0)
        beats = Connection(self._opener, self.limits, timeouts, buffered=False, name="a heartbeat")
        heard = time.monotonic()
        meter = LoadMeter()
        while self._waited():
            try:
                beats.request(self._signed(self._sign_of_life(meter)))
                heard = time.monotonic()
            except Exception:
                if time.monotonic() - heard > 3 * self._period_s + self._timeouts.reconnect_s:
                    self._connection.abort()
        if len(self._lines):
            with contextlib.suppress(Exception):  # the driver may be gone
                beats.request(self._signed(self._sign_of_life(None)))
        beats.close()

    def _waited(self) -> bool:
        """Waits for the next beat, sooner where lines wait; False when the session ends."""
        due = time.monotonic() + self._period_s
        while not self._ended.wait(min(1.0, max(due - time.monotonic(), 0.0))):
            if len(self._lines) or time.monotonic() >= due:
                return True
        return False

    def _sign_of_life(self, meter: LoadMeter | None) -> Message:
        """A HEARTBEAT, with the host's load where it was looked at, and the lines that wait."""
        meta: dict[str, Any] = {}
        load = None if meter is None else meter.look()
        if load is not None:
            meta["load"] = load.numbers()
        if len(self._lines):
            meta["lines"] = self._lines.take()
        return Message(CoordinatorKind.HEARTBEAT, meta=meta)


def open_session(
    endpoint: Endpoint,
    *,
    rank: int,
    attempt: int = 0,
    mode: str = "auto",
    limits: FrameLimits | None = None,
    timeouts: Timeouts | None = None,
) -> Session:
    """Connects a rank; ``mode='auto'`` tries shm (same host), then socket, then http.

    Raises:
        TransportError: No way leads to the server; says what was tried.
        AuthenticationError: The server refused the token.
    """
    timeouts = timeouts or Timeouts()
    limits = FrameLimits() if limits is None else limits
    openers = openers_of(endpoint, mode, limits, timeouts)
    with explained(openers, timeouts):
        return Session(openers, limits, rank=rank, attempt=attempt, timeouts=timeouts)


def report_failure(
    endpoint: Endpoint,
    rank: int,
    attempt: int,
    error: BaseException,
    limits: FrameLimits | None = None,
) -> None:
    """Tells a run's coordinator that a rank failed for good; silent if it cannot be reached."""
    with (
        contextlib.suppress(Exception),
        open_session(endpoint, rank=rank, attempt=attempt, limits=limits) as session,
    ):
        session.fail(Failure.of(rank, error))
