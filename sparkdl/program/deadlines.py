"""The time limit of calls that nobody waits for: a thread that ends those that pass it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Deadlines:
    """Tells of each call that has not been taken out within its limit; all have the same one.

    So the call that came first is the first to pass it. The thread runs while there are calls, and
    for at most one limit longer.

    Args:
        limit_s: The limit.
        passed: Is told the number of a call, in the thread.
    """

    def __init__(self, limit_s: float, passed: Callable[[int], None]) -> None:
        self._limit_s, self._passed = limit_s, passed
        self._lock = threading.Lock()
        self._until: dict[int, float] = {}
        self._ended: threading.Event | None = None

    def add(self, number: int) -> None:
        """Watches a call from now on."""
        with self._lock:
            self._until[number] = time.monotonic() + self._limit_s
            if self._ended is None:
                self._ended = threading.Event()
                threading.Thread(
                    target=self._watch, args=(self._ended,), name="sparkdl-deadlines", daemon=True
                ).start()

    def take_out(self, number: int) -> None:
        """The call has ended."""
        with self._lock:
            self._until.pop(number, None)

    def _watch(self, ended: threading.Event) -> None:
        wait_s = self._limit_s  # a call that comes meanwhile has at least as long
        while not ended.wait(wait_s):
            now, passed = time.monotonic(), list[int]()
            with self._lock:
                for number, until in self._until.items():
                    if until > now:
                        break
                    passed.append(number)
                for number in passed:
                    del self._until[number]
                if not self._until and self._ended is ended:
                    self._ended = None
                    ended.set()
                else:
                    wait_s = max(0.001, next(iter(self._until.values()), 0.0) - now)
            for number in passed:
                self._passed(number)

    def close(self) -> None:
        """Ends the thread; a later call begins another one."""
        with self._lock:
            ended, self._ended = self._ended, None
            self._until.clear()
        if ended is not None:
            ended.set()
