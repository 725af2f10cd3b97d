"""Which checkpoints a search deletes, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparkdl.errors import ConfigError
from sparkdl.tune import (
    AdaptiveAsha,
    Asha,
    AshaStopping,
    Grid,
    Hyperband,
    PopulationBasedTraining,
    RandomSearch,
    Searcher,
)
from sparkdl.tune.journal import Journal, TrialRecord
from sparkdl.tune.runner import OnEpoch, SearchRun, SegmentTraining
from sparkdl.tune.searchers.searcher import Goal, Segment
from sparkdl.tune.study import Study, dispensable
from sparkdl.tune.suggestions import Trial

LOSS = Goal("loss", False)


def record(number: int, *losses: float, state: str = "waiting") -> TrialRecord:
    metrics = {epochs: {"loss": loss} for epochs, loss in enumerate(losses, 1)}
    return TrialRecord(number, metrics=metrics, epochs=len(losses), state=state)


def test_only_trials_that_have_ended_count_as_better() -> None:
    records = [record(0, 0.5), record(1, 0.1), record(2, 0.9, 0.3), record(3, 0.4)]
    found = dispensable(records, LOSS, done={0, 2, 3}, keep_best=1)
    assert [r.number for r in found] == [0, 3]  # trial 1 is better, but may end worse than trial 2
    found = dispensable(records, LOSS, done={0, 1, 2, 3}, keep_best=2)
    assert [r.number for r in found] == [0, 3]


def test_failed_trials_and_trials_without_a_score_are_not_among_the_best() -> None:
    records = [record(0, 0.1, state="failed"), record(1), record(2, 0.9)]
    assert [r.number for r in dispensable(records, LOSS, {0, 1, 2}, 1)] == [0, 1]


class Kept:
    """Trains by a formula; fails where a checkpoint is asked for that is not there."""

    def __init__(self, there: set[int]) -> None:
        self.there, self.most, self.running = there, 0, 0

    def prepare(self, trial: Trial, segment: Segment, on_epoch: OnEpoch) -> SegmentTraining:
        x = trial.suggest_float("x", 0, 1)
        needed = segment.trial if segment.parent is None else segment.parent
        assert segment.begin == 0 or needed in self.there, f"{segment}: no checkpoint"
        self.there.add(segment.trial)
        self.most = max(self.most, len(self.there))
        return lambda: {"loss": abs(x - 0.3) + 1 / segment.end}

    def cancel(self) -> None:
        pass

    def keep(self, trial: int, epochs: Any) -> None:
        pass

    def delete(self, trial: int) -> None:
        self.there.remove(trial)


SEARCHERS: list[Callable[[], Searcher]] = [
    lambda: RandomSearch(20, 2),
    lambda: Grid({"x": [0.1, 0.2, 0.4, 0.8]}, 2),
    lambda: Asha(30, 27, 3, 4),
    lambda: AshaStopping(30, 27, 3, 4),
    lambda: AdaptiveAsha(30, 27, 3, 4),
    lambda: Hyperband(9, 3),
    lambda: PopulationBasedTraining(8, 30, 5),
]


def run(
    journal: Journal, trainer: Kept, searcher: Searcher, keep_best: int | None, stop_after: int = 0
) -> None:
    told = 0

    def count(trial: int, score: float) -> None:
        nonlocal told
        told += 1
        if told == stop_after:
            raise KeyboardInterrupt

    SearchRun(
        searcher, trainer, journal, LOSS, seed=0, max_concurrent=3, timeout_s=None,
        on_score=count, keep_best=keep_best,
    ).run()  # fmt: skip


@pytest.mark.parametrize("make", SEARCHERS)
def test_the_best_keep_theirs_and_none_is_missed(
    make: Callable[[], Searcher], tmp_path: Any
) -> None:
    found = {}
    for keep_best in (None, 2):
        journal = Journal.at(str(tmp_path / str(keep_best)), {}, resume=False)
        trainer = Kept(set())
        run(journal, trainer, make(), keep_best)
        study = Study(journal, LOSS, lambda r: r.number, lambda *a: None, temporary=None)  # type: ignore[arg-type,return-value]
        found[keep_best] = study, trainer
    assert {r.number: r.params for r in found[2][0].records} == {
        r.number: r.params for r in found[None][0].records
    }
    study, trainer = found[2]
    best = [r.number for r in study.ranked()[:2]]
    assert trainer.there == {*best}
    assert study.best_models(2) == best
    with pytest.raises(ConfigError, match="was not kept"):
        study.best_models(3)
    assert found[None][1].there == {r.number for r in found[None][0].records}


def test_checkpoints_go_while_the_search_runs(tmp_path: Any) -> None:
    trainer = Kept(set())
    run(Journal.at(str(tmp_path), {}, resume=False), trainer, RandomSearch(40, 2), 2)
    assert trainer.most <= 2 + 3  # the best, and those that train


@pytest.mark.parametrize("make", SEARCHERS)
def test_a_search_that_was_cut_off_finds_what_it_goes_on_from(
    make: Callable[[], Searcher], tmp_path: Any
) -> None:
    trainer = Kept(set())
    with pytest.raises(KeyboardInterrupt):
        run(Journal.at(str(tmp_path), {}, resume=False), trainer, make(), 2, stop_after=3)
    journal = Journal.at(str(tmp_path), {}, resume=True)
    run(journal, trainer, make(), 2)
    assert len(trainer.there) == 2
    assert {n for n, r in journal.trials.items() if r.kept} == trainer.there
