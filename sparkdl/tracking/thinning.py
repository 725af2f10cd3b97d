"""Which of many records to keep, so that a fit of an hour leaves no more than one of minutes."""

from __future__ import annotations


class Thinning:
    """Lets through what comes at growing distances: ``interval_s`` first, a ``most``-th of the time
    since the beginning later. With 500 that is some 500 records in the first minutes, and another
    3,000 in a day.

    Args:
        interval_s: Least time between two records.
        most: How many times the distance fits into the time since the beginning.
    """

    def __init__(self, interval_s: float = 0.5, most: float = 500) -> None:
        self._interval_s, self._most = interval_s, most
        self._began: float | None = None
        self._due = 0.0

    def due(self, now: float) -> bool:
        """Whether to keep a record that comes at ``now`` (in seconds)."""
        if self._began is None:
            self._began = self._due = now
        if now < self._due:
            return False
        self._due = now + max(self._interval_s, (now - self._began) / self._most)
        return True
