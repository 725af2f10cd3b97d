"""TLS on a connection between nodes of two hosts, on which one thread reads while others send."""

from __future__ import annotations

import socket
import ssl
import threading
from typing import Protocol

from sparkdl.errors import AuthenticationError
from sparkdl.wire.tls import Certificate, require_name

_CHUNK_BYTES = 1 << 18


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

    Both ends show the run's certificate, and name the address that is called. The state of OpenSSL
    is behind a lock, because a Python socket's is not.

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
        context = certificate.peer_context(name, listens=is_server)
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
        require_name(self._tls, name, "the other end of an encrypted call")

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
