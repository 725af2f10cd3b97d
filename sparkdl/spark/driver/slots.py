"""Slots for ranks that must run at the same time: one pool per application, in order of asking.

Two fits whose workers train in step can each get half of the slots and wait for the other half. So
such a fit, or ``run``, first takes all of its slots here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sparkdl.errors import ResourceError
from sparkdl.launch import interrupts
from sparkdl.spark.session.running import is_connect

LOOK_S = 0.2


@dataclass(eq=False)
class _Claim:
    """One fit's or run's wish for slots."""

    name: str
    slots: int
    thread: int = field(default_factory=threading.get_ident)
    since: float = field(default_factory=time.monotonic)


class SlotPool:
    """Thread-safe. Who asks first is served first, also if a later one would fit."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Claim] = []
        self._held: list[_Claim] = []

    @contextlib.contextmanager
    def take(self, slots: int, capacity: int, name: str, timeout_s: float) -> Iterator[None]:
        """Holds slots during its body; waits for them first.

        Args:
            slots: How many; all of them if there are fewer.
            capacity: Slots of the application now.
            name: Of who takes them, for the errors of others.
            timeout_s: Longest wait.

        Raises:
            ResourceError: Others held them for too long, or this thread holds some itself; they
                are named.
        """
        claim = _Claim(name, min(slots, capacity))
        with self._changed:
            self._waiting.append(claim)
            try:
                self._wait(claim, capacity, timeout_s)
            finally:
                self._waiting.remove(claim)
                self._changed.notify_all()
            self._held.append(claim)
        try:
            yield
        finally:
            with self._changed:
                self._held.remove(claim)
                self._changed.notify_all()

    def _wait(self, claim: _Claim, capacity: int, timeout_s: float) -> None:
        deadline = claim.since + timeout_s
        while not self._fits(claim, capacity):
            inside = [held for held in self._held if held.thread == claim.thread]
            if inside or time.monotonic() > deadline:
                raise ResourceError(
                    f"{claim.name} has no slots for its {claim.slots} workers",
                    expected=f"{claim.slots} of {capacity} slots free within {timeout_s:g} s",
                    received="held by " + ", ".join(_described(held) for held in self._held),
                    hint="a fit inside another one's callback waits for itself"
                    if inside
                    else "wait for the other to end, give each fewer workers, or raise "
                    "start_timeout_s",
                )
            self._changed.wait(LOOK_S)

    def _fits(self, claim: _Claim, capacity: int) -> bool:
        free = capacity - sum(held.slots for held in self._held)
        return self._waiting[0] is claim and (claim.slots <= free or not self._held)


_pools: dict[str, SlotPool] = {}


def slot_pool(spark: Any) -> SlotPool:
    """The pool of a session's application."""
    with interrupts.held():  # one inside a call of the JVM leaves its connection broken
        name = "connect" if is_connect(spark) else str(spark.sparkContext.applicationId)
    return _pools.setdefault(name, SlotPool())


def _described(claim: _Claim) -> str:
    seconds = time.monotonic() - claim.since
    return f"{claim.name} ({claim.slots} slots, {seconds:.0f} s ago)"
