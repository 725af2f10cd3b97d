"""What a search does with the segments that it trains: failures, its time limit, checkpoints."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkdl.errors import ConfigError
from sparkdl.progress.events import Event, TrialEnded
from sparkdl.tune import (
    Asha,
    PopulationBasedTraining,
    RandomSearch,
    Searcher,
    Segment,
    Trial,
    runner,
)
from sparkdl.tune.journal import Journal, TrialRecord
from sparkdl.tune.runner import OnEpoch, SearchRun, SegmentTraining
from sparkdl.tune.searchers.searcher import Goal
from sparkdl.tune.study import Study

ACCURACY = Goal("accuracy", True)


class Folders:
    """Trains by a formula; its folders keep two checkpoints, and those that are to be kept.

    Args:
        value: Trial and epochs done -> accuracy.
        cut: Trial and epochs: it waits there until the search cancels it.
    """

    def __init__(self, value: Callable[[int, int], float], cut: tuple[int, int] = (-1, 0)) -> None:
        self.value, self.cut = value, cut
        self.there: dict[int, list[int]] = {}
        self.kept: dict[int, set[int]] = {}
        self.cancelled = threading.Event()
        self.waiting = 0

    def wait(self) -> None:
        self.waiting += 1
        assert self.cancelled.wait(60)

    def prepare(self, trial: Trial, segment: Segment, on_epoch: OnEpoch) -> SegmentTraining:
        trial.suggest_float("rate", 0, 1)
        if segment.parent is not None:
            assert segment.begin in self.there[segment.parent]
            self.there[segment.trial] = [segment.begin]

        def train() -> Mapping[str, float]:
            for epochs in range(segment.begin + 1, segment.end + 1):
                if (segment.trial, epochs) == self.cut:
                    self.wait()
                    raise RuntimeError("cancelled")
                told = {"accuracy": self.value(segment.trial, epochs)}
                on_epoch(epochs - 1, told)
                self._write(segment.trial, epochs)
            return told

        return train

    def _write(self, trial: int, epochs: int) -> None:
        there = self.there.setdefault(trial, [])
        there.append(epochs)
        kept = self.kept.get(trial, set())
        self.there[trial] = [e for e in there if e in kept or e in there[-2:]]

    def keep(self, trial: int, epochs: Collection[int]) -> None:
        self.kept[trial] = {*epochs}

    def cancel(self) -> None:
        self.cancelled.set()

    def delete(self, trial: int) -> None:
        del self.there[trial]


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> Callable[[Folders, int], None]:
    """The time of a search is over as soon as so many of its trials wait."""
    real = time.monotonic

    def over_when(trainer: Folders, waiting: int) -> None:
        class Clock:
            @staticmethod
            def monotonic() -> float:
                return real() + 3600.0 * (trainer.waiting >= waiting)

        monkeypatch.setattr(runner, "time", Clock)

    return over_when


def run(
    folder: Any, trainer: Folders, searcher: Searcher, *, resume: bool = False, **options: Any
) -> tuple[Study, list[tuple[int, float]]]:
    """A search; the study, whose models are the checkpoints' epochs, and what was scored."""
    scored: list[tuple[int, float]] = []
    journal = Journal.at(str(folder), {}, resume=resume)
    given = {"seed": 0, "max_concurrent": 1, "timeout_s": None, **options}
    SearchRun(
        searcher, trainer, journal, ACCURACY, on_score=lambda *told: scored.append(told), **given
    ).run()

    def load(record: TrialRecord) -> Any:
        assert record.model_epoch in trainer.there[record.number]
        return record.model_epoch

    return Study(journal, ACCURACY, load, lambda *a: None, temporary=None), scored  # type: ignore[arg-type,return-value]


def test_a_first_trial_without_a_number_is_scored_worst_and_replaced(tmp_path: Any) -> None:
    """Before, it counted as a success, and the line about it asked for the best trial."""
    trainer = Folders(lambda t, e: math.nan if t == 0 else 0.5)
    events: list[Event] = []
    with pytest.warns(RuntimeWarning, match="trial 0 failed: accuracy is NaN"):
        study, scored = run(tmp_path, trainer, RandomSearch(2, 1), tell_sinks=events.append)
    assert scored == [(1, 0.5), (2, 0.5)]
    assert [r.state for r in study.records] == ["failed", "waiting", "waiting"]
    assert [(e.trial, e.state) for e in events if isinstance(e, TrialEnded)] == [
        (0, "failed"), (1, "complete"), (2, "complete"),
    ]  # fmt: skip


def test_a_trial_without_a_number_is_no_success(tmp_path: Any) -> None:
    """The fourth trial is the third that raises: the search ends, though the first had an end."""

    def value(trial: int, epochs: int) -> float:
        if trial == 0:
            return math.nan
        raise ValueError(f"trial {trial}")

    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match="trial 1"):
        run(tmp_path, Folders(value), RandomSearch(9, 1))


