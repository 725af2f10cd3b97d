"""Servers in this process, without sockets: for tests. Frames are encoded all the same."""

from __future__ import annotations

import threading

from sparkdl.coordinator.driver_client import DriverClient
from sparkdl.coordinator.session import Session
from sparkdl.errors import AuthenticationError
from sparkdl.process.closing import Closing
from sparkdl.ps.client import Client
from sparkdl.ps.kinds import limits_of
from sparkdl.ps.server import ServerConfig
from sparkdl.transport.connection import Opener, Timeouts, deliver_body
from sparkdl.transport.frames import (
    HEADER_BYTES,
    ByteArray,
    FrameLimits,
    Message,
    decode_header,
    decode_meta,
    encode,
)
from sparkdl.transport.service import Dispatcher, Service
from sparkdl.weights import FloatArray, Layout
from sparkdl.wire.listening import token_matches

TOKEN = "in this process"


class InprocChannel:
    """A client's end of a connection to a dispatcher in this process.

    The client's buffer is the server's buffer of this connection, so nothing is copied twice.
    """

    name = "inproc"

    def __init__(self, dispatcher: Dispatcher, limits: FrameLimits, raw: ByteArray | None) -> None:
        self._dispatcher = dispatcher
        self._limits = limits
        self._raw = raw
        self._aborted = threading.Event()
        self._number = dispatcher.open()
        if raw is not None:
            dispatcher.service.attach(self._number, raw)

    @property
    def raw(self) -> ByteArray | None:
        return self._raw

    def request(self, message: Message, timeout_s: float | None) -> Message:
        received = _carried(message, self._dispatcher.limits)
        if self._aborted.is_set():
            raise ConnectionResetError("the connection was aborted")
        reply = self._dispatcher.call(self._number, received, lambda: not self._aborted.is_set())
        if reply is None:
            raise ConnectionResetError("the server ended")
        reply = _carried(reply, self._limits)
        if reply.body_bytes and self._raw is not None:
            deliver_body(reply, self._raw)
        return reply

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        self._aborted.set()
        self._dispatcher.close(self._number)


def _carried(message: Message, limits: FrameLimits) -> Message:
    """The message that a receiver gets: encoded and decoded again; its body stays in place."""
    frame = encode(message, max_meta_bytes=limits.max_meta_bytes)
    received, meta_size, body_size = decode_header(frame[:HEADER_BYTES], limits.kinds)
    limits.check(received, meta_size, body_size)
    received.meta = decode_meta(received.kind, frame[HEADER_BYTES:])
    received.body, received.reading = message.body, message.reading
    return received


class InprocServer(Closing):
    """A service with a dispatcher and no listening socket."""

    def __init__(self, service: Service, token: str = TOKEN) -> None:
        self._token = token
        self.dispatcher = Dispatcher(service)

    def opener(self, token: str | None = None) -> Opener:
        """Opens connections with ``token``; None for the right one.

        Raises (the opener):
            AuthenticationError: The token is another one.
        """
        shown = self._token if token is None else token

        def open_channel(raw: ByteArray | None) -> InprocChannel:
            if not token_matches(shown, self._token):
                raise AuthenticationError(
                    "a wrong token", expected="the token of this run", received="another one"
                )
            return InprocChannel(self.dispatcher, self.dispatcher.limits, raw)

        return open_channel

    def session(self, rank: int, attempt: int = 0, timeouts: Timeouts | None = None) -> Session:
        """A rank's session."""
        limits = self.dispatcher.limits
        return Session(self.opener(), limits, rank=rank, attempt=attempt, timeouts=timeouts)

    def driver(self) -> DriverClient:
        """The driver's connection."""
        return DriverClient(self.opener(), self.dispatcher.limits)

    def close(self) -> None:
        """Ends all waits."""
        self.dispatcher.shutdown()


class InprocParameterServer(InprocServer):
    """A coordinator with a parameter store, without a process and without sockets.

    Args:
        center: Initial weights; taken over, not copied.
    """

    def __init__(self, config: ServerConfig, center: FloatArray) -> None:
        self.config, self.center = config, center
        self.coordinator = config.coordinator(center)
        super().__init__(self.coordinator, config.token)

    def client(
        self,
        rank: int = 0,
        attempt: int = 0,
        *,
        token: str | None = None,
        layout: Layout | None = None,
        timeouts: Timeouts | None = None,
    ) -> Client:
        """A worker's client, with the configuration's compression."""
        compression = self.config.compression()
        limits = limits_of(self.config.layout if layout is None else layout, compression)
        session = Session(self.opener(token), limits, rank=rank, attempt=attempt, timeouts=timeouts)
        return Client(session, compression)
