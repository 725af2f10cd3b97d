"""A rank that is started again after it failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from sparkdl.failures import Failure
from sparkdl.launch.gathering import Gathering
from sparkdl.launch.task import RankContext
from sparkdl.process.log_lines import show

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
RunRank = Callable[[RankContext], Iterator[pa.RecordBatch]]


class RestartedRanks:
    """Runs ranks, and again when they fail, as often as each may.

    Ranks that may be started again meet once: a later attempt is told what the first was told.
    Before each of them is a pause, twice as long each time, for what a rank needs and does not find
    yet.

    Args:
        restarts: How often each rank may be started again, in rank order; ranks beyond its end
            never.
        run: One attempt.
        ended: Is set when the launch is over, so that nothing is started any more; None: never.
    """

    def __init__(
        self, restarts: Sequence[int], run: RunRank, ended: threading.Event | None = None
    ) -> None:
        self._restarts, self._run = tuple(restarts), run
        self._ended = ended or threading.Event()

    def run(self, rank: RankContext) -> Iterator[pa.RecordBatch]:
        """All attempts of a rank; what the last one yielded.

        Raises:
            Exception: What the last attempt raised.
        """
        allowed = self._restarts[rank.rank] if rank.rank < len(self._restarts) else 0
        if allowed and rank.gathering is not None:
            rank = replace(rank, gathering=_KeptGathering(rank.gathering))
        for attempt in range(allowed):
            try:
                batches = list(self._run(replace(rank, attempt=attempt)))
            except (Exception, SystemExit) as error:
                if self._ended.is_set():
                    raise
                told = Failure.of(rank.rank, error).error
                line = f"is started again ({attempt + 1} of {allowed}) after: {told}"
                show(rank.rank, line) if rank.log is None else rank.log(line)
                # 2**attempt has too many digits for a float after some thousand restarts
                if self._ended.wait(min(FIRST_PAUSE_S * 2 ** min(attempt, 10), LONGEST_PAUSE_S)):
                    raise
            else:
                yield from batches
                return
        yield from self._run(replace(rank, attempt=allowed))


class _KeptGathering:
    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        self._told: list[str] | None = None

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        if self._told is None:
            self._told = self._gathering.all_gather(text, timeout_s)
        return self._told

    def settle(self) -> None:
        self._gathering.settle()
