"""The handshake by which two ranks prove to each other that they belong to the same run.

C connects and L listens; both know the run's token T::

    C → L   hello = magic, kind, group, sender, receiver, nonce_C
    L → C   nonce_L, HMAC(T, "listener" + hello + nonce_L)
    C → L   HMAC(T, "connector" + hello + nonce_L)
    L → C   one byte: welcome

All lengths are fixed, and proofs are compared in constant time. In an encrypted run TLS follows
(:mod:`sparkdl.collective.builtin.encryption`); in any other the data that follow are neither
encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
from typing import Any, NamedTuple

from sparkdl.errors import AuthenticationError

RING, LOCAL = 1, 2
"""Kinds of connections: to a neighbour in a ring, and between two ranks of a host."""

Address = tuple[str, int] | str

_MAGIC = b"sparkdl1"
_HELLO = struct.Struct("<8sB16sII32s")
_CHALLENGE = struct.Struct("<32s32s")
_PROOF_BYTES = 32
_WELCOME = b"\x01"


class ConnectionKey(NamedTuple):
    """Which connection of a communicator this is, seen from one rank: its kind, the other rank."""

    kind: int
    peer: int


class Refusal(ConnectionAbortedError):
    """Whoever connected does not belong to this run."""


def _proof(token: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.new(token, role + hello + nonce, hashlib.sha256).digest()


class Handshake:
    """One handshake under way on one non-blocking socket.

    Args:
        connection: The socket.
        rank: This rank, as the others know it.
        token: The run's secret.
        expects: Bytes of the message that comes next.
        deadline: When to give up, on the monotonic clock.
    """

    def __init__(
        self, connection: socket.socket, rank: int, token: bytes, expects: int, deadline: float
    ) -> None:
        self.socket = connection
        self.deadline = deadline
        self._rank, self._token = rank, token
        self._expects = expects
        self._received = b""
        self._hello = b""

    def _read(self, expects_next: int) -> bytes:
        """The message expected, once it is complete; empty before."""
        data = self.socket.recv(self._expects - len(self._received))
        if not data:
            raise ConnectionResetError("closed during the handshake")
        self._received += data
        if len(self._received) < self._expects:
            return b""
        message, self._received, self._expects = self._received, b"", expects_next
        return message


class OutgoingHandshake(Handshake):
    """A handshake that this rank begins by connecting to ``address``.

    Args:
        key: Which connection is made.
        address: Host and port, or the name of a Unix socket.
        group: 16 bytes that name the communicator to be.
        rank, token, deadline: As for :class:`Handshake`.
    """

    def __init__(
        self,
        key: ConnectionKey,
        address: Address,
        group: bytes,
        rank: int,
        token: bytes,
        deadline: float,
    ) -> None:
        self.key, self.address, self._group = key, address, group
        if isinstance(address, str):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            target: Any = address
        else:
            family, _, _, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
            connection = socket.socket(family, socket.SOCK_STREAM)
        super().__init__(connection, rank, token, _CHALLENGE.size, deadline)
        connection.setblocking(False)
        self._connected = False
        try:
            connection.connect(target)
        except BlockingIOError:
            pass  # the connection is made meanwhile
        except BaseException:
            connection.close()
            raise

    def begin(self) -> bool:
        """Sends the hello when the socket is connected; False if it was sent before."""
        if self._connected:
            return False
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._connected = True
        nonce = secrets.token_bytes(32)
        key = self.key
        self._hello = _HELLO.pack(_MAGIC, key.kind, self._group, self._rank, key.peer, nonce)
        self.socket.send(self._hello)
        return True

    def advance(self) -> bool:
        """Reads what has come and answers it; True when the listener has said welcome.

        Raises:
            AuthenticationError: The listener has another token.
        """
        expected = self._expects
        message = self._read(len(_WELCOME))
        if not message:
            return False
        if expected == len(_WELCOME):
            return True
        nonce, proof = _CHALLENGE.unpack(message)
        own = _proof(self._token, b"listener", self._hello, nonce)
        if not hmac.compare_digest(proof, own):
            raise AuthenticationError(
                f"rank {self.key.peer} could not prove itself to rank {self._rank}",
                expected="a proof made with this run's token",
                received=f"another proof from {self.address!r}",
                hint="is a process of another run listening there?",
            )
        self.socket.send(_proof(self._token, b"connector", self._hello, nonce))
        return False


class IncomingHandshake(Handshake):
    """A handshake that another process begins; args as for :class:`Handshake`."""

    def __init__(self, connection: socket.socket, rank: int, token: bytes, deadline: float) -> None:
        super().__init__(connection, rank, token, _HELLO.size, deadline)
        self._nonce = b""

    def advance(self) -> tuple[bytes, ConnectionKey] | None:
        """Reads what has come and answers it.

        Returns:
            The group and the key of the connection, when the other side has proved itself.

        Raises:
            Refusal: The other side means another rank, or has another token.
        """
        message = self._read(_PROOF_BYTES)
        if not message:
            return None
        if not self._hello:
            magic, _, _, _, receiver, _ = _HELLO.unpack(message)
            if magic != _MAGIC or receiver != self._rank:
                raise Refusal("a hello that was not meant for this rank")
            self._hello, self._nonce = message, secrets.token_bytes(32)
            proof = _proof(self._token, b"listener", self._hello, self._nonce)
            self.socket.send(_CHALLENGE.pack(self._nonce, proof))
            return None
        own = _proof(self._token, b"connector", self._hello, self._nonce)
        if not hmac.compare_digest(message, own):
            raise Refusal("a wrong token")
        self.socket.send(_WELCOME)
        _, kind, group, sender, _, _ = _HELLO.unpack(self._hello)
        return group, ConnectionKey(kind, sender)
