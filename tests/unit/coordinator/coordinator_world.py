"""A scripted coordinator: workers are connection numbers, time is a number."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkdl.coordinator.group import Store
from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.machine import Coordinator
from sparkdl.coordinator.settings import Settings
from sparkdl.coordinator.telemetry import Status, report_message
from sparkdl.training.phases import Usage
from sparkdl.training.reports import EpochReport
from sparkdl.transport.frames import ByteArray, Kind, Message

DRIVER = 999
"""The driver's connection."""


class Apart(Store):
    """A store of nothing, for ranks that neither begin together nor train in step."""

    together = in_step = False
    name = "apart"


class CoordinatorWorld:
    """Drives a :class:`Coordinator`; remembers every reply by connection.

    The rank of connection ``c`` is ``c % 100``, unless the frame says another.
    """

    def __init__(self, workers: int = 2, store: Store | None = None, **limits: Any) -> None:
        self.coordinator = Coordinator(Settings(workers, **limits), store)
        self.now = 0.0
        self.replies: dict[int, list[Message]] = {}

    def take(self, replies: list[tuple[int, Message]]) -> None:
        """Remembers the replies that are due."""
        for connection, reply in replies:
            if reply.reading is not None:
                raw = np.empty(reply.reading.nbytes, np.uint8)
                reply.reading.copy_into(raw)
                reply.reading, reply.body = None, raw
            elif reply.body is not None:
                reply.body = reply.body.copy()
            self.replies.setdefault(connection, []).append(reply)

    def deliver(self, connection: int, message: Message) -> Message | None:
        """Delivers a frame; returns the reply, or None while it is deferred."""
        before = self.answers(connection)
        self.take(self.coordinator.receive(connection, message, self.now))
        return self.replies[connection][before] if self.answers(connection) > before else None

    def send(self, connection: int, kind: Kind, **fields: Any) -> Message | None:
        """Delivers a frame with these fields."""
        return self.deliver(connection, Message(kind, **{"rank": connection % 100, **fields}))

    def blob(self, connection: int, kind: Kind, chunk: ByteArray, **fields: Any) -> Message | None:
        """Delivers a chunk of bytes from the connection's buffer, as a transport does."""
        raw = self.coordinator.buffer(connection)
        raw[: chunk.size] = chunk
        fields = {"total": chunk.size, **fields}
        body = raw[: chunk.size]
        return self.send(connection, kind, body=body, **fields)

    def hello(self, connection: int, **fields: Any) -> Message | None:
        return self.send(connection, CoordinatorKind.HELLO, **fields)

    def join(self, *connections: int, **fields: Any) -> None:
        for connection in connections:
            self.hello(connection, **fields)
        for connection in connections:
            assert self.last(connection).kind is Kind.OK, self.last(connection)

    def report(
        self,
        connection: int,
        report: EpochReport,
        *,
        wait: bool = False,
        usage: Usage | None = None,
        **fields: Any,
    ) -> Message | None:
        message = report_message(report, wait=wait, usage=usage)
        message.rank = connection % 100
        for name, value in fields.items():
            setattr(message, name, value)
        return self.deliver(connection, message)

    def control(self, **orders: Any) -> Message | None:
        return self.send(DRIVER, CoordinatorKind.CONTROL, rank=-1, meta=orders)

    def drop(self, connection: int) -> None:
        self.take(self.coordinator.disconnect(connection, self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.coordinator.tick(self.now))

    def answers(self, connection: int) -> int:
        return len(self.replies.get(connection, []))

    def last(self, connection: int) -> Message:
        return self.replies[connection][-1]

    def status(self, since_epoch: int = 0) -> Status:
        reply = self.send(DRIVER, CoordinatorKind.STATUS, rank=-1, epoch=since_epoch)
        assert reply is not None
        assert reply.kind is Kind.OK, reply
        body = np.empty(0, np.uint8) if reply.body is None else reply.body
        return Status.from_wire(reply.meta, body)


def code(reply: Message | None) -> str:
    """The error code of an ERROR reply."""
    assert reply is not None
    assert reply.kind is Kind.ERROR, reply
    return str(reply.meta["code"])
