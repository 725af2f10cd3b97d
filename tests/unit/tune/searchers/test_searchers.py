from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
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
    SuccessiveHalving,
)
from sparkdl.tune.searchers.brackets import make_rungs, rungs_that_differ, trials_of_brackets
from sparkdl.tune.searchers.searcher import Goal, Segment
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


def test_determineds_simulation_of_ten_trials() -> None:
    """``TestSimulateASHA``: brackets of 7 and 3; 5 end at 100 batches, 3 at 300, 2 at 900.

    Before, the first bracket began at 300: seven trials were too few for three rungs.
    """
    search = AdaptiveAsha(10, 900, 3, 10)
    assert [[r.epochs for r in b.rungs] for b in search.brackets if isinstance(b, Asha)] == [
        [100, 300, 900], [300, 900],
    ]  # fmt: skip
    reached, _ = simulate(search, lambda t, e: -t, workers=5)
    assert counted(reached) == {100: 5, 300: 3, 900: 2}


def test_determineds_trials_that_exit_early() -> None:
    """``TestASHASearchMethod``, "early exit": the third of twelve fails on the second rung, and the
    fourth goes on in its place; here a thirteenth replaces it."""

    def score(trial: int, epochs: int) -> float:
        return -math.inf if (trial, epochs) == (2, 30) else -trial

    reached, _ = simulate(Asha(12, 90, 3, 3), score, workers=3)
    assert [reached[t] for t in range(4)] == [90, 30, 30, 30]
    assert len(reached) == 13


# The cases of Optuna's test_successive_halving.py, with rungs that are known beforehand.


def halved(max_epochs: int = 8, max_rungs: int = 4, **more: int) -> AshaStopping:
    return AshaStopping(16, max_epochs, 2, max_rungs, **more)


def climb(search: Searcher, score: float) -> list[int]:
    """The rungs at which a new trial with this score is compared."""
    segment = search.ask()
    assert segment is not None
    assert segment.begin == 0
    told = []
    while segment is not None and (not told or segment.begin == told[-1]):
        told.append(segment.end)
        search.tell(segment.trial, segment.end, score)
        going_on = search._going_on  # type: ignore[attr-defined]
        segment = search.ask() if going_on else None
    return told


@pytest.mark.parametrize(("maximize", "second"), [(False, 2.0), (True, 0.5)])
def test_optuna_the_first_goes_on_and_a_worse_second_does_not(
    maximize: bool, second: float
) -> None:
    search, goal = halved(), Goal("value", maximize)
    assert climb(search, goal.score({"value": 1.0})) == [1, 2, 4, 8]
    assert climb(search, goal.score({"value": second})) == [1]


def test_optuna_rungs_that_trials_complete() -> None:
    search = halved(4, 3)
    for place in range(7):
        climb(search, -0.1 * (place + 1))
    assert climb(search, -0.75) == [1]
    assert climb(search, -0.25) == [1, 2]
    assert climb(search, -0.05) == [1, 2, 4]


def test_optuna_a_trial_that_is_no_number_ends_at_its_rung() -> None:
    search = halved(8, 3)
    assert climb(search, math.nan) == [2]
    assert climb(search, 1.0) == [2, 4, 8]


def test_optuna_where_the_first_rung_is() -> None:
    """Optuna's ``min_resource`` is ``max_epochs / divisor ** (max_rungs - 1)``."""
    assert climb(halved(8, 4), 1.0)[0] == 1
    assert climb(halved(8, 3), 1.0)[0] == 2
    assert climb(AshaStopping(16, 9, 3, 3), 1.0) == [1, 3, 9]
    for wrong in ({"max_epochs": 0}, {"max_epochs": "fixed"}, {"divisor": 1}):
        with pytest.raises(ConfigError):
            AshaStopping(**wrong)  # type: ignore[arg-type]


def test_optuna_min_early_stopping_rate() -> None:
    assert climb(halved(min_early_stopping_rate=0), 1.0) == [1, 2, 4, 8]
    assert climb(halved(min_early_stopping_rate=1), 1.0) == [2, 4, 8]
    assert climb(halved(min_early_stopping_rate=9), 1.0) == [8]
    assert [r.epochs for r in Asha(16, 8, 2, 4, min_early_stopping_rate=2).rungs] == [4, 8]
    with pytest.raises(ConfigError, match="min_early_stopping_rate"):
        halved(min_early_stopping_rate=-1)


