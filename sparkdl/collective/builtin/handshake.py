"""Connections between two ranks: what one says of itself, and how it is made without waiting.

Each begins with the proof of :mod:`sparkdl.wire.proving`, whose hello names the communicator, the
kind of the connection and both ranks. In an encrypted run TLS follows
(:mod:`sparkdl.collective.builtin.paths`).
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any, NamedTuple

from sparkdl.wire.proving import IncomingProof, OutgoingProof

RING, LOCAL = 1, 2
"""Kinds of connections: to a neighbour in a ring, and between two ranks of a host."""

Address = tuple[str, int] | str

_MAGIC = b"sparkdl1"
_HELLO = struct.Struct("<8sB16sII")


class ConnectionKey(NamedTuple):
    """Which connection of a communicator this is, seen from one rank: its kind, the other rank."""

    kind: int
    peer: int


class OutgoingHandshake:
    """A connection that this rank makes, on a socket that does not block.

    Args:
        address: Host and port, or the name of a Unix socket.
        deadline: When to give up, on the monotonic clock.
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
        self.key, self.address, self.deadline = key, address, deadline
        if isinstance(address, str):
            self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            target: Any = address
        else:
            family, _, _, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
            self.connection = socket.socket(family, socket.SOCK_STREAM)
        hello = _HELLO.pack(_MAGIC, key.kind, group, rank, key.peer)
        name = f"rank {key.peer} at {address!r}"
        self._proof = OutgoingProof(self.connection, token, hello, name)
        self.connection.setblocking(False)
        self._connected = False
        try:
            self.connection.connect(target)
        except BlockingIOError:
            pass  # the connection is made meanwhile
        except BaseException:
            self.connection.close()
            raise

    def begin(self) -> bool:
        """Sends the hello when the socket is connected; False if it was sent before."""
        if self._connected:
            return False
        code = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._connected = True
        self._proof.begin()
        return True

    def advance(self) -> bool:
        """See :meth:`sparkdl.wire.proving.OutgoingProof.advance`."""
        return self._proof.advance()


class IncomingHandshake:
    """A connection that another process makes; args as for :class:`OutgoingHandshake`."""

    def __init__(self, connection: socket.socket, rank: int, token: bytes, deadline: float) -> None:
        self.connection, self.deadline = connection, deadline
        self._proof = IncomingProof(
            connection, token, _HELLO.size, lambda hello: _is_for(rank, hello)
        )

    def advance(self) -> tuple[bytes, ConnectionKey] | None:
        """Reads what has come and answers it.

        Returns:
            The group and the key of the connection, when the other side has proved itself.

        Raises:
            OSError, EOFError: The other side is gone.
            AuthenticationError: The other side means another rank, or has another token.
        """
        if not self._proof.hear():
            return None
        self._proof.welcome()
        _, kind, group, sender, _ = _HELLO.unpack(self._proof.hello)
        return group, ConnectionKey(kind, sender)


def _is_for(rank: int, hello: bytes) -> bool:
    magic, _, _, _, receiver = _HELLO.unpack(hello)
    return bool(magic == _MAGIC and receiver == rank)
