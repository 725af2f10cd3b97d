"""Several requests in flight over one framed TCP connection, the most urgent first.

Each request takes a *lane* of the connection, whose number stands in its header, and its reply
comes over the same lane, in whatever order the server is done. To the service behind it a lane is a
connection like any other: one request at a time, and one buffer. At each end a thread writes what
waits, by priority and then in order, and another one reads.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import select
import socket
import ssl
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from sparkdl.closing import Closing
from sparkdl.errors import AuthenticationError, ProtocolError, SparkDLError, TransportError
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import BROKEN, Timeouts
from sparkdl.transport.dispatcher import Dispatcher
from sparkdl.transport.error_frames import error_from_meta, error_to_meta
from sparkdl.transport.frames import ByteArray, FrameLimits, Kind, Message
from sparkdl.transport.framing import receive_frame, send_frame
from sparkdl.transport.socket import connect_stream
from sparkdl.wire.exact import Stream
from sparkdl.wire.greeting import BusyError
from sparkdl.wire.listening import shut_down

LANES = 16
"""Requests in flight over one connection; each may cost the server one buffer."""
_PIECE_BYTES = 1 << 18


class _TlsBothWays:
    """A TLS connection that one thread reads while another writes: OpenSSL takes one at a time."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        connection.settimeout(0)
        self._connection, self._lock = connection, threading.Lock()

    def recv_into(self, memory: memoryview, /) -> int:
        """Receives some bytes; 0 at the end."""
        while True:
            with self._lock:
                try:
                    return self._connection.recv_into(memory)
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
            self._wait(event)

    def sendall(self, data: bytes | memoryview, /) -> None:
        """Sends all bytes."""
        left = memoryview(data)
        while left:
            with self._lock:
                try:
                    left = left[self._connection.send(left[:_PIECE_BYTES]) :]
                    continue
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
                except ssl.SSLWantReadError:
                    event = select.POLLIN
            self._wait(event)

    def _wait(self, event: int) -> None:
        poller = select.poll()
        poller.register(self._connection, event)
        poller.poll()


def _both_ways(connection: socket.socket) -> Stream:
    if isinstance(connection, ssl.SSLSocket):
        return _TlsBothWays(connection)
    connection.settimeout(None)
    return connection


class LaneServer:
    """The server's end of one connection.

    Args:
        connection: Its peer has shown the token; closed by the caller.
        dispatcher: Where requests go.
    """

    def __init__(self, connection: socket.socket, dispatcher: Dispatcher) -> None:
        self._connection, self._dispatcher = connection, dispatcher
        self._stream = _both_ways(connection)
        self._changed = threading.Condition()
        self._numbers: dict[int, int] = {}  # lane -> the dispatcher's connection
        self._asked: dict[int, int] = {}  # lane -> priority of the request without a reply
        self._leaving: set[int] = set()  # lanes whose reply is on its way out
        self._replies: list[tuple[int, int, Message]] = []  # a heap: -priority, number, reply
        self._numbered = itertools.count()
        self._ended = False

    def serve(self) -> None:
        """Answers request after request, until the peer closes."""
        sender = threading.Thread(target=self._send, name="sparkdl-ps-lanes", daemon=True)
        sender.start()
        try:
            while True:
                message = receive_frame(self._stream, self._dispatcher.limits, self._place)
                number = self._enter(message)
                with self._changed:
                    self._asked[message.lane] = message.priority
                self._dispatcher.post(number, message)
        except ProtocolError as error:  # the stream is out of step: say so and close
            self._put(Message(Kind.ERROR, meta=error_to_meta(error)), 127)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            for number in self._numbers.values():
                self._dispatcher.close(number)
            sender.join(5)
            shut_down(self._connection)
            sender.join()

    def _place(self, message: Message, size: int) -> ByteArray:
        return self._dispatcher.service.buffer(self._enter(message))[:size]

    def _enter(self, message: Message) -> int:
        """The dispatcher's connection of a lane that is free: its buffer is, too.

        Raises:
            ProtocolError: The lane has no reply yet, or there is none of this number.
        """
        lane = message.lane
        with self._changed:
            if lane >= LANES or lane in self._asked:
                raise ProtocolError(
                    f"a {message.kind.name} frame came over a lane that is not free",
                    expected=f"one request at a time on each of {LANES} lanes",
                    received=f"one more on lane {lane}",
                )
            while lane in self._leaving and not self._ended:
                self._changed.wait()
        if lane not in self._numbers:
            self._numbers[lane] = self._dispatcher.open(partial(self._reply, lane), waits=False)
        return self._numbers[lane]

    def _reply(self, lane: int, reply: Message) -> None:
        reply.lane = lane
        with self._changed:
            priority = self._asked.pop(lane)
            self._leaving.add(lane)
        self._put(reply, priority)

    def _put(self, reply: Message, priority: int) -> None:
        with self._changed:
            heapq.heappush(self._replies, (-priority, next(self._numbered), reply))
            self._changed.notify_all()

    def _send(self) -> None:
        limits = self._dispatcher.limits
        while True:
            with self._changed:
                while not (self._replies or self._ended):
                    self._changed.wait()
                if not self._replies:
                    return
                reply = heapq.heappop(self._replies)[2]
            try:
                send_frame(self._stream, reply, limits)
            except ProtocolError as error:  # it cannot be encoded; nothing of it was sent
                said = Message(Kind.ERROR, lane=reply.lane, meta=error_to_meta(error))
                self._put(said, 127)
                continue
            except OSError:
                shut_down(self._connection)  # wakes up the thread that reads
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                return
            with self._changed:
                self._leaving.discard(reply.lane)
                self._changed.notify_all()


