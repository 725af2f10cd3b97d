"""How long a wait may last, and how it waits: a short spin, then sleep in ``poll``.

Spinning answers in a microsecond, but takes a core that the other ranks' framework threads need;
so it lasts no longer than a wake-up from ``poll`` would cost, and yields between looks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from sparkdl.collective.pending import name_ranks
from sparkdl.errors import TransportError, WaitTimeoutError

SPIN_S = 100e-6
SLICE_MS = 50
"""The longest sleep between two looks at deadline and abortion."""


class Watch:
    """Deadline of the operation under way, and the flag that ends it from another thread.

    Args:
        rank: This rank, for messages.
        timeout_s: Limit for one operation.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.missing: list[int] = []
        self._deadline = time.monotonic() + timeout_s
        self._aborted = False

    def start(self) -> None:
        """A new operation begins."""
        self._deadline = time.monotonic() + self.timeout_s

    def abort(self) -> None:
        """Ends the present wait within a moment; from any thread."""
        self._aborted = True

    def look(self, missing: list[int]) -> None:
        """Called now and then by whoever waits.

        Args:
            missing: The ranks waited for.

        Raises:
            WaitTimeoutError: The limit has passed; names ``missing``.
            TransportError: The communicator was closed meanwhile.
        """
        self.missing = missing
        if self._aborted:
            raise TransportError(
                f"rank {self.rank} stopped waiting for {name_ranks(missing)}",
                expected="close() after the last operation",
                received="close() during an operation",
            )
        if time.monotonic() >= self._deadline:
            raise WaitTimeoutError(
                f"rank {self.rank} waited in vain; missing {name_ranks(missing)}",
                expected=f"all ranks within {self.timeout_s:g} s",
                received=f"nothing from {name_ranks(missing)}",
                hint="a rank that is slower needs a larger timeout_s; "
                "a rank that took another branch never comes",
            )


def spin_until(ready: Callable[[], bool], seconds: float = SPIN_S) -> bool:
    """Looks at ``ready`` over and over, for a short time; whether it came true."""
    until = time.perf_counter() + seconds
    while True:
        for _ in range(8):
            if ready():
                return True
        if time.perf_counter() >= until:
            return False
        os.sched_yield()
