"""Rows per second of all workers: over the last seconds, and of whole epochs."""

from __future__ import annotations

from collections import deque


class RecentSpeed:
    """Rows per second over the last seconds.

    Args:
        span_s: How far back it looks.
    """

    def __init__(self, span_s: float = 3.0) -> None:
        self._span_s = span_s
        self._looks: deque[tuple[float, int]] = deque()

    def look(self, now: float, rows: int) -> None:
        """Takes in the rows that all workers have trained until ``now`` (in seconds)."""
        if self._looks and rows < self._looks[-1][1]:  # the stage began again
            self._looks.clear()
        if self._looks and not self._looks[-1][1]:  # time without any row counts for nothing
            self._looks.clear()
        self._looks.append((now, rows))
        while len(self._looks) > 2 and now - self._looks[1][0] >= self._span_s:
            self._looks.popleft()

    @property
    def rows_per_s(self) -> float | None:
        """None before the second look that saw rows."""
        if len(self._looks) < 2:
            return None
        (start, before), (end, after) = self._looks[0], self._looks[-1]
        return (after - before) / (end - start) if end > start and after > before else None


class EpochSpeed:
    """Rows per second of epochs: their rows over the time from the end of the epoch before.

    The first epoch counts from the first look that saw rows of it: starting workers and compiling
    the model take seconds in which nothing is trained. Where more than half of that epoch was
    over by then, it counts from the look before. Epochs that end between two looks share the time
    between the two.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._before: float | None = None
        self._rows_before = 0

    def look(self, now: float, rows: int, *, workers: int) -> None:
        """Takes in what is done of the present epoch.

        Args:
            now: In seconds.
            rows: Rows of the epoch that are trained.
            workers: Workers that have joined.
        """
        if self._since is None and rows:
            self._since, self._rows_before = now, rows
        elif self._since is None and workers:
            self._before = now

    def end(self, now: float, rows: int) -> float | None:
        """The speed of one epoch or of several that have ended since the last look.

        Args:
            now: In seconds.
            rows: Of all of them.

        Returns:
            None if nobody saw them begin.
        """
        since, trained = self._since, rows - self._rows_before
        if self._before is not None and (since is None or 2 * self._rows_before > rows):
            since, trained = self._before, rows
        self._since, self._before, self._rows_before = now, None, 0
        if since is None or now <= since or trained <= 0:
            return None
        return trained / (now - since)
