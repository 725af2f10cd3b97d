"""A client's end of HTTP. Needs only the standard library: executors have no Flask."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from sparkdl.errors import AuthenticationError, ProtocolError
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import require_raw
from sparkdl.transport.frames import (
    HEADER_BYTES,
    ByteArray,
    FrameKind,
    FrameLimits,
    Message,
    decode_header,
    decode_meta,
    encode,
)
from sparkdl.wire.listening import shut_down, tune
from sparkdl.wire.tls import connect_encrypted

FRAME_PATH = "/v1/frame"
CLIENT_HEADER = "X-Sparkdl-Client"
BUSY = 409
"""Status: an earlier request of this client, over a connection that broke, has not ended yet."""
TIMED_OUT = 408
"""Status: the server, or a proxy, has ended a silent connection; the request was not read."""
Reader = Callable[[memoryview], None]


def read_head(read: Reader, limits: FrameLimits) -> tuple[Message, int, int]:
    """Reads and checks a header; returns the message, the meta's size and the body's."""
    head = bytearray(HEADER_BYTES)
    read(memoryview(head))
    message, meta_len, body_len = decode_header(head, limits.kinds)
    limits.check(message, meta_len, body_len)
    return message, meta_len, body_len


def read_meta(read: Reader, kind: FrameKind, meta_len: int) -> dict[str, Any]:
    """Reads the meta that follows a header."""
    meta = bytearray(meta_len)
    read(memoryview(meta))
    return decode_meta(kind, meta)


class HttpChannel:
    """A client's end: one keep-alive connection, bodies sent from and read into one buffer."""

    name = "http"

    def __init__(
        self,
        endpoint: Endpoint,
        limits: FrameLimits,
        raw: ByteArray | None,
        timeout_s: float,
        client: str,
    ) -> None:
        parts = urlsplit(endpoint.address.http)
        self._limits = limits
        self.raw = raw
        self._headers = (
            ("Authorization", f"Bearer {endpoint.token}"),
            (CLIENT_HEADER, client),
            ("Content-Type", "application/octet-stream"),
        )
        self._http = http.client.HTTPConnection(
            parts.hostname or "", parts.port or 80, timeout=timeout_s
        )
        self._http.connect()
        tune(self._http.sock)
        if endpoint.fingerprint:
            self._http.sock = connect_encrypted(
                self._http.sock, endpoint.token, endpoint.fingerprint
            )

    def request(self, message: Message, timeout_s: float | None) -> Message:
        connection = self._http
        if connection.sock is None:
            raise ConnectionResetError("the connection was closed")
        connection.sock.settimeout(timeout_s)
        head = encode(message, max_meta_bytes=self._limits.max_meta_bytes)
        body = message.body
        connection.putrequest("POST", FRAME_PATH, skip_accept_encoding=True)
        for name, value in self._headers:
            connection.putheader(name, value)
        length = len(head) + (0 if body is None else body.nbytes)
        connection.putheader("Content-Length", str(length))
        try:
            connection.endheaders(head)
            if body is not None:
                connection.send(body.data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server may have refused early: its answer says why
        try:
            return self._receive(connection.getresponse())
        except http.client.HTTPException as error:
            connection.close()
            raise ConnectionResetError(f"no HTTP response: {error!r}") from error

    def _receive(self, response: http.client.HTTPResponse) -> Message:
        if response.status != 200:
            text = response.read(4096).decode(errors="replace").strip()
            self._http.close()
            if response.status == 401:
                raise AuthenticationError(
                    "the parameter server refused the token", expected="the token of this run",
                    received=text,
                )  # fmt: skip
            if response.status >= 500 or response.status in (BUSY, TIMED_OUT):
                raise ConnectionResetError(f"HTTP {response.status}: {text}")
            raise ProtocolError(
                f"the parameter server answered HTTP {response.status}", expected="HTTP 200",
                received=text,
            )  # fmt: skip

        def read(view: memoryview) -> None:
            position = 0
            while position < len(view):
                count = response.readinto(view[position:])
                if not count:
                    raise EOFError("the response ended early")
                position += count

        reply, meta_len, body_len = read_head(read, self._limits)
        reply.meta = read_meta(read, reply.kind, meta_len)
        if body_len:
            reply.body = require_raw(self.raw)[:body_len]
            read(reply.body.data)
        response.close()
        return reply

    def abort(self) -> None:
        sock = self._http.sock
        if sock is not None:
            shut_down(sock)

    def close(self) -> None:
        self._http.close()
