"""Samplers: the values of new trials, from those before them."""

from __future__ import annotations

import math
import statistics
import zlib
from typing import Any

import pytest

from sparkdl.errors import ConfigError
from sparkdl.progress.events import Event, TrialBegan, TrialEnded, TrialEpochEnded
from sparkdl.tune import Asha, OptunaSampler, RandomSearch, Trial
from sparkdl.tune.journal import Journal
from sparkdl.tune.runner import OnEpoch, SearchRun, SegmentTraining
from sparkdl.tune.searchers import Searcher
from sparkdl.tune.searchers.searcher import Goal, Segment
from sparkdl.tune.suggestions import Drawn, Experience, Outcome, Sampler, Space, Value

optuna = pytest.importorskip("optuna")
SPACES = {
    "x": Space("float", 0.0, 1.0),
    "rate": Space("float", 1e-4, 1.0, log=True),
    "units": Space("int", 8.0, 64.0, step=8.0),
    "kind": Space("categorical", choices=("a", None, True)),
}


def known(x: float, score: float, outcome: Outcome = "complete") -> Experience:
    return Experience({"x": x}, {"x": SPACES["x"]}, {3: score}, outcome)


def drawn(sampler: Sampler, number: int, past: list[Experience], seed: int = 0) -> dict[str, Value]:
    draw = sampler.draws(number, seed, past)
    return {name: draw(name, space) for name, space in SPACES.items()}


def test_the_same_seed_and_experience_give_the_same_values_within_their_spaces() -> None:
    past = [known(x / 40, -((x / 40 - 0.7) ** 2)) for x in range(40)]
    found = drawn(OptunaSampler(), 40, past)
    assert found == drawn(OptunaSampler(), 40, past)
    assert found != drawn(OptunaSampler(), 40, past, seed=1)
    assert found != drawn(OptunaSampler(), 41, past)
    assert 1e-4 <= found["rate"] <= 1  # type: ignore[operator]
    assert found["units"] in range(8, 65, 8)
    assert found["kind"] in ("a", None, True)
    assert {type(found["x"]), type(found["units"])} == {float, int}


@pytest.mark.parametrize("outcome", ["complete", "paused"])
def test_values_come_from_where_trials_were_good(outcome: Outcome) -> None:
    past = [known(x / 40, -((x / 40 - 0.7) ** 2), outcome) for x in range(40)]
    found = [OptunaSampler().draws(40 + n, 0, past)("x", SPACES["x"]) for n in range(20)]
    assert abs(statistics.median(found) - 0.7) < 0.1
    by_chance = [Drawn().draws(40 + n, 0, past)("x", SPACES["x"]) for n in range(20)]
    assert statistics.stdev(found) < 0.5 * statistics.stdev(by_chance)


def test_trials_side_by_side_differ() -> None:
    """What runs counts as bad until it has a score."""
    past = [known(x / 40, -((x / 40 - 0.7) ** 2)) for x in range(40)]
    running = [Experience({"x": 0.7}, {"x": SPACES["x"]}, {}, "running") for _ in range(12)]
    near = [OptunaSampler().draws(n, 0, past)("x", SPACES["x"]) for n in range(52, 72)]
    away = [OptunaSampler().draws(n, 0, past + running)("x", SPACES["x"]) for n in range(52, 72)]
    assert sum(abs(x - 0.7) < 0.05 for x in away) < sum(abs(x - 0.7) < 0.05 for x in near)


def test_failed_trials_and_infinite_scores_are_no_obstacle() -> None:
    past = [known(0.1, -math.inf, "failed"), known(0.2, -math.inf), known(0.3, math.nan, "paused")]
    assert 0 <= OptunaSampler().draws(3, 0, past)("x", SPACES["x"]) <= 1  # type: ignore[operator]


def test_another_sampler_of_optuna_and_a_class_in_its_place() -> None:
    sampler = OptunaSampler(lambda seed: optuna.samplers.RandomSampler(seed=seed))
    assert drawn(sampler, 0, []) == drawn(sampler, 0, [])
    with pytest.raises(ConfigError, match="make"):
        OptunaSampler(optuna.samplers.RandomSampler)


