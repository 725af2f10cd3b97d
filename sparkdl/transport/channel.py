"""A client's end of one connection, and where the body of a reply lies."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from sparkdl.errors import ProtocolError
from sparkdl.transport.frames import ByteArray, Message


class Channel(Protocol):
    """A client's end of one connection: one request at a time.

    ``raw`` is the buffer that a body is sent from and received into (None on a control channel).
    """

    name: str

    @property
    def raw(self) -> ByteArray | None: ...

    def request(self, message: Message, timeout_s: float | None) -> Message:
        """Sends a frame and returns the reply; a reply's body lies in ``raw``."""
        ...

    def abort(self) -> None:
        """Wakes up a ``request`` that another thread waits in, with an error."""
        ...

    def close(self) -> None: ...


def require_raw(raw: ByteArray | None) -> ByteArray:
    """``raw``, or a ProtocolError on a channel that was opened without a buffer."""
    if raw is None:
        raise ProtocolError(
            "a body came over a control channel",
            expected="replies without a body",
            received="a body",
        )
    return raw


def deliver_body(reply: Message, raw: ByteArray) -> None:
    """Makes ``reply.body`` the start of ``raw``, copied there unless it lies there already."""
    if reply.reading is not None:
        target = raw[: reply.reading.nbytes]
        reply.reading.copy_into(target)
        reply.reading = None
    elif reply.body is not None:
        target = raw[: reply.body.size]
        if target.ctypes.data != reply.body.ctypes.data:
            np.copyto(target, reply.body)
    else:
        return
    reply.body = target
