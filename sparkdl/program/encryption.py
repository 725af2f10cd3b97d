"""TLS on a connection between nodes of two hosts, on which one thread reads while others send."""

from __future__ import annotations

import hmac
import socket
import ssl
import threading
from typing import Protocol

from sparkdl.errors import AuthenticationError
from sparkdl.wire.tls import Certificate

_CHUNK_BYTES = 1 << 18
_MAX_NAME_BYTES = 255


class Stream(Protocol):
    """What messages need of a connection: a socket has it, and so has :class:`EncryptedStream`."""

    def sendall(self, data: bytes | memoryview, /) -> None:
        """Sends all bytes."""

    def recv_into(self, memory: memoryview, /) -> int:
        """Receives some bytes; 0 at the end."""

    def settimeout(self, timeout_s: float | None, /) -> None:
        """The longest wait of a call from now on."""

    def shutdown(self, how: int, /) -> None:
        """Ends both directions."""

    def close(self) -> None:
        """Frees the connection."""


class EncryptedStream:
    """A TLS connection; any thread may send, one receives.

    Both ends show the run's certificate and check the other's. So that nobody between two hosts
    can join a caller with another node, both name the address that is called, in TLS' own
    negotiation (ALPN). The state of OpenSSL is behind a lock, because a Python socket's is not.

    Args:
        connection: A connected socket with a timeout, owned from now on.
        certificate: The run's.
        name: The address that is called, at most 255 bytes.
        is_server: Which end this is.

    Raises:
        AuthenticationError: The other end has another certificate, or was called by another name.
        EOFError, OSError: The connection broke.
    """

    def __init__(
        self, connection: socket.socket, certificate: Certificate, name: str, *, is_server: bool
    ) -> None:
        if is_server:
            context = certificate.server_context(mutual=True)
        else:
            context = certificate.client_context()
        name = name[:_MAX_NAME_BYTES]
        context.set_alpn_protocols([name])
        self._socket, self._state, self._sending = connection, threading.Lock(), threading.Lock()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        try:
            self._shake_hands()
        except ssl.SSLError as error:
            raise AuthenticationError(
                "the other end of an encrypted call could not prove itself",
                expected="the certificate of this run",
                received=str(error),
                hint="something between the two hosts answers in its place",
            ) from error
        agreed = self._tls.selected_alpn_protocol() or ""
        if not hmac.compare_digest(agreed, name):
            raise AuthenticationError(
                "an encrypted call came to another node than the one that was called",
                expected=name,
                received=agreed or "no name",
                hint="something between the two hosts joins connections of other nodes",
            )

    def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._socket.sendall(self._outgoing.read())
                self._take()
            else:
                self._socket.sendall(self._outgoing.read())
                return

    def _take(self) -> None:
        """Waits for bytes of the other end."""
        received = self._socket.recv(_CHUNK_BYTES)
        if not received:
            raise EOFError("the connection ended")
        with self._state:
            self._incoming.write(received)

    def sendall(self, data: bytes | memoryview, /) -> None:
        """Sends all bytes; see :meth:`socket.socket.sendall`."""
        left = memoryview(data)
        with self._sending:
            while left:
                with self._state:
                    left = left[self._tls.write(left[:_CHUNK_BYTES]) :]
                    sealed = self._outgoing.read()
                self._socket.sendall(sealed)

    def recv_into(self, memory: memoryview, /) -> int:
        """Receives some bytes into ``memory``.

        Raises:
            EOFError: The connection ended.
        """
        while True:
            try:
                with self._state:
                    return int(self._tls.read(len(memory), memory))
            except ssl.SSLWantReadError:
                self._take()

    def settimeout(self, timeout_s: float | None, /) -> None:
        """The longest wait of a call from now on."""
        self._socket.settimeout(timeout_s)

    def shutdown(self, how: int, /) -> None:
        """Ends both directions; a thread that receives gets an error."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Frees the connection."""
        self._socket.close()
