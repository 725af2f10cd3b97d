"""A coordinator with a parameter store: workers are connection numbers, time is a number."""

from __future__ import annotations

from typing import Any

import numpy as np
from coordinator_world import CoordinatorWorld, code

from sparkdl.ps.kinds import StoreKind
from sparkdl.ps.store import make_store
from sparkdl.rules.rule import Rule
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


class World(CoordinatorWorld):
    """A coordinator with a parameter store; remembers the weights of every reply."""

    def __init__(
        self, rule: Rule, workers: int = 2, trained: int = 4, averaged: int = 0, **limits: Any
    ) -> None:
        self.layout = Layout.of([("w", (trained,), "f")], [("m", (averaged,), "f")])
        self.center = np.zeros(self.layout.size, np.float32)
        super().__init__(workers, make_store(self.layout, self.center, rule), **limits)
        self.bodies: dict[int, FloatArray] = {}

    def take(self, replies: list[tuple[int, Message]]) -> None:
        super().take(replies)
        for connection, reply in replies:
            if reply.body is not None and reply.kind is StoreKind.WEIGHTS:
                self.bodies[connection] = reply.body.view(np.float32)

    def send(self, connection: int, kind: Kind, value: Any = None, **fields: Any) -> Message | None:
        """Delivers a frame; ``value`` fills the whole flat buffer that it carries."""
        if value is not None:
            raw = self.coordinator.buffer(connection)
            self.coordinator.limits.dense(raw)[...] = value
            fields = {"body": raw[: self.layout.size_bytes], **fields}
        return super().send(connection, kind, **fields)

    def commit(self, connection: int, value: Any, sequence: int, **fields: Any) -> Message | None:
        fields = {"rows": 1, "batches": 1, "batch": sequence, **fields}
        return self.send(connection, StoreKind.PUSH_PULL, value, sequence=sequence, **fields)

    @property
    def clock(self) -> int:
        """Commits or rounds applied."""
        return self.status().clock


__all__ = ["Bounded", "Flag", "Kind", "Plain", "Rounds", "World", "code"]
