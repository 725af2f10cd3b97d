"""The proof that a connection must show first without TLS: a frame or a request with the token.

Each is a :class:`sparkdl.wire.greeting.Stranger`: it takes a few kilobytes at most, and never
waits.
"""

from __future__ import annotations

import contextlib
import socket
import time

from sparkdl.errors import AuthenticationError, ProtocolError
from sparkdl.transport.frames import (
    HEADER_BYTES,
    MAX_FIRST_META_BYTES,
    FrameLimits,
    Kind,
    Message,
    decode_header,
    decode_meta,
    encode,
    error_to_meta,
)
from sparkdl.wire.greeting import hear_bytes, no_room
from sparkdl.wire.listening import token_matches
from sparkdl.wire.proving import BUSY, IncomingProof
from sparkdl.wire.tls import KNOCK, first_knock

FIRST_HEADERS_BYTES = 4 << 10
"""Most bytes of the head of an HTTP client's first request; proxies may have added some."""
FIRST_FRAME = FrameLimits(blob_bytes=0, max_meta_bytes=MAX_FIRST_META_BYTES)
"""The limits of a first frame."""
_HTTP_REFUSAL = (
    b"HTTP/1.1 401 Unauthorized\r\nContent-Type: text/plain\r\nContent-Length: 15\r\n"
    b"Connection: close\r\n\r\na wrong token.\n"
)
_HTTP_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 9\r\n"
    b"Connection: close\r\n\r\nno room.\n"
)
_OPEN_TO_ALL = ("/health", "/metrics")
OPEN_PER_SECOND = 20.0
"""Requests for what is open to all that are served: enough for a few monitors."""


class FirstFrame:
    """A connection whose first frame must be OPEN with the token."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection = connection
        self.opening: Message | None = None
        self._token = token
        self._data = bytearray()
        self._wanted = HEADER_BYTES

    def hear(self) -> bool:
        """Reads what has come; True once the frame is whole and has the token.

        Raises:
            OSError, EOFError: The peer is gone.
            ProtocolError: These bytes are no first frame.
            AuthenticationError: It has another token, or none.
        """
        if not hear_bytes(self.connection, self._data, self._wanted):
            return False
        if self.opening is None:
            self.opening, meta_size, body_size = decode_header(self._data, FIRST_FRAME.kinds)
            FIRST_FRAME.check(self.opening, meta_size, body_size)
            self._wanted += meta_size
            if not hear_bytes(self.connection, self._data, self._wanted):
                return False
        opening = self.opening
        opening.meta = decode_meta(opening.kind, self._data[HEADER_BYTES:])
        require_token(opening, self._token)
        return True

    def turn_away(self) -> None:
        """Says that there is no room, if the peer's end takes it at once."""
        self.connection.send(encode(Message(Kind.ERROR, meta=error_to_meta(no_room()))))


class Allowance:
    """A limit on requests per second, with as many at once after a pause; for one thread."""

    def __init__(self, per_second: float) -> None:
        self._per_second = self._left = per_second
        self._seen = time.monotonic()

    def take(self) -> bool:
        """Whether one more is allowed now."""
        now = time.monotonic()
        grown = self._left + (now - self._seen) * self._per_second
        self._left, self._seen = min(self._per_second, grown), now
        allowed = self._left >= 1
        self._left -= allowed
        return allowed


class FirstRequest:
    """A connection whose first request must have the token, or ask for what is open to all.

    The request stays in the socket, for the HTTP server to read. Where the server is encrypted,
    members knock instead, and only what is open to all is served without TLS.
    """

    def __init__(
        self, connection: socket.socket, token: str, encrypted: bool, allowance: Allowance
    ) -> None:
        self.connection = connection
        self._token, self._encrypted, self._allowance = token, encrypted, allowance
        self._knock: IncomingProof | None = None

    @property
    def knocks(self) -> bool:
        """Whether the peer has knocked: it means to begin TLS, and its words are read."""
        return self._knock is not None

    def hear(self) -> bool:
        """Looks at what has come; True once the headers, or the proof of a knock, are there.

        Raises:
            EOFError: The peer is gone.
            ProtocolError: The headers are too large.
            AuthenticationError: There is no token, or another one; the peer has been told, unless
                it knocks.
            TransportError: There were many requests for what is open to all; it has been told.
        """
        if self._knock is not None:
            return self._knock.hear()
        try:
            seen = self.connection.recv(FIRST_HEADERS_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        if not seen:
            raise EOFError("the peer closed the connection")
        if self._encrypted and KNOCK.startswith(seen[: len(KNOCK)]):
            self._knock = first_knock(self.connection, self._token)
            return self._knock.hear()
        head, end, _ = seen.partition(b"\r\n\r\n")
        if not end:
            if len(seen) < FIRST_HEADERS_BYTES:
                return False
            raise ProtocolError(
                "the headers of a first request are too large",
                expected=f"at most {FIRST_HEADERS_BYTES} bytes",
                received=f"{len(seen)} bytes without an end",
            )
        request, *lines = head.decode("latin-1").split("\r\n")
        fields = {
            name.strip().lower(): value for name, _, value in (x.partition(":") for x in lines)
        }
        method, _, path = request.partition(" ")
        open_to_all = method == "GET" and path.split(" ")[0] in _OPEN_TO_ALL
        shown = fields.get("authorization", "")
        known = not self._encrypted and has_token(shown, self._token)
        if not open_to_all and not known:
            self.connection.recv(FIRST_HEADERS_BYTES)
            self.connection.send(_HTTP_REFUSAL)
            raise AuthenticationError(
                "a wrong or missing bearer token", expected="the token of this run",
                received="another one, or none",
            )  # fmt: skip
        if not known and not self._allowance.take():
            self.connection.recv(FIRST_HEADERS_BYTES)
            self.connection.send(_HTTP_BUSY)
            raise no_room()
        return True

    def turn_away(self) -> None:
        """Says that there is no room, if the peer's end takes it at once."""
        with contextlib.suppress(BlockingIOError):  # what is unread would reset the connection
            self.connection.recv(FIRST_HEADERS_BYTES)
        self.connection.send(BUSY if self._encrypted else _HTTP_BUSY)


def require_token(opening: Message, token: str) -> None:
    """Returns if a first frame is OPEN with the token."""
    if opening.kind is not Kind.OPEN or not token_matches(opening.meta.get("token"), token):
        raise AuthenticationError(
            "a connection without the run's token", expected="OPEN with the token",
            received=opening.kind.name,
        )  # fmt: skip


def has_token(authorization: str, token: str) -> bool:
    """Whether an ``Authorization`` header is the bearer of the run's token."""
    scheme, _, shown = authorization.strip().partition(" ")
    return scheme.lower() == "bearer" and token_matches(shown.strip(), token)
