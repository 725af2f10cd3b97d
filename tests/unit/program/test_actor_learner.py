"""The example of actors and a learner: its parts, and that it reaches its target."""

from __future__ import annotations

import time
from typing import Any

import actor_learner
import numpy as np
import pytest

from sparkdl.program import launch

pytestmark = pytest.mark.processes


def test_the_gradient_is_that_of_the_values() -> None:
    random = np.random.default_rng(0)
    parameters = [p.astype(np.float64) for p in actor_learner.make_parameters(0)]
    states = random.standard_normal((5, 4))
    weights = random.standard_normal((5, 2))
    _, layers = actor_learner.values(parameters, states)
    found = actor_learner.gradient(parameters, layers, weights)
    for index, place in ((0, (1, 7)), (1, (3,)), (2, (5, 9)), (3, (60,)), (4, (8, 1)), (5, (0,))):
        sums = []
        for step in (1e-6, -1e-6):
            moved = [p.copy() for p in parameters]
            moved[index][place] += step
            sums.append(float((actor_learner.values(moved, states)[0] * weights).sum()))
        assert found[index][place] == pytest.approx((sums[0] - sums[1]) / 2e-6, abs=1e-5)


def test_a_pole_that_is_only_pushed_to_one_side_falls_soon() -> None:
    carts = actor_learner.Carts(3, seed=0)
    falls = [carts.push(np.ones(3, bool))[1] for _ in range(30)]
    assert np.any(falls, axis=0).all()
    assert not np.any(falls[:5])


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_it_reaches_its_target(kind: Any) -> None:
    begun = time.monotonic()
    with launch(actor_learner.build(), kind) as launched:
        (curve,) = launched.results("learner", 120)
    assert curve[0].mean_return < 100
    assert curve[-1].mean_return >= actor_learner.TARGET
    assert time.monotonic() - begun < 120