@dataclass(order=True)
class _Request:
    """Ordered as they leave."""

    urgency: tuple[int, int]  # -priority, number
    message: Message = field(compare=False)
    into: ByteArray | None = field(compare=False)
    future: Future[Message] = field(compare=False)


class Lanes(Closing):
    """A client's end: requests of any thread do not wait for each other's replies.

    More than :data:`LANES` requests wait here, and the most urgent of them leaves first. A broken
    connection is opened again, and what has no reply yet is sent again: so a request must be one
    that may come twice, and its body stays as it is until the reply has come.

    Args:
        endpoint: Of a server with a framed socket.
        limits: Frames that may travel.
        timeouts: How long to wait for a connection.
        name: Of this client, for messages.

    Raises:
        AuthenticationError: The server refuses the token.
        OSError: It cannot be reached.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        limits: FrameLimits,
        timeouts: Timeouts | None = None,
        *,
        name: str,
    ) -> None:
        self._endpoint, self._limits, self._name = endpoint, limits, name
        self._timeouts = timeouts or Timeouts()
        self._changed = threading.Condition()
        self._waiting: list[_Request] = []  # a heap
        self._numbered = itertools.count()
        self._flying: dict[int, _Request] = {}
        self._closed: SparkDLError | None = None
        self._connection = self._connect()
        self._stream: Stream | None = _both_ways(self._connection)
        self._threads = [
            threading.Thread(target=target, name=f"sparkdl-lanes-{end}", daemon=True)
            for end, target in (("read", self._read), ("write", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def send(
        self, message: Message, body: ByteArray | None = None, *, into: ByteArray | None = None
    ) -> Future[Message]:
        """Sends a request; the future has the reply, or the error that the server answered with.

        Args:
            message: With its priority.
            body: Sent from where it lies.
            into: Where the reply's body is received; None for memory of its own.

        Raises:
            TransportError: This client is closed, or has lost the server for good.
        """
        message.body = body
        urgency = -message.priority, next(self._numbered)
        request = _Request(urgency, message, into, Future())
        request.future.set_running_or_notify_cancel()  # nobody can take it back
        with self._changed:
            if self._closed is not None:
                raise self._closed
            heapq.heappush(self._waiting, request)
            self._changed.notify_all()
        return request.future

    def close(self) -> None:
        """Closes for good; requests without a reply fail."""
        self._fail(
            TransportError(
                f"{self._name} is closed",
                expected="a request before close()",
                received="one after it, or without a reply by then",
            )
        )
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._connection.close()

    # -- the threads -----------------------------------------------------------------------------

    def _write(self) -> None:
        while True:
            with self._changed:
                while self._closed is None and not (
                    self._waiting and self._stream is not None and len(self._flying) < LANES
                ):
                    self._changed.wait()
                if self._closed is not None:
                    return
                request = heapq.heappop(self._waiting)
                stream, connection = self._stream, self._connection
                lane = next(n for n in range(LANES) if n not in self._flying)
                request.message.lane = lane
                self._flying[lane] = request
            assert stream is not None
            try:
                send_frame(stream, request.message, self._limits)
            except ProtocolError as error:  # it cannot be encoded; nothing of it was sent
                self._end(lane, error)
            except OSError:
                shut_down(connection)  # the thread that reads opens another one

    def _read(self) -> None:
        while True:
            with self._changed:
                if self._closed is not None:
                    return
                stream = self._stream
            assert stream is not None
            try:
                reply = receive_frame(stream, self._limits, self._place)
                if reply.lane not in self._flying:
                    raise ProtocolError(
                        f"{self._name} got a reply that nothing asked for",
                        expected=f"lanes {sorted(self._flying)}",
                        received=f"{reply.kind.name} on lane {reply.lane}",
                    )
                self._end(reply.lane, reply)
            except ProtocolError as error:  # out of step
                self._fail(error)
            except BROKEN as error:
                self._open_again(error)

    def _place(self, reply: Message, size: int) -> ByteArray:
        request = self._flying.get(reply.lane)
        if request is None or request.into is None:
            return np.empty(size, np.uint8)
        if request.into.size < size:
            raise ProtocolError(
                f"{self._name} has no room for the reply to {request.message.kind.name}",
                expected=f"at most {request.into.size} bytes",
                received=f"{size} bytes",
            )
        return request.into[:size]

    def _end(self, lane: int, answer: Message | SparkDLError) -> None:
        with self._changed:
            request = self._flying.pop(lane, None)
            self._changed.notify_all()
        if request is None:  # it waits again: the connection broke meanwhile
            return
        if isinstance(answer, Message) and answer.kind is Kind.ERROR:
            answer = error_from_meta(answer.meta)
        if isinstance(answer, Message):
            request.future.set_result(answer)
        else:
            request.future.set_exception(answer)

    # -- the connection --------------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        return connect_stream(self._endpoint, self._limits, self._timeouts.connect_s, lanes=True)

    def _open_again(self, error: Exception) -> None:
        """Puts what has no reply back, and opens another connection within ``reconnect_s``."""
        with self._changed:
            self._stream = None
            for request in self._flying.values():
                heapq.heappush(self._waiting, request)
            self._flying.clear()
        shut_down(self._connection)
        deadline, delay_s = time.monotonic() + self._timeouts.reconnect_s, 0.05
        while self._closed is None:
            try:
                connection = self._connect()
            except AuthenticationError as refused:
                self._fail(refused)
                return
            except (BusyError, *BROKEN) as again:
                error = again
            else:
                with self._changed:
                    self._connection.close()
                    self._connection, self._stream = connection, _both_ways(connection)
                    self._changed.notify_all()
                return
            if time.monotonic() >= deadline:
                self._fail(
                    TransportError(
                        f"{self._name} lost the parameter server",
                        expected="an answer",
                        received=f"{type(error).__name__}: {error}, for "
                        f"{self._timeouts.reconnect_s:g} s",
                        hint="is the driver alive, and reachable from this host?",
                    )
                )
                return
            time.sleep(delay_s * (0.5 + random.random()))
            delay_s = min(2 * delay_s, 1.0)

    def _fail(self, error: SparkDLError) -> None:
        """From now on there is no connection: all that waits ends with ``error``."""
        with self._changed:
            if self._closed is not None:
                return
            self._closed = error
            requests = [*self._flying.values(), *self._waiting]
            self._flying.clear()
            self._waiting.clear()
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            shut_down(self._connection)
        for request in requests:
            request.future.set_exception(error)
