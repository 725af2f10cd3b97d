from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from tune_simulation import counted, simulate

from sparkdl.errors import ConfigError
from sparkdl.tune import searchers
from sparkdl.tune.searchers import (
    AdaptiveAsha,
    Asha,
    AshaStopping,
    Grid,
    Hyperband,
    PopulationBasedTraining,
    RandomSearch,
    Searcher,
    Single,
)
from sparkdl.tune.searchers.rungs import make_rungs, rungs_that_differ, trials_of_brackets
from sparkdl.tune.suggestions import Space, Trial


@pytest.mark.parametrize(
    ("number", "divisor", "epochs", "rungs"),
    [(3, 3, 9, [1, 3, 9]), (4, 2, 10, [1, 2, 5, 10]), (1, 3, 9, [9]), (3, 3, 900, [100, 300, 900])],
)
def test_rungs(number: int, divisor: int, epochs: int, rungs: list[int]) -> None:
    assert make_rungs(number, divisor, epochs) == rungs


def test_trials_of_brackets() -> None:
    assert trials_of_brackets(50, 3, [4, 3]) == [35, 15]
    assert trials_of_brackets(100, 4, [4, 3, 2]) == [70, 22, 8]


def test_fewer_rungs_where_epochs_or_trials_are_few() -> None:
    assert rungs_that_differ(5, 3, 27, 100) == 4  # 1, 3, 9, 27
    assert rungs_that_differ(5, 3, 81, 9) == 3  # nine trials: three, then one
    assert rungs_that_differ(5, 4, 1, 1) == 1


def test_whole_trials() -> None:
    assert simulate(RandomSearch(5, 7), lambda t, e: t)[0] == dict.fromkeys(range(5), 7)
    assert simulate(Single(3), lambda t, e: t)[0] == {0: 3}
    grid = Grid({"units": [1, 2], "rate": [0.1, 0.2, 0.3]}, 4)
    assert simulate(grid, lambda t, e: t)[0] == dict.fromkeys(range(6), 4)
    assert [grid.parameters(t)["units"] for t in range(6)] == [1, 1, 1, 2, 2, 2]
    assert grid.parameters(5) == {"units": 2, "rate": 0.3}


def test_a_failed_trial_is_replaced_a_cell_of_a_grid_is_not() -> None:
    reached, _ = simulate(RandomSearch(4, 2), lambda t, e: -math.inf if t < 2 else t)
    assert len(reached) == 6
    assert len(simulate(RandomSearch(4, 2), lambda t, e: math.nan)[0]) == 8  # and no more
    assert len(simulate(Grid({"x": [1, 2, 3]}, 2), lambda t, e: -math.inf)[0]) == 3


@pytest.mark.parametrize("sign", [1, -1])
def test_asha_promotes_the_best_third_of_twelve(sign: int) -> None:
    """Worse and worse trials, or better and better ones: 8, 3 and 1 of them on three rungs."""
    best_first, _ = simulate(Asha(12, 90, 3, 3), lambda t, e: -sign * t, workers=3)
    counts = counted(best_first)
    assert sum(counts.values()) == 12
    if sign == 1:
        assert counts == {10: 8, 30: 3, 90: 1}
        assert best_first[0] == 90
    else:  # better ones come later: some were promoted before these were known
        assert counts[90] >= 1
        assert best_first[11] == 90


def test_asha_promotes_nobody_on_no_evidence() -> None:
    asha = Asha(12, 90, 3, 3)
    for trial in range(2):
        assert asha.ask().trial == trial
        asha.tell(trial, 10, 1.0 - trial)
    assert asha.ask().trial == 2  # two of three are no reason
    asha.tell(2, 10, 0.5)
    third = asha.ask()
    assert (third.trial, third.begin, third.end) == (0, 10, 30)


def test_asha_skips_a_failed_trial_for_the_next_best() -> None:
    failed = {(2, 30)}
    reached, _ = simulate(
        Asha(12, 90, 3, 3), lambda t, e: -math.inf if (t, e) in failed else -t, workers=3
    )
    assert reached[0] == 90
    assert len(reached) == 13  # it was replaced


def test_asha_trains_the_best_to_the_end_where_rungs_are_too_small() -> None:
    reached, _ = simulate(Asha(2, 16, 4, 3), lambda t, e: t)
    assert max(reached.values()) == 16
    assert reached[1] == 16
    all_failed, _ = simulate(Asha(3, 16, 4, 3), lambda t, e: math.nan)
    assert max(all_failed.values()) < 16 or len(all_failed) == 6


def test_asha_by_stopping() -> None:
    worse, _ = simulate(AshaStopping(10, 900, 3, 3), lambda t, e: -t, workers=3)
    assert counted(worse) == {100: 9, 900: 1}
    better, _ = simulate(AshaStopping(10, 900, 3, 3), lambda t, e: t, workers=3)
    assert counted(better) == {900: 10}  # each was the best so far


def test_adaptive_asha_has_the_brackets_of_its_mode() -> None:
    def rungs(mode: str) -> list[list[int]]:
        search = AdaptiveAsha(100, 64, 4, 4, mode)
        return [[r.epochs for r in b.rungs] for b in search.brackets if isinstance(b, Asha)]

    assert rungs("aggressive") == [[1, 4, 16, 64]]
    assert rungs("standard") == [[1, 4, 16, 64], [4, 16, 64], [16, 64]]
    assert rungs("conservative") == [[1, 4, 16, 64], [4, 16, 64], [16, 64], [64]]
    reached, _ = simulate(AdaptiveAsha(50, 27, 3, 4), lambda t, e: -t, workers=4)
    assert sorted(reached) == list(range(50))
    assert max(reached.values()) == 27


