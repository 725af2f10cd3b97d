"""A scripted server state: workers are connection numbers, time is a number."""

from __future__ import annotations

from typing import Any

import numpy as np
from sparkdl.ps.state import ServerState, Settings

from sparkdl.ps.rules.rule import Rule
from sparkdl.transport.frames import Flag, Kind, Message
from sparkdl.weights import FloatArray, Layout


class Plain(Rule):
    """The base class: center += delta."""

    name = "plain"


class Rounds(Rule):
    """Blocking; ``payload`` is an instance attribute."""

    name = "rounds"
    blocking = True

    def __init__(self, payload: Any = "delta") -> None:
        self.payload = payload

    def update(self, center: Any, delta: Any, state: Any, commit: Any, out: Any) -> None:
        if self.payload == "gradient":
            np.copyto(out, delta)
        else:
            np.add(center, delta, out=out)


class Bounded(Rule):
    """Bounded staleness."""

    name = "bounded"

    def __init__(self, slack: int) -> None:
        self.slack = slack

    def may_continue(self, clock: int, slowest_clock: int) -> bool:
        return clock - slowest_clock <= self.slack


class World:
    """Drives a :class:`ServerState`; remembers every reply by connection."""

    def __init__(
        self, rule: Rule, workers: int = 2, trained: int = 4, averaged: int = 0, **limits: Any
    ) -> None:
        self.layout = Layout.of([("w", (trained,), "f")], [("m", (averaged,), "f")])
        self.center = np.zeros(self.layout.size, np.float32)
        self.state = ServerState(self.layout, self.center, rule, Settings(workers, **limits))
        self.now = 0.0
        self.replies: dict[int, list[Message]] = {}
        self.bodies: dict[int, FloatArray] = {}

    def _take(self, replies: list[tuple[int, Message]]) -> None:
        for connection, reply in replies:
            if reply.reading is not None:
                raw = np.empty(reply.reading.nbytes, np.uint8)
                reply.reading.copy_into(raw)
                reply.reading, reply.body = None, raw
            self.replies.setdefault(connection, []).append(reply)
            if reply.body is not None:
                self.bodies[connection] = reply.body.copy().view(np.float32)

    def send(self, connection: int, kind: Kind, value: Any = None, **fields: Any) -> Message | None:
        """Sends a frame; returns the reply, or None while it is deferred."""
        message = Message(kind, **{"rank": connection % 100, **fields})
        if value is not None:
            raw = self.state.buffer(connection)
            self.state.limits.weights(raw)[...] = value
            message.body = raw[: self.layout.size_bytes]
        before = len(self.replies.get(connection, []))
        self._take(self.state.receive(connection, message, self.now))
        return self.replies[connection][before] if self.answers(connection) > before else None

    def hello(self, connection: int, **fields: Any) -> Message | None:
        return self.send(connection, Kind.HELLO, **fields)

    def join(self, *connections: int, **fields: Any) -> None:
        for connection in connections:
            self.hello(connection, **fields)
        for connection in connections:
            assert self.last(connection).kind is Kind.OK, self.last(connection)

    def commit(self, connection: int, value: Any, sequence: int, **fields: Any) -> Message | None:
        fields = {"rows": 1, "batches": 1, "batch": sequence, **fields}
        return self.send(connection, Kind.PUSH_PULL, value, sequence=sequence, **fields)

    def drop(self, connection: int) -> None:
        self._take(self.state.disconnect(connection, self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._take(self.state.tick(self.now))

    def answers(self, connection: int) -> int:
        return len(self.replies.get(connection, []))

    def last(self, connection: int) -> Message:
        return self.replies[connection][-1]

    def status(self) -> dict[str, Any]:
        reply = self.send(999, Kind.STATUS, rank=-1)
        assert reply is not None
        return reply.meta


def code(reply: Message | None) -> str:
    assert reply is not None
    assert reply.kind is Kind.ERROR, reply
    return str(reply.meta["code"])


__all__ = ["Bounded", "Flag", "Kind", "Plain", "Rounds", "World", "code"]
