"""Which hyper-parameters matter, by known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparkdl.tune.journal import TrialRecord
from sparkdl.tune.study import importances
from sparkdl.tune.suggestions import Value


def record(number: int, value: float, **params: Value) -> TrialRecord:
    return TrialRecord(number, dict(params), {}, {3: {"loss": value}}, 3, "waiting")


def test_what_decides_has_all_and_what_does_not_has_nothing() -> None:
    rng = np.random.default_rng(0)
    x, noise = rng.uniform(size=60), rng.uniform(size=60)
    records = [record(n, x[n] ** 2, x=x[n], noise=noise[n], same=1) for n in range(60)]
    found = importances(records, "loss")
    assert next(iter(found)) == "x"
    assert found["x"] > 0.95
    assert found["noise"] < 0.05
    assert found["same"] == 0.0


def test_the_share_of_a_choice_is_kelleys_epsilon_squared() -> None:
    """Ranks 0 to 11; group means 2.5 and 8.5: within 2 * 17.5, total 143, n = 12, k = 2."""
    records = [record(n, float(n), kind="a" if n < 6 else None) for n in range(12)]
    assert importances(records, "loss") == pytest.approx({"kind": 1 - 11 / 10 * 35 / 143})


def test_two_that_matter_share_the_variance() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.uniform(size=400), rng.uniform(size=400)
    found = importances([record(n, a[n] + b[n], a=a[n], b=b[n]) for n in range(400)], "loss")
    assert found["a"] == pytest.approx(0.5, abs=0.08)
    assert found["b"] == pytest.approx(0.5, abs=0.08)


def test_trials_are_compared_after_the_same_epochs() -> None:
    """The good ones trained longer; what x did is seen where all of them were."""
    records = [record(n, float(n % 2), x=n % 2, y=n // 8) for n in range(16)]
    for best in records[8:]:
        best.metrics[9] = {"loss": -5.0}
        best.epochs = 9
    assert importances(records, "loss") == {"x": 1.0, "y": 0.0}


def test_few_trials_and_failed_ones_say_nothing() -> None:
    good = [record(n, float(n), x=n / 10) for n in range(9)]
    assert importances(good, "loss") == {}
    failed = [TrialRecord(n, {"x": 0.5}, {}, {3: {}}, 3, "failed") for n in range(9, 30)]
    diverged = record(40, math.nan, x=0.5)
    assert importances([*good, *failed, diverged], "loss") == {}
    assert importances([*good, *failed, record(41, 9.0, x=0.9)], "loss")["x"] > 0.5
    assert importances([*good, record(41, 9.0, x=0.9)], "accuracy") == {}
