"""Exactly as many bytes as are wanted."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class ReceivesInto(Protocol):
    """The source of bytes: a socket, or TLS of our own above one."""

    def recv_into(self, memory: memoryview, /) -> int:
        """Receives some bytes; 0 at the end."""


class Stream(ReceivesInto, Protocol):
    """The two ways of a connection."""

    def sendall(self, data: bytes | memoryview, /) -> None:
        """Sends all bytes."""


def receive_into(connection: ReceivesInto, view: memoryview) -> None:
    """Fills ``view``.

    Raises:
        EOFError: The peer closed before it was full.
    """
    position, size = 0, len(view)
    while position < size:
        count = connection.recv_into(view[position:])
        if count == 0:
            raise EOFError("the peer closed the connection")
        position += count


def receive_exactly(connection: ReceivesInto, size: int) -> memoryview:
    """``size`` bytes in memory of their own.

    Raises:
        EOFError: The peer closed before.
    """
    memory = memoryview(np.empty(size, np.uint8).data)
    receive_into(connection, memory)
    return memory
