"""What the driver asks of all workers: to stop, another learning rate, to take what its callbacks
wrote to the model, to pass an epoch's end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparkdl.errors import ProtocolError
from sparkdl.transport.frames import Flag, Message


class Orders:
    """The driver's last orders, and what workers are told of them.

    Where workers train in step, every rank must learn of an order at the same step: there orders
    are told only from the next :meth:`latch` on.

    Args:
        latched: Whether workers train in step through a store.
    """

    def __init__(self, latched: bool) -> None:
        self._latched = latched
        self._stop, self._learning_rate, self._changes = False, math.nan, 0
        self._told = (False, math.nan)
        self.changes_told = 0
        """How many changes of variables the workers are told to take, since the run began."""
        self.released_epoch = -1

    def take(self, meta: Mapping[str, Any], *, started: bool) -> None:
        """Takes a CONTROL frame's orders.

        Raises:
            ProtocolError: One is malformed.
        """
        try:
            stop = self._stop or bool(meta.get("stop", False))
            learning_rate = float(meta.get("learning_rate", self._learning_rate))
            released = int(meta.get("release", self.released_epoch))
            changes = int(meta.get("changes", self._changes))
        except (TypeError, ValueError) as error:
            raise ProtocolError(
                "a malformed CONTROL frame",
                expected="stop: a truth value; learning_rate: a number; release: an epoch; "
                "changes: how many there are",
                received=str(error),
            ) from error
        self._stop, self._learning_rate, self._changes = stop, learning_rate, changes
        if not self._latched or "release" in meta or not started:
            self.latch()
        self.released_epoch = max(self.released_epoch, released)

    def latch(self) -> None:
        """From now on workers are told the driver's present orders."""
        self._told = (self._stop, self._learning_rate)
        self.changes_told = self._changes

    def stamp(self, reply: Message) -> None:
        """Writes what workers are told into a reply."""
        stop, reply.learning_rate = self._told
        if stop:
            reply.flags |= Flag.STOP
