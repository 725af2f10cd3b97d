"""Which of many records to keep, so that a fit of an hour leaves no more than one of minutes."""

from __future__ import annotations


class Thinning:
    """Lets through what comes at growing distances: ``interval_s`` first, a 500th of the time since
    the beginning later. That is some 500 records in the first minutes, and another 1,500 in a day.

    Args:
        interval_s: Least time between two records.
    """

    def __init__(self, interval_s: float = 0.5) -> None:
        self._interval_s = interval_s
        self._began: float | None = None
        self._due = 0.0

    def due(self, now: float) -> bool:
        """Whether to keep a record that comes at ``now`` (in seconds)."""
        if self._began is None:
            self._began = self._due = now
        if now < self._due:
            return False
        self._due = now + max(self._interval_s, (now - self._began) / 500)
        return True