def test_optuna_bootstrap_count() -> None:
    search = halved(bootstrap_count=1)
    assert climb(search, 1.0) == [1]
    assert climb(search, 1.5) == [1, 2]
    assert climb(search, 2.0) == [1, 2, 4]
    for wrong in (-1, 16):
        with pytest.raises(ConfigError, match="bootstrap_count"):
            halved(bootstrap_count=wrong)


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


def halving(failing: set[tuple[int, int]]) -> tuple[dict[int, int], SuccessiveHalving]:
    """Nine trials, three and one, after 1, 3 and 9 epochs; of two the lower number is better."""
    search = SuccessiveHalving([9, 3, 1], [1, 3, 9])

    def score(trial: int, epochs: int) -> float:
        return math.nan if (trial, epochs) in failing else -trial

    return simulate(search, score, 2)[0], search


def test_hyperband_replaces_failed_trials_of_the_first_rung_by_new_ones() -> None:
    """Before, a trial that failed went on where the rung had not enough others."""
    reached, search = halving({(t, 1) for t in range(8)})
    assert reached == dict.fromkeys(range(8), 1) | {8: 9, 9: 3, 10: 3} | dict.fromkeys(
        range(11, 17), 1
    )
    assert all(search.is_done(t) for t in reached)
    reached, _ = halving({(t, 1) for t in range(30)})
    assert reached == dict.fromkeys(range(18), 1)  # twice as many as there should be, and no more


def test_hyperband_replaces_failed_trials_of_later_rungs_by_the_next_best() -> None:
    reached, _ = halving({(0, 3), (2, 3)})
    assert {t for t, epochs in reached.items() if epochs >= 3} == {0, 1, 2, 3, 4}
    assert reached[1] == 9
    assert len(reached) == 9
    reached, _ = halving({(0, 9)})
    assert [reached[t] for t in range(3)] == [9, 9, 3]  # the second best goes to the end
    reached, search = halving({(t, 3) for t in range(9)})
    assert max(reached.values()) == 3
    assert len([e for e in reached.values() if e == 3]) == 6  # those, and the next best three
    assert all(search.is_done(t) for t in reached)


def test_of_a_bracket_the_next_best_can_go_on_until_the_rung_is_over() -> None:
    search = SuccessiveHalving([4, 2], [1, 3])
    for _ in range(4):
        search.tell(search.ask().trial, 1, 1.0)  # type: ignore[union-attr]
    assert [search.is_done(t) for t in range(4)] == [False] * 4
    for _ in range(2):
        search.tell(search.ask().trial, 3, 1.0)  # type: ignore[union-attr]
    assert search.ask() is None
    assert [search.is_done(t) for t in range(4)] == [True] * 4


RATE = {"rate": Space("float", 0.0, 10.0)}


def population(*scores: float, count: int = 4) -> PopulationBasedTraining:
    """Trials 0, 1, ... of the first round have these scores; all have a rate of 1 + number."""
    search = PopulationBasedTraining(count, 20, 5, 0.25, 0.0, seed=1)
    for number, score in enumerate(scores):
        segment = search.ask()
        assert segment is not None
        assert (segment.trial, segment.begin, segment.end) == (number, 0, 5)
        search.built(number, RATE, {"rate": 1.0 + number})
        search.tell(number, 5, score)
    return search


def asked(search: Searcher) -> list[Segment]:
    return list(iter(search.ask, None))  # type: ignore[arg-type]


def test_population_copies_the_best_over_the_worst() -> None:
    search = population(3, 2, 1)
    fourth = search.ask()
    assert search.ask() is None  # a round ends before the next begins
    search.built(3, RATE, {"rate": 4.0})
    search.tell(3, 5, 0)
    assert fourth.trial == 3
    assert search.copied_after(0) == {5}
    assert [search.is_done(t) for t in range(4)] == [False, False, False, True]
    assert asked(search) == [
        Segment(0, 5, 10), Segment(1, 5, 10), Segment(2, 5, 10), Segment(4, 5, 10, parent=0),
    ]  # fmt: skip
    assert search.parameters(4)["rate"] in (0.8, 1.2)
    search.built(4, RATE, search.parameters(4))
    search.tell(0, 10, 1)
    assert search.copied_after(0) == {5}  # the copy may have to begin again
    search.tell(4, 10, 2)
    assert search.copied_after(0) == frozenset()