def test_the_model_of_a_trial_that_was_stopped_is_that_of_its_score(
    tmp_path: Any, over: Any
) -> None:
    """Before, it was the newest checkpoint, epochs after the last comparison."""
    trainer = Folders(lambda t, e: 0.1 * e + 0.01 * t, cut=(2, 8))
    over(trainer, 1)
    study, scored = run(tmp_path, trainer, Asha(3, 9, 3), timeout_s=1800.0)
    assert [trial for trial, _ in scored] == [0, 1, 2]
    best = study.best_trial
    assert (best.number, best.state, best.epochs) == (2, "stopped", 3)
    assert study.best_value == pytest.approx(0.32)
    assert 7 in trainer.there[2]
    assert study.best_model == 3  # type: ignore[comparison-overlap]
    trainer.cut, trainer.waiting = (-1, 0), 0
    again, _ = run(tmp_path, trainer, Asha(3, 9, 3), resume=True)
    assert (again.best_trial.epochs, again.best_model, again.best_value) == (9, 9, 0.92)


def test_a_limit_before_the_first_score_leaves_a_study_without_a_best(
    tmp_path: Any, over: Any
) -> None:
    trainer = Folders(lambda t, e: 0.5, cut=(0, 1))
    over(trainer, 1)
    study, scored = run(tmp_path, trainer, RandomSearch(3, 2), timeout_s=1800.0)
    assert scored == []
    assert [r.state for r in study.records] == ["stopped"]
    assert study.ranked() == []
    nothing, _ = run(tmp_path / "no time", Folders(lambda t, e: 0.5), Asha(), timeout_s=0.0)
    assert nothing.records == []


def test_what_ends_well_while_the_search_is_stopped_counts(tmp_path: Any, over: Any) -> None:
    trainer = Folders(lambda t, e: 0.5, cut=(0, 2))
    whole = trainer.value

    def slow(trial: int, epochs: int) -> float:
        if trial == 1 and epochs == 2:
            trainer.wait()
        return whole(trial, epochs)

    trainer.value = slow
    over(trainer, 2)
    study, scored = run(tmp_path, trainer, RandomSearch(2, 2), timeout_s=1800.0, max_concurrent=2)
    assert scored == [(1, 0.5)]
    assert [r.state for r in study.records] == ["stopped", "waiting"]


PEAK = {1: 0.1, 2: 0.6, 3: 0.9, 4: 0.5, 5: 0.4, 6: 0.3, 7: 0.2, 8: 0.35, 9: 0.3}


def test_a_trial_stands_for_its_best_epoch_if_asked(tmp_path: Any) -> None:
    def value(trial: int, epochs: int) -> float:
        return PEAK[epochs] - 0.01 * trial

    trainer = Folders(value)
    study, _ = run(tmp_path / "best", trainer, RandomSearch(2, 9), best_epochs=True)
    assert (study.best_value, study.best_model, study.best_trial.epochs) == (0.9, 3, 9)
    assert study.trials["accuracy"].tolist() == [0.9, 0.89]
    assert trainer.there == {0: [3, 8, 9], 1: [3, 8, 9]}
    trainer = Folders(value)
    study, _ = run(tmp_path / "last", trainer, RandomSearch(2, 9))
    assert (study.best_value, study.best_model) == (0.3, 9)
    assert trainer.there == {0: [8, 9], 1: [8, 9]}


def test_the_best_epoch_of_an_earlier_segment_is_kept(tmp_path: Any) -> None:
    trainer = Folders(lambda t, e: PEAK[e] - 0.01 * t)
    study, _ = run(tmp_path, trainer, Asha(3, 9, 3, 3), best_epochs=True)
    assert study.best_trial.epochs == 9
    assert (study.best_value, study.best_model) == (0.9, 3)
    later = Folders(lambda t, e: 0.1 * e - 0.01 * t)
    study, _ = run(tmp_path / "later", later, Asha(3, 9, 3, 3), best_epochs=True)
    assert (study.best_value, study.best_model) == (0.9, 9)


def test_a_copy_begins_with_the_checkpoint_of_the_round_that_its_parent_won(tmp_path: Any) -> None:
    """Also where the parent trains on before the copy has a slot: ``Folders`` asserts it."""
    trainer = Folders(lambda t, e: -float(t))
    study, _ = run(tmp_path, trainer, PopulationBasedTraining(4, 20, 5), max_concurrent=1)
    assert len(study.records) == 4 + 3
    assert trainer.kept[0] == {15, 20}  # the last copy was told after its parent


def test_what_is_not_caught_ends_the_search(tmp_path: Any) -> None:
    def value(trial: int, epochs: int) -> float:
        if trial > 0:
            raise (KeyError if trial == 1 else ValueError)(f"trial {trial}")
        return 0.5

    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match="trial 2"):
        run(tmp_path, Folders(value), RandomSearch(5, 1), catch=(KeyError,))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 1}', "[" * 100_000])
def test_a_file_that_is_no_journal_is_one_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(ConfigError, match="no journal of a search"):
        Journal.at(str(tmp_path), {}, resume=True)
