"""Which trials' checkpoints a search can do without."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sparkdl.tune.goal import Goal
from sparkdl.tune.journal import TrialRecord


def ranked(records: Iterable[TrialRecord], goal: Goal) -> list[TrialRecord]:
    """The trials that have a score and did not fail, best first; by their last comparison, or by
    their best epoch where the search keeps that. Of equal ones that with the lower number is
    first."""
    whole = [r for r in records if r.metrics and r.state != "failed"]
    return sorted(whole, key=lambda r: (-goal.score(r.model_metrics), r.number))


def dispensable(
    records: Collection[TrialRecord], goal: Goal, done: Collection[int], keep_best: int
) -> list[TrialRecord]:
    """The trials whose checkpoints may go, as nobody will ask for them.

    They will not train again, and so many that will not train again either are better. One that
    still trains does not count as better: it may end worse.

    Args:
        records: All trials.
        goal: The metric.
        done: Numbers of the trials that neither train again nor are copied.
        keep_best: So many of the best keep their checkpoints.
    """
    ended = [r for r in records if r.number in done]
    kept = {r.number for r in ranked(ended, goal)[:keep_best]}
    return [r for r in ended if r.number not in kept and r.kept]