def test_hyperband_of_81_epochs_is_the_papers_table() -> None:
    """Li et al. 2018, table 1: 81, 34, 15, 8 and 5 configurations."""
    search = Hyperband(81, 3)
    table = [(b._trials[0], b._epochs[0]) for b in search.brackets]  # type: ignore[attr-defined]
    assert table == [(81, 1), (34, 3), (15, 9), (8, 27), (5, 81)]
    reached, _ = simulate(search, lambda t, e: -t, workers=5)
    assert len(reached) == 81 + 34 + 15 + 8 + 5
    assert counted(reached)[81] == 1 + 1 + 1 + 2 + 5


def test_population_copies_the_best_over_the_worst() -> None:
    search = PopulationBasedTraining(4, 20, 5, 0.25, 0.0, seed=1)
    space = {"rate": Space("float", 0.0, 10.0)}
    for _ in range(4):
        segment = search.ask()
        search.built(segment.trial, space, {"rate": float(segment.trial)})
    for trial in range(4):
        search.tell(trial, 5, 3 - trial)  # the last is the worst
    segments = [search.ask() for _ in range(4)]
    copy = next(s for s in segments if s.parent is not None)
    assert (copy.trial, copy.parent, copy.begin, copy.end) == (4, 0, 5, 10)
    search.built(0, space, {"rate": 5.0})
    assert search.parameters(4)["rate"] in (0.0,)  # 0.8 or 1.2 times nothing
    assert [s.trial for s in segments if s.parent is None] == [0, 1, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSearch(64, 27), lambda: Asha(64, 27, 3), lambda: AshaStopping(64, 27, 3),
        lambda: AdaptiveAsha(64, 27, 3), lambda: Hyperband(27, 3),
        lambda: Grid({"x": list(range(64))}, 9),
    ],
)  # fmt: skip
def test_the_same_calls_give_the_same_segments(make: Callable[[], Searcher]) -> None:
    def score(trial: int, epochs: int) -> float:
        return math.sin(trial * 7.3) + epochs / 100

    assert simulate(make(), score, 5) == simulate(make(), score, 5)


def test_many_workers_reach_the_target_in_a_share_of_the_time() -> None:
    """Within 20 % of linear, from 1 to 64 workers."""

    def score(trial: int, epochs: int) -> float:
        return math.sin(trial * 7.3)

    alone = simulate(Asha(4096, 27, 3, 4), score, 1)[1]
    for workers in (4, 16, 64):
        assert simulate(Asha(4096, 27, 3, 4), score, workers)[1] * workers <= 1.2 * alone


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Asha(0), "max_trials"),
        (lambda: Asha(4, 0), "max_epochs"),
        (lambda: Asha(4, 4, 1), "divisor"),
        (lambda: AdaptiveAsha(mode="fast"), "mode"),
        (lambda: Grid({}), "values"),
        (lambda: PopulationBasedTraining(quantile=0.9), "quantile"),
        (lambda: RandomSearch(2.5), "max_trials"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()


def test_suggestions_are_the_same_in_any_order() -> None:
    first, second = Trial(3, seed=1), Trial(3, seed=1)
    a = (first.suggest_float("rate", 1e-4, 1.0, log=True), first.suggest_int("units", 8, 64))
    b = second.suggest_int("units", 8, 64), second.suggest_float("rate", 1e-4, 1.0, log=True)
    assert a == (b[1], b[0])
    assert Trial(4, seed=1).suggest_int("units", 0, 10**9) != Trial(3, seed=1).suggest_int(
        "units", 0, 10**9
    )
    assert first.params == {"rate": a[0], "units": a[1]}
    assert first.suggest_int("units", 8, 64) == a[1]
    with pytest.raises(ConfigError, match="twice"):
        first.suggest_int("units", 8, 65)


def test_suggestions_cover_their_spaces() -> None:
    trials = [Trial(n) for n in range(200)]
    assert {t.suggest_int("n", 1, 4) for t in trials} == {1, 2, 3, 4}
    assert {t.suggest_int("even", 2, 8, step=2) for t in trials} == {2, 4, 6, 8}
    assert {t.suggest_categorical("c", ["a", None, True]) for t in trials} == {"a", None, True}
    steps = {round(t.suggest_float("f", 0, 1, step=0.25), 2) for t in trials}
    assert steps == {0, 0.25, 0.5, 0.75, 1}
    logs = sorted(t.suggest_float("l", 1e-4, 1, log=True) for t in trials)
    assert 1e-4 <= logs[0] < 1e-3 < 0.004 < logs[100] < 0.04 < logs[-1] <= 1
    assert Trial(0, given={"n": 3}).suggest_int("n", 1, 4) == 3


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.suggest_float("x", 2, 1), lambda t: t.suggest_float("x", 0, 1, log=True),
        lambda t: t.suggest_int("x", 0, 4, step=0), lambda t: t.suggest_categorical("x", []),
        lambda t: t.suggest_categorical("x", [object()]),
        lambda t: t.suggest_float("x", math.nan, 1),
    ],
)  # fmt: skip
def test_empty_spaces_are_refused(ask: Callable[[Trial], Any]) -> None:
    with pytest.raises(ConfigError, match="'x'"):
        ask(Trial(0))


def test_all_searchers_are_exported() -> None:
    from sparkdl import tune

    assert {*searchers.__all__} - {*tune.__all__} == {"SuccessiveHalving", "WORST"}
