"""Where time went, and the advice for each cause, by numbers that are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tracking_cases import usage

from sparkdl.tracking.profile import Facts, profile_of

EVEN = {0: 10_000, 1: 10_000}
GOOD = Facts(
    {rank: usage(start=9.0, read=0.1, compute=10.0, exchange=0.4) for rank in range(2)}, EVEN,
    epochs=1, batch_size=32, window=16, in_step=False, transports=frozenset({"shm"}),
    mode="asynchronous",
)  # fmt: skip


def cause(facts: Facts) -> str | None:
    advice = profile_of(facts).advice
    return None if advice is None else advice.cause


def both(**seconds: float) -> dict[int, object]:
    return dict.fromkeys(range(2), usage(start=5.0, **seconds))


@pytest.mark.parametrize(
    ("expected", "changed"),
    [
        (None, {}),
        ("slow reader", {"usage": both(read=5.0, compute=10.0)}),
        ("short window", {"usage": both(compute=10.0, exchange=9.0), "window": 1}),
        ("short window", {"usage": both(compute=10.0, exchange=9.0), "window": 4, "in_step": True}),
        ("slow transport", {"usage": both(compute=10.0, exchange=9.0), "window": 1,
                            "transports": frozenset({"http"})}),
        ("slow transport", {"usage": both(compute=10.0, exchange=9.0),
                            "transports": frozenset({"socket"})}),
        ("small batches", {"usage": both(compute=10.0), "batch_size": 1}),
        ("uneven rows", {"usage": {0: usage(compute=3.0, exchange=7.0), 1: usage(compute=10.0)},
                         "rows": {0: 3_000, 1: 10_000}, "in_step": True}),
        ("slow worker", {"usage": {0: usage(compute=3.0, exchange=7.2),
                                   1: usage(compute=10.0, exchange=0.2)}, "in_step": True}),
        ("slow worker", {"usage": {0: usage(compute=3.0), 1: usage(compute=10.0)}}),
    ],
)  # fmt: skip
def test_the_cause_that_costs_most_is_named(
    expected: str | None, changed: dict[str, object]
) -> None:
    assert cause(replace(GOOD, **changed)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (both(compute=3.0, exchange=7.0), "2 workers are at 0.6 of one process here"),
        (both(compute=2.5, evaluate=0.5, exchange=5.0, wait=2.0), "are at 0.75 of one process"),
        (both(compute=3.0, exchange=2.0, wait=50.0), None),  # slow callbacks stay slow
        (both(compute=10.0, exchange=7.0), None),  # 1.2 times as fast as one
        (both(compute=0.3, exchange=0.6), None),  # too short to tell
        ({0: usage(compute=3.0, exchange=9.0)}, None),  # one worker waits for nobody
    ],
)
@pytest.mark.parametrize("in_step", [False, True])
def test_one_process_is_advised_where_it_would_be_faster(
    told: dict[int, Any], said: str | None, in_step: bool
) -> None:
    """It saves the exchanges, and does the work of all."""
    facts = replace(GOOD, usage=told, in_step=in_step, window=1)
    advice = profile_of(facts).advice
    assert (advice is not None and advice.cause == "too many workers") == (said is not None)
    text = str(profile_of(facts))
    assert said in text if said else "of one process" not in text


def test_what_an_exchange_takes_longer_than_on_the_quickest_rank_is_a_wait() -> None:
    told = {0: usage(compute=3.0, exchange=7.25), 1: usage(compute=10.0, exchange=0.25)}
    times = profile_of(replace(GOOD, usage=told, in_step=True)).ranks
    assert (times[0].seconds["exchange"], times[0].seconds["wait"]) == (0.25, 7.0)
    times = profile_of(replace(GOOD, usage=told)).ranks
    assert (times[0].seconds["exchange"], times[0].seconds["wait"]) == (7.25, 0.0)


def test_the_drawing_has_a_line_per_rank_and_the_advice() -> None:
    told = {0: usage(compute=5.0), 1: usage(compute=7.5, exchange=2.5)}
    lines = str(profile_of(replace(GOOD, usage=told))).splitlines()
    assert len(lines) == 4
    assert "rank   0  " + "█" * 15 + " " * 15 + "  5.0 s  2,000 rows/s  training 100%" in lines[1]
    assert "█" * 22 + "░" * 8 in lines[2]
    assert lines[3].startswith("What would help most (slow worker): rank 1 takes 1.5 times")


def test_ranks_without_rows_and_runs_without_ranks_have_no_advice() -> None:
    assert cause(replace(GOOD, rows={0: 10_000, 1: 0})) is None
    assert list(profile_of(replace(GOOD, rows={0: 10_000, 1: 0})).ranks) == [0]
    assert cause(replace(GOOD, usage={}, rows={})) is None


def test_a_fit_that_stopped_within_its_first_epoch_has_no_advice() -> None:
    stopped = replace(GOOD, epochs=0)
    assert cause(stopped) is None
    assert cause(replace(GOOD, rows={0: 10_000, 1: 0, 2: 0}, usage={**GOOD.usage, 2: usage()})) in (
        "uneven rows", "slow worker", None,
    )  # fmt: skip
