"""What a connection keeps when it is opened, and when it is opened again."""

from __future__ import annotations

import numpy as np

from sparkdl.transport.connection import Connection, Timeouts
from sparkdl.transport.frames import ByteArray, FrameLimits, Message


class _Mailbox:
    """A channel with a buffer of its own, as in shared memory."""

    def __init__(self, size: int) -> None:
        self.raw: ByteArray | None = np.full(size, 7, np.uint8)

    def request(self, message: Message, limit_s: float | None) -> Message:
        raise ConnectionResetError

    def abort(self) -> None: ...

    def close(self) -> None: ...


def test_a_buffer_is_copied_only_if_somebody_has_used_it() -> None:
    """A mailbox has 16 MiB and more: to copy an empty one takes 20 ms and that much memory."""
    limits = FrameLimits(100)
    size = limits.allocate().size
    made: list[_Mailbox] = []

    def opener(raw: ByteArray | None) -> _Mailbox:
        made.append(_Mailbox(size))
        return made[-1]

    connection = Connection(opener, limits, Timeouts(), buffered=True, name="a worker")
    connection.open()
    assert made[0].raw is not None
    assert (made[0].raw == 7).all()
    connection.raw[:] = 1
    connection._drop()
    connection.open()
    assert (connection.raw == 1).all()
    assert made[1].raw is not None
    assert np.shares_memory(connection.raw, made[1].raw)
