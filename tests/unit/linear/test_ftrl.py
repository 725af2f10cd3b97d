"""Steps of FTRL-Proximal: those of the paper, by hand and by a plain loop."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sparkdl.errors import ConfigError
from sparkdl.linear.rank_task import Ftrl, FtrlTable
from sparkdl.tables.rules import FtrlRows


def step(table: FtrlTable, slots: Any, gradients: Any) -> None:
    table.step(slots, table.weights(slots), np.asarray(gradients))


RULE = Ftrl(lambda1=1.0, lambda2=0.5, alpha=0.5, beta=1.0)


def test_steps_by_hand() -> None:
    """The first weight passes lambda1 in the third step; the second never does."""
    table = FtrlTable(RULE)
    slots = table.slots(np.array([2**31 - 2, 7]))
    for gradient in ([0.6, 0.5], [0.3, -0.4]):
        step(table, slots, gradient)
        assert table.weights(slots).tolist() == [0.0, 0.0]
    step(table, slots, [0.4, 0.2])
    first, second = table.weights(slots)  # z = 1.3, n = 0.61
    assert first == pytest.approx(-0.3 / (2 * (1 + math.sqrt(0.61)) + 0.5), rel=1e-14)
    assert first == pytest.approx(-0.0738543359, abs=1e-10)
    assert second == 0.0
    step(table, slots, [1.0, 0.0])
    first, second = table.weights(slots)  # z = 1.3 + 1 + 0.9756655729 * 0.0738543359, n = 1.61
    assert first == pytest.approx(-1.3720571331 / 5.0377155081, abs=1e-9)
    assert second == 0.0
    ids, weights = table.export()
    assert ids.tolist() == [2**31 - 2]
    assert weights.tolist() == [first]


def test_a_gradient_of_zero_without_beta_divides_nothing_by_zero() -> None:
    table = FtrlTable(Ftrl(beta=0.0))
    slots = table.slots(np.array([1, 2]))
    with np.errstate(all="raise"):
        step(table, slots, [0.0, -2.0])
        assert table.weights(slots).tolist() == [0.0, 0.1]  # alpha, whatever the gradient


def test_random_steps_are_those_of_a_loop_over_coordinates() -> None:
    rng = np.random.default_rng(0)
    rule = Ftrl(lambda1=0.7, lambda2=0.3, alpha=0.2, beta=0.5)
    z, n, w = np.zeros(50), np.zeros(50), np.zeros(50)
    table = FtrlTable(rule)
    for _ in range(200):
        ids = rng.permutation(50)[:9]
        gradients = rng.normal(size=9)
        step(table, table.slots(ids * 10**6), gradients)
        for i, g in zip(ids, gradients, strict=True):
            sigma = (math.sqrt(n[i] + g * g) - math.sqrt(n[i])) / 0.2
            z[i] += g - sigma * w[i]
            n[i] += g * g
            w[i] = 0.0
            if abs(z[i]) > 0.7:
                w[i] = -(z[i] - math.copysign(0.7, z[i])) / ((0.5 + math.sqrt(n[i])) / 0.2 + 0.3)
    found = table.weights(table.slots(np.arange(50) * 10**6))
    np.testing.assert_allclose(found, w, rtol=1e-12, atol=1e-14)
    assert 0 < np.count_nonzero(w) < 50


def test_the_rule_of_rows_is_the_same_in_float32() -> None:
    """Keras' constants: its l2 is half of lambda2; its n begins at 0 here."""
    rng = np.random.default_rng(1)
    rows = FtrlRows(
        initial_accumulator_value=0.0, l1_regularization_strength=1.0,
        l2_regularization_strength=0.25, beta=1.0,
    )  # fmt: skip
    values, state = np.zeros((6, 1), np.float32), np.zeros((6, 2), np.float32)
    table = FtrlTable(RULE)
    slots = table.slots(np.arange(6))
    for _ in range(50):
        gradients = rng.normal(size=6)
        step(table, slots, gradients)
        rows.step(values, state, gradients.astype(np.float32)[:, None], 0.5, np.arange(6))
    np.testing.assert_allclose(values[:, 0], table.weights(slots), atol=1e-5)


@pytest.mark.parametrize(
    "wrong", [{"alpha": 0}, {"alpha": float("nan")}, {"lambda1": -1}, {"beta": "1"}]
)
def test_constants_that_cannot_be_used_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="ftrl"):
        Ftrl(**wrong)
