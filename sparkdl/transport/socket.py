"""Framed TCP: the body is received straight into, and sent straight from, one buffer."""

from __future__ import annotations

import socket

from sparkdl.errors import AuthenticationError
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import require_raw
from sparkdl.transport.error_frames import error_from_meta
from sparkdl.transport.frames import ByteArray, FrameLimits, Kind, Message
from sparkdl.transport.framing import exchange
from sparkdl.wire.listening import shut_down, tune
from sparkdl.wire.tls import connect_encrypted


class SocketChannel:
    """A client's end of a framed TCP connection.

    Args:
        endpoint: Of the server; its host may be an IPv6 literal with or without brackets.
        limits: From the layout.
        raw: Buffer for bodies; None for a control channel.
        timeout_s: For connecting and the first frame.

    Raises:
        AuthenticationError: The server closed at the sight of the token, or is another one.
        BusyError: The server has no room now.
        OSError: The server cannot be reached.
    """

    name = "socket"

    def __init__(
        self,
        endpoint: Endpoint,
        limits: FrameLimits,
        raw: ByteArray | None,
        timeout_s: float,
    ) -> None:
        self._limits = limits
        self._raw = raw
        self._socket = connect_stream(endpoint, limits, timeout_s)

    @property
    def raw(self) -> ByteArray | None:
        return self._raw

    def request(self, message: Message, timeout_s: float | None) -> Message:
        self._socket.settimeout(timeout_s)
        return exchange(self._socket, message, self._limits, lambda: require_raw(self._raw))

    def abort(self) -> None:
        shut_down(self._socket)

    def close(self) -> None:
        self._socket.close()


def connect_stream(
    endpoint: Endpoint, limits: FrameLimits, timeout_s: float, **meta: bool
) -> socket.socket:
    """A framed TCP connection whose server has accepted the token; errors as ``SocketChannel``."""
    address = endpoint.address
    connection = socket.create_connection((address.host.strip("[]"), address.port), timeout_s)
    try:
        tune(connection)
        if endpoint.fingerprint:
            connection = connect_encrypted(connection, endpoint.token, endpoint.fingerprint)
        open_stream(connection, endpoint.token, limits, **meta)
    except BaseException:
        connection.close()
        raise
    return connection


def open_stream(connection: socket.socket, token: str, limits: FrameLimits, **meta: bool) -> None:
    """Sends OPEN; returns when the server has accepted the token.

    Raises:
        AuthenticationError: It closed instead.
        BusyError: It has no room now; another try may find some.
        OSError: The connection broke.
    """
    opening = Message(Kind.OPEN, meta={"token": token, **meta})
    try:
        reply = exchange(connection, opening, limits, lambda: require_raw(None))
    except EOFError as error:
        raise AuthenticationError(
            "the parameter server closed the connection at the sight of the token",
            expected="the token of this run",
            received="another one, or a server that is going down",
            hint="workers of an earlier run cannot join a later one",
        ) from error
    if reply.kind is Kind.ERROR:
        raise error_from_meta(reply.meta)
