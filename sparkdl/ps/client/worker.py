"""A worker's end of the parameter server."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from sparkdl.errors import ProtocolError, WorkerError
from sparkdl.ps.client.coder import Coder
from sparkdl.ps.client.records import Progress, Welcome
from sparkdl.ps.codecs import Compression
from sparkdl.transport.address import Address
from sparkdl.transport.connection import Link, Opener, Timeouts, explained, openers_of
from sparkdl.transport.frames import ByteArray, Flag, Kind, Limits, Message
from sparkdl.weights import FloatArray, Layout


class Client:
    """One worker's connection. Made by :func:`connect`. Thread-safe, one request at a time.

    ``buffer`` is the layout's size: a push sends what it holds, a pull replaces what it holds.
    With shm it is the mailbox itself; it changes identity after a reconnect, so ask for it each
    time instead of keeping it.
    """

    def __init__(
        self,
        opener: Opener,
        limits: Limits,
        *,
        rank: int,
        attempt: int,
        timeouts: Timeouts | None = None,
        compression: Compression | None = None,
    ) -> None:
        self.rank, self.attempt = rank, attempt
        self._coder: Coder | None = None
        self.welcome: Welcome | None = None
        self.stopped = False
        self.aborted = False
        self.learning_rate: float | None = None
        self.clock = 0
        self.lead = False
        self.upload_requested = False
        self.round_rows = 0
        self._limits = limits
        self._timeouts = timeouts or Timeouts()
        self._opener = opener
        self._sequence = 0
        self._link = Link(opener, limits, self._timeouts, buffered=True, name=f"worker {rank}")
        self._link.open()
        if compression is not None and (
            self.transport != "shm" or compression.codec.shapes_training
        ):
            self._coder = Coder(compression, rank, attempt)
        self._pulse: threading.Thread | None = None
        self._ended = threading.Event()

    # ---------------------------------------------------------------- properties

    @property
    def transport(self) -> str:
        """Name of the transport in use: ``'shm'``, ``'socket'``, ``'http'`` or ``'inproc'``."""
        channel = self._link.channel
        return "none" if channel is None else channel.name

    @property
    def bytes_sent(self) -> int:
        """Bytes of the frames sent so far (over shm their bodies stay in memory)."""
        return self._link.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of the frames received so far."""
        return self._link.bytes_received

    @property
    def residual(self) -> FloatArray | None:
        """What a codec still has to send of the trained segment; None where nothing is kept."""
        return None if self._coder is None else self._coder.residual

    @property
    def buffer(self) -> FloatArray:
        """The float32 buffer that pushes send and pulls fill."""
        return self._limits.weights(self._link.raw)

    # ---------------------------------------------------------------- joining and leaving

    def hello(self, *, rows: int = 0, batches_per_epoch: int = 0, **info: Any) -> Welcome:
        """Joins. Waits for all workers in blocking rules, and for a live attempt of this rank.

        Args:
            rows: Rows in this worker's partition.
            batches_per_epoch: Batches it makes of them.
            **info: More to tell (JSON-able); a ``text`` comes to all that are welcomed later.
        """
        self._start_heartbeat(self._timeouts.heartbeat_s or 1.0)
        meta = {
            "weights_bytes": self._limits.weights_bytes,
            "rows": rows,
            "batches_per_epoch": batches_per_epoch,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **info,
        }
        reply = self._request(Message(Kind.HELLO, meta=meta), deferred=True)
        known = reply.meta
        self._sequence = reply.sequence
        self.welcome = Welcome(
            done=bool(reply.flags & Flag.DONE),
            epoch=reply.epoch,
            batch=reply.batch,
            source=str(known["source"]),
            steps_per_epoch=int(known["steps_per_epoch"]),
            num_workers=int(known["num_workers"]),
            clock=reply.clock,
            worker_clock=int(known["worker_clock"]),
            rows=reply.rows,
            lease_s=float(known["lease_s"]),
            blocking=bool(known["blocking"]),
            texts={int(rank): str(text) for rank, text in known.get("texts", {}).items()},
        )
        if self._timeouts.heartbeat_s is None:
            self._period_s = min(self.welcome.lease_s / 3, 10.0)
        return self.welcome

    def finish(self) -> None:
        """Says that this rank's work is done, whatever happens to its process from now on."""
        self._request(Message(Kind.FINISH))

    def fail(self, error: str, traceback: str = "") -> None:
        """Says that this rank failed for good: every other rank's next request raises."""
        meta = {"error": error[:10_000], "traceback": traceback[-100_000:]}
        self._request(Message(Kind.FAIL, meta=meta))

    def close(self) -> None:
        """Closes the connection and ends the heartbeat; a rank that did not finish is dead."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._link.close(self._signed(Message(Kind.BYE)))
        if self._pulse is not None and self._pulse is not threading.current_thread():
            self._pulse.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- the verbs

    def pull(self) -> FloatArray:
        """Fills ``buffer`` with the center, and returns it."""
        message = Message(Kind.PULL)
        self._ask_encoded(message)
        self._decode(self._request(message))
        return self.buffer

    def push(self, progress: Progress) -> None:
        """Commits what ``buffer`` holds; its content is undefined afterwards."""
        self._commit(Kind.PUSH, progress)

    def push_pull(self, progress: Progress) -> FloatArray:
        """Commits what ``buffer`` holds, and fills it with what the server answers.

        That is the center, or, for a blocking rule on gradients, the mean gradient of the round;
        ``round_rows`` are then the rows of all ranks (0: nothing to apply).
        """
        self._commit(Kind.PUSH_PULL, progress)
        return self.buffer

    def report(
        self, meta: Mapping[str, Any], *, wait: bool = False, batch: int = 0, rows: int = 0
    ) -> None:
        """Sends telemetry; with ``wait``, returns when the driver releases ``meta['epoch']``.

        Args:
            meta: What is new.
            wait: See above.
            batch: Batches of the epoch done, from a worker that commits nothing.
            rows: Rows trained in all, from a worker that commits nothing.
        """
        flags = Flag.WAIT if wait else Flag.NONE
        epoch = int(meta.get("epoch", 0))
        message = Message(
            Kind.REPORT, flags=flags, epoch=epoch, batch=batch, rows=rows, meta=dict(meta)
        )
        self._request(message, deferred=wait)

    def snapshot(self, epoch: int, batch: int = 0) -> None:
        """Stores ``buffer`` (weights) as the center; for blocking rules on gradients."""
        self._request(Message(Kind.SNAPSHOT, epoch=epoch, batch=batch), self._limits.weights_bytes)

    def put_state(self, state: bytes, epoch: int, batch: int) -> None:
        """Uploads weights and optimizer state for a joiner. Overwrites ``buffer``."""
        self._upload(state, epoch, batch, {})
        self.upload_requested = False

    def keep_state(self, state: bytes, epoch: int) -> None:
        """Leaves ``state``, of the end of ``epoch`` epochs, for the driver. Overwrites ``buffer``.

        The server keeps the last whole one; what it means is between worker and driver.
        """
        self._upload(state, epoch, 0, {"keep": True})

    def _upload(self, state: bytes, epoch: int, batch: int, info: dict[str, Any]) -> None:
        source = np.frombuffer(state, np.uint8)
        for offset in range(0, source.size, self._limits.buffer_bytes):
            chunk = source[offset : offset + self._limits.buffer_bytes]
            self._link.raw[: chunk.size] = chunk
            meta = {"offset": offset, "total": source.size, **info}
            self._request(Message(Kind.STATE_PUT, epoch=epoch, batch=batch, meta=meta), chunk.size)

    def get_state(self) -> bytes:
        """What a live rank put for this joiner. Overwrites ``buffer``."""
        state = bytearray()
        total = 1
        while len(state) < total:
            reply = self._request(Message(Kind.STATE_GET, meta={"offset": len(state)}))
            if reply.body is None or not reply.body.size:
                raise ProtocolError("the server sent an empty chunk of state")
            total = int(reply.meta["total"])
            state += reply.body.data
        return bytes(state)

    # ---------------------------------------------------------------- inside

    def _commit(self, kind: Kind, progress: Progress) -> None:
        self._sequence += 1
        message = Message(
            kind,
            sequence=self._sequence,
            epoch=progress.epoch,
            batch=progress.batch,
            batches=progress.batches,
            rows=progress.rows,
            learning_rate=progress.learning_rate,
            meta=dict(progress.meta or {}),
        )
        body: int | ByteArray = self._limits.weights_bytes
        if self._coder is not None:
            body = self._coder.encode(self.buffer, progress.rows)
            self._ask_encoded(message)
        reply = self._request(message, body, deferred=True)
        self._decode(reply)
        self.round_rows = reply.rows
        self.upload_requested = bool(reply.flags & Flag.UPLOAD)

    def _ask_encoded(self, message: Message) -> None:
        """Marks a request as one whose reply may be encoded, from what this worker holds."""
        if self._coder is not None:
            message.flags |= Flag.ENCODED
            message.meta["held"] = self._coder.version

    def _decode(self, reply: Message) -> None:
        if self._coder is not None and reply.kind is Kind.WEIGHTS:
            self._coder.decode(reply, self.buffer)

    def _signed(self, message: Message) -> Message:
        message.rank, message.attempt = self.rank, self.attempt
        return message

    def _request(
        self, message: Message, body: int | ByteArray = 0, *, deferred: bool = False
    ) -> Message:
        try:
            reply = self._link.request(self._signed(message), body, deferred=deferred)
        except WorkerError:
            self.aborted = True
            raise
        self._note(reply)
        return reply

    def _note(self, reply: Message) -> None:
        self.clock = reply.clock
        self.stopped = bool(reply.flags & Flag.STOP)
        self.aborted = bool(reply.flags & Flag.ABORT)
        self.lead = bool(reply.flags & Flag.LEAD)
        self.learning_rate = None if math.isnan(reply.learning_rate) else reply.learning_rate

    def _start_heartbeat(self, period_s: float) -> None:
        self._period_s = period_s
        if self._pulse is None:
            self._pulse = threading.Thread(
                target=self._beat, name=f"sparkdl-ps-heartbeat-{self.rank}", daemon=True
            )
            self._pulse.start()

    def _beat(self) -> None:
        """Keeps the lease; a server that stays silent wakes up a request that waits for it."""
        timeouts = Timeouts(connect_s=self._timeouts.connect_s, reconnect_s=0.0, reply_s=30.0)
        link = Link(self._opener, self._limits, timeouts, buffered=False, name="a heartbeat")
        heard = time.monotonic()
        while not self._ended.wait(self._period_s):
            try:
                if link.like is not self._link.channel:
                    link.reset(self._link.channel)
                link.request(self._signed(Message(Kind.HEARTBEAT)))
                heard = time.monotonic()
            except Exception:
                if time.monotonic() - heard > 3 * self._period_s + self._timeouts.reconnect_s:
                    self._link.abort()
        link.close()


def connect(
    address: Address,
    token: str,
    mode: str = "auto",
    *,
    rank: int,
    attempt: int = 0,
    layout: Layout,
    timeouts: Timeouts | None = None,
    compression: Compression | None = None,
) -> Client:
    """Connects a worker; ``mode='auto'`` tries shm (same host), then socket, then http.

    Args:
        address: Of the server.
        token: The run's secret.
        mode: ``'auto'``, ``'shm'``, ``'socket'`` or ``'http'``.
        rank: The worker's rank.
        attempt: A number that no other attempt of this rank has.
        layout: Of the flat buffer; the server refuses another size.
        timeouts: How long to wait.
        compression: The server's. Over shm, where nothing crosses a network, bodies travel as they
            are, unless the codec does more than save bytes.

    Raises:
        TransportError: No way leads to the server; says what was tried.
        AuthenticationError: The server refused the token.
    """
    t = timeouts or Timeouts()
    limits = Limits.of(layout, encoded_bytes=0 if compression is None else compression.max_bytes)
    openers = openers_of(address, token, mode, limits, t)
    with explained(openers, t):
        return Client(
            openers, limits, rank=rank, attempt=attempt, timeouts=t, compression=compression
        )