def test_optunas_own_loop_gives_the_same_first_trials() -> None:
    """Ten trials by chance, one seed each; then those of the same study by Optuna itself."""
    past: list[Experience] = []
    theirs = optuna.create_study(direction="maximize")
    for number in range(16):
        x = OptunaSampler().draws(number, 5, past)("x", SPACES["x"])
        seed = zlib.crc32(f"5 {number}".encode())
        theirs.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        trial = theirs.ask()
        assert trial.suggest_float("x", 0, 1) == x
        score = -((float(x or 0) - 0.3) ** 2)
        theirs.tell(trial, score)
        past.append(known(float(x or 0), score))


class Formula:
    """Trains by a formula, an epoch after the other."""

    def __init__(self) -> None:
        self.trained: list[tuple[int, int, int]] = []

    def prepare(self, trial: Trial, segment: Segment, on_epoch: OnEpoch) -> SegmentTraining:
        x = trial.suggest_float("x", 0, 1)

        def train() -> dict[str, float]:
            self.trained.append((segment.trial, segment.begin, segment.end))
            for epoch in range(segment.begin, segment.end):
                on_epoch(epoch, {"loss": (x - 0.3) ** 2 + 1 / (1 + epoch)})
            return {"loss": (x - 0.3) ** 2 + 1 / segment.end}

        return train

    def cancel(self) -> None:
        pass

    def keep(self, trial: int, epochs: Any) -> None:
        pass

    def delete(self, trial: int) -> None:
        raise AssertionError("all are kept")


def run(
    folder: Any, searcher: Searcher, *, stop_after: int = 0, resume: bool = False,
    at_once: int = 1, sampler: Sampler | None = None,
) -> Any:  # fmt: skip
    """Runs a search, or its beginning; the trials' parameters, the segments, the events."""
    journal = Journal.at(str(folder), {"seed": 3}, resume=resume)
    trainer, events, told = Formula(), list[Event](), 0

    def count(trial: int, score: float) -> None:
        nonlocal told
        told += 1
        if told == stop_after:
            raise KeyboardInterrupt

    try:
        SearchRun(
            searcher, trainer, journal, Goal("loss", False), seed=3, timeout_s=None,
            max_concurrent=at_once, on_score=count, sampler=sampler or OptunaSampler(),
            tell_sinks=events.append,
        ).run()  # fmt: skip
    except KeyboardInterrupt:
        assert stop_after
    return {n: r.params for n, r in sorted(journal.trials.items())}, trainer.trained, events


def test_a_search_that_was_cut_off_goes_on_with_the_same_trials(tmp_path: Any) -> None:
    whole, segments, _ = run(tmp_path / "whole", Asha(20, 9, 3, 3))
    first, before, _ = run(tmp_path / "cut", Asha(20, 9, 3, 3), stop_after=16)
    second, after, events = run(tmp_path / "cut", Asha(20, 9, 3, 3), resume=True)
    assert whole == second
    assert {**whole, **first} == whole
    assert before + after == segments  # none twice
    past = [e for e in events if isinstance(e, TrialBegan)][: len(first)]
    assert {e.trial: e.params for e in past} == first


def test_the_same_seed_gives_the_same_trials_however_many_train_at_a_time(tmp_path: Any) -> None:
    found = [
        run(tmp_path / str(at_once), Asha(20, 9, 3, 3), at_once=at_once, sampler=Drawn())[0]
        for at_once in (1, 4, 20)
    ]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 20


def test_events_tell_each_trial_and_its_epochs(tmp_path: Any) -> None:
    _, segments, events = run(tmp_path, RandomSearch(3, 2))
    assert [(e.trial, e.epoch) for e in events if isinstance(e, TrialEpochEnded)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    began = [(e.trial, e.begin, e.end) for e in events if isinstance(e, TrialBegan)]
    assert began == segments
    ended = [(e.trial, e.epochs, e.state) for e in events if isinstance(e, TrialEnded)]
    assert ended == [(0, 2, "complete"), (1, 2, "complete"), (2, 2, "complete")]
