"""A search without models: segments take simulated time, scores come from a function."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable

from sparkdl.tune.searchers import Searcher

Score = Callable[[int, int], float]


def simulate(
    searcher: Searcher, score: Score, workers: int = 1, target: float = math.inf
) -> tuple[dict[int, int], float]:
    """The epochs that each trial reached, and the time that it took.

    Args:
        searcher: Fresh.
        score: Trial and epochs done -> score.
        workers: Segments side by side; each takes its epochs.
        target: It ends when a trial has this score; else when all have ended.
    """
    reached: dict[int, int] = {}
    running: list[tuple[float, int, int, int]] = []
    now, order = 0.0, 0
    while True:
        while len(running) < workers:
            segment = searcher.ask()
            if segment is None:
                break
            assert segment.parent is not None or reached.get(segment.trial, 0) == segment.begin
            heapq.heappush(
                running, (now + segment.end - segment.begin, order, segment.trial, segment.end)
            )
            order += 1
        if not running:
            return reached, now
        now, _, trial, epochs = heapq.heappop(running)
        reached[trial] = epochs
        found = score(trial, epochs)
        if found >= target:
            return reached, now
        searcher.tell(trial, epochs, found)


def counted(reached: dict[int, int]) -> dict[int, int]:
    """Epochs -> trials that ended there."""
    return dict(Counter(reached.values()))
