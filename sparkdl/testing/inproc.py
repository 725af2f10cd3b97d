"""Same process: for tests, and for a world of one. Frames are encoded all the same."""

from __future__ import annotations

import threading

from sparkdl.errors import AuthenticationError
from sparkdl.transport.channel import deliver_body
from sparkdl.transport.dispatcher import Dispatcher
from sparkdl.transport.frames import (
    HEADER_BYTES,
    ByteArray,
    Limits,
    Message,
    decode_header,
    decode_meta,
    encode,
)
from sparkdl.transport.listening import token_matches


class InprocChannel:
    """A client's end of a connection to a dispatcher in this process.

    The client's buffer is the server's buffer of this connection, so nothing is copied twice.
    """

    name = "inproc"

    def __init__(
        self,
        dispatcher: Dispatcher,
        received_token: str,
        token: str,
        limits: Limits,
        raw: ByteArray | None,
    ) -> None:
        if not token_matches(received_token, token):
            raise AuthenticationError("a wrong token", expected="the token of this run")
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
        frame = encode(message, max_meta_bytes=self._limits.max_meta_bytes)
        received, meta_len, body_len = decode_header(frame[:HEADER_BYTES])
        self._dispatcher.limits.check(received, meta_len, body_len)
        received.meta = decode_meta(received.kind, frame[HEADER_BYTES:])
        received.body = message.body
        if self._aborted.is_set():
            raise ConnectionResetError("the connection was aborted")
        reply = self._dispatcher.call(self._number, received, lambda: not self._aborted.is_set())
        if reply is None:
            raise ConnectionResetError("the server ended")
        if reply.body_bytes and self._raw is not None:
            deliver_body(reply, self._raw)
        return reply

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        self._aborted.set()
        self._dispatcher.close(self._number)