def test_population_replaces_trials_that_fail_in_the_first_round_by_new_ones() -> None:
    """Before, a trial that failed before enough others were known was trained on."""
    search = population(math.nan, 2, 1, 0, -math.inf, 3)
    assert search.parameters(4) == {}
    assert [s.trial for s in asked(search)] == [5, 1, 2, 6]  # for trial 3 a copy
    assert [search.is_done(t) for t in (0, 3, 4)] == [True] * 3
    failing, _ = simulate(PopulationBasedTraining(4, 20, 5), lambda t, e: math.nan)
    assert failing == dict.fromkeys(range(8), 5)


def test_population_replaces_trials_that_fail_later_by_copies() -> None:
    search = population(3, 2, 1, 0)
    segments = asked(search)
    for segment, score in zip(segments, (math.nan, 5.0, 4.0, math.nan), strict=True):
        search.built(segment.trial, RATE, {"rate": 1.0})
        search.tell(segment.trial, 10, score)
    assert [(s.trial, s.parent) for s in asked(search)] == [(5, 1), (1, None), (2, None), (6, 1)]
    for trial in (5, 1, 2, 6):
        search.tell(trial, 15, math.nan)
    assert search.ask() is None
    assert all(search.is_done(t) for t in range(7))


def test_population_trains_to_the_end() -> None:
    made: dict[int, int] = {}

    def score(trial: int, epochs: int) -> float:
        made[trial] = epochs
        return -float(trial)

    search = PopulationBasedTraining(8, 30, 5)
    for trial in range(100):
        search.built(trial, RATE, {"rate": 1.0})
    simulate(search, score, 3)
    assert Counter(made.values())[30] == 8
    assert len(made) == 8 + 5 * 2  # two copies at the end of each round but the last


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSearch(10, 7), lambda: Single(3), lambda: Grid({"x": [1, 2, 3]}, 4),
        lambda: Asha(64, 27, 3), lambda: AdaptiveAsha(64, 27, 3), lambda: Hyperband(27, 3),
    ],
)  # fmt: skip
def test_how_many_epochs_a_search_will_train(make: Callable[[], Searcher]) -> None:
    expected = make().expected_epochs
    reached, _ = simulate(make(), lambda t, e: -t, 4)
    assert expected is not None
    assert sum(reached.values()) == pytest.approx(expected, rel=0.1)
    assert PopulationBasedTraining(8, 30).expected_epochs == 240


def test_many_workers_do_all_of_it_in_a_share_of_the_time() -> None:
    """Within 20 % of linear, from 1 to 64 workers."""

    def score(trial: int, epochs: int) -> float:
        return math.sin(trial * 7.3)

    alone = simulate(Asha(4096, 27, 3, 4), score, 1)[1]
    for workers in (4, 16, 64):
        assert simulate(Asha(4096, 27, 3, 4), score, workers)[1] * workers <= 1.2 * alone


def time_to_target(workers: int, seed: int) -> float:
    """Epochs of time until a trial of the best two thousandth is trained to the end.

    A trial's score rises with its epochs, so only whole trials reach the target.
    """
    quality = np.random.default_rng(seed).random(100_000)
    return simulate(
        Asha(100_000, 27, 3, 4), lambda t, e: quality[t] - 0.3 / e, workers, 0.9995 - 0.3 / 27
    )[1]


@pytest.mark.parametrize("seed", [5, 11])
def test_many_workers_reach_the_target_in_a_share_of_the_time(seed: int) -> None:
    """Within 20 % of linear, from 1 to 64 workers.

    With these seeds one worker needs some 8000 epochs: a search that finds a good trial among its
    first ones has nothing to share.
    """
    alone = time_to_target(1, seed)
    assert 7000 < alone < 9000
    for workers in (2, 8, 64):
        assert alone <= time_to_target(workers, seed) * workers <= 1.2 * alone


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
