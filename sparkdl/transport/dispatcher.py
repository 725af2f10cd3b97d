"""Carries messages from connection threads to a service, and deferred replies back."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from sparkdl.transport.frames import HEADER_BYTES, Limits, Message
from sparkdl.transport.service import Replies, Service

POLL_S = 0.2


class _Slot:
    def __init__(self) -> None:
        self.event = threading.Event()
        self.reply: Message | None = None


class Dispatcher:
    """Carries messages from connection threads to the service, and deferred replies back.

    Each transport thread blocks in :meth:`call` until its own reply is due. Thread-safe.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.limits: Limits = service.limits
        self._slots: dict[int, _Slot] = {}
        self._ids = itertools.count(1)
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="sparkdl-ps-tick", daemon=True)
        self._ticker.start()

    @property
    def connections(self) -> int:
        return len(self._slots)

    def open(self) -> int:
        """A new connection."""
        connection = next(self._ids)
        self._slots[connection] = _Slot()
        return connection

    def close(self, connection: int) -> None:
        """The connection is gone."""
        if self._slots.pop(connection, None) is not None:
            self._deliver(self.service.disconnect(connection, time.monotonic()))

    def call(
        self, connection: int, message: Message, connected: Callable[[], bool]
    ) -> Message | None:
        """The reply to ``message``; None if the peer went away, or the server ends, before it."""
        slot = self._slots[connection]
        slot.event.clear()
        slot.reply = None
        self._deliver(self.service.receive(connection, message, time.monotonic()))
        while not slot.event.wait(POLL_S):
            if self._closed.is_set() or not connected():
                return None
        reply = slot.reply
        if reply is not None:
            self.service.bytes_in += _size(message)
            self.service.bytes_out += _size(reply)
        return reply

    def answer(self, connection: int, message: Message) -> Message:
        """The reply to a message that is never deferred (HEARTBEAT), beside an outstanding one."""
        replies = self.service.receive(connection, message, time.monotonic())
        own = next(i for i, (number, _) in enumerate(replies) if number == connection)
        _, reply = replies.pop(own)
        self._deliver(replies)
        return reply

    def shutdown(self) -> None:
        """Ends the ticker and all waits."""
        self._closed.set()
        if self._ticker is not threading.current_thread():
            self._ticker.join(5)

    def _deliver(self, replies: Replies) -> None:
        for connection, reply in replies:
            slot = self._slots.get(connection)
            if slot is not None:
                slot.reply = reply
                slot.event.set()

    def _tick(self) -> None:
        while not self._closed.wait(POLL_S):
            self._deliver(self.service.tick(time.monotonic()))


def _size(message: Message) -> int:
    return HEADER_BYTES + message.body_bytes
