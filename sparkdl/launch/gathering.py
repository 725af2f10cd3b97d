"""How the ranks of a run exchange texts before anything else connects them."""

from __future__ import annotations

import threading
from typing import Protocol

from sparkdl.errors import TransportError, WaitTimeoutError


class Gathering(Protocol):
    """A rank's part in the one exchange that the launcher provides."""

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        """Every rank's text in rank order.

        Raises:
            WaitTimeoutError: Some rank did not come in time.
        """

    def settle(self) -> None:
        """Returns when no rank is inside the exchange any more: from then on one may fail."""


class AloneGathering:
    """The gathering of a world of one."""

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        """The only rank's text."""
        return [text]

    def settle(self) -> None:
        """At once."""


class Meeting:
    """The meeting of ranks that are threads of one process, or children of it: they exchange texts.

    Args:
        num_ranks: How many there are.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._condition = threading.Condition()
        self._texts: dict[int, str] = {}
        self._told: list[str] = []
        self._round = 0
        self._ended = False
        self.timeout: WaitTimeoutError | None = None
        """The error of the first rank that waited too long."""

    def gathering(self, rank: int) -> Gathering:
        """A rank's part in it."""
        return _MeetingRank(self, rank)

    def end(self) -> None:
        """Ends every wait: a rank has failed."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def all_gather(self, rank: int, text: str, timeout_s: float) -> list[str]:
        """Every rank's text in rank order.

        Raises:
            WaitTimeoutError: Some ranks did not come in time; they are named.
            TransportError: A rank has failed meanwhile.
        """
        with self._condition:
            number = self._round
            self._texts[rank] = text
            if len(self._texts) == self._num_ranks:
                self._told = [self._texts[r] for r in range(self._num_ranks)]
                self._texts = {}
                self._round += 1
                self._condition.notify_all()
                return self._told
            self._condition.wait_for(lambda: self._round > number or self._ended, timeout_s)
            if self._round > number:
                return self._told
            if self._ended:
                raise TransportError(
                    f"another rank has failed; rank {rank} cannot go on",
                    expected="all ranks to take part to the end",
                    received="a launch that has ended",
                )
            missing = [r for r in range(self._num_ranks) if r not in self._texts]
            error = WaitTimeoutError(
                f"{len(missing)} of {self._num_ranks} ranks did not come",
                expected=f"all ranks within {timeout_s:g} s",
                received=f"nothing from ranks {', '.join(map(str, missing))}",
                hint="do they hang while they import a framework or unpickle the function?",
            )
            self.timeout = self.timeout or error
            raise error


class _MeetingRank:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        return self._meeting.all_gather(self._rank, text, timeout_s)

    def settle(self) -> None:
        """At once: a failure ends every wait in the meeting."""
