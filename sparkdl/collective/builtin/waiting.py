"""How a rank waits: it looks again and again for a short time, then sleeps in ``poll``.

To look again and again notices a change within a microsecond, but keeps a core busy that the other
ranks' framework threads need. So it lasts no longer than to wake up from ``poll`` would take, and
gives other threads their turn between two looks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from sparkdl.collective.communicator import name_ranks
from sparkdl.errors import TransportError, WaitTimeoutError

SPIN_S = 100e-6
SLICE_MS = 50
"""Milliseconds after which a wait looks at its deadline, and whether it was aborted, again."""


class Watch:
    """The deadline of the running operation, and a flag by which another thread ends it."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.missing: list[int] = []
        self._deadline = time.monotonic() + timeout_s
        self._aborted = False

    def start(self) -> None:
        """Sets the deadline of an operation that begins."""
        self._deadline = time.monotonic() + self.timeout_s

    def abort(self) -> None:
        """Ends the present wait within :data:`SLICE_MS`; may be called from any thread."""
        self._aborted = True

    def look(self, missing: list[int]) -> None:
        """Called again and again during a wait; raises when it must end.

        Raises:
            WaitTimeoutError: The limit has passed; names ``missing``.
            TransportError: The communicator was closed meanwhile.
        """
        self.missing = missing
        if self._aborted:
            raise TransportError(
                f"rank {self.rank} stopped waiting for {name_ranks(missing)}",
                expected="close() after the last operation", received="close() during an operation",
            )  # fmt: skip
        if time.monotonic() >= self._deadline:
            raise WaitTimeoutError(
                f"rank {self.rank} has waited too long; missing {name_ranks(missing)}",
                expected=f"all ranks within {self.timeout_s:g} s",
                received=f"nothing from {name_ranks(missing)}",
                hint="a rank that is slower needs a larger timeout_s; "
                "a rank that calls other operations never comes",
            )


def spin_until(ready: Callable[[], bool]) -> bool:
    """Calls ``ready`` again and again for a short time; returns whether it became true."""
    until = time.perf_counter() + SPIN_S
    while True:
        for _ in range(8):
            if ready():
                return True
        if time.perf_counter() >= until:
            return False
        os.sched_yield()


def peer_gone(rank: int, peer: int, why: object = "") -> TransportError:
    """The error for a connection that ended."""
    return TransportError(
        f"rank {peer} is gone; rank {rank} cannot go on",
        expected="all ranks to stay until the operation is done",
        received=f"the connection to rank {peer} ended" + (f" ({why})" if why else ""),
        hint=f"the cause is on rank {peer}, or on a rank it waited for",
    )
