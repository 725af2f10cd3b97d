"""Row rules against Keras' optimizers on a dense table, where both are equal."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.tables.rules import make_row_rule, row_rule_of
from sparkdl.tables.store import RowStore

pytestmark = pytest.mark.keras

ROWS, DIM = 40, 3

CASES = [
    ("SGD", {}, False),
    ("Adagrad", {}, False),
    ("Adagrad", {"initial_accumulator_value": 0.5, "epsilon": 1e-3}, False),
    ("Adam", {"beta_1": 0.8}, True),
    ("Ftrl", {}, False),
    ("Ftrl", {"l1_regularization_strength": 0.01, "l2_regularization_strength": 0.1}, False),
    ("Ftrl", {"beta": 1.0, "l2_shrinkage_regularization_strength": 0.05}, True),
    ("Ftrl", {"learning_rate_power": -0.4}, False),
]


@pytest.mark.parametrize(("name", "constants", "whole"), CASES)
def test_200_steps_equal_those_of_keras(
    name: str, constants: dict[str, float], whole: bool
) -> None:
    """Ids of a step are distinct; ``whole``: each step touches all rows (as it must for Adam)."""
    rng = np.random.default_rng(0)
    optimizer = getattr(keras.optimizers, name)(0.05, **constants)
    start = "zeros" if name == "Ftrl" else "uniform"
    store = RowStore(DIM, row_rule_of(name, optimizer.get_config()), start)
    ids = np.arange(ROWS) * 7919 + np.iinfo(np.int64).min
    table = keras.Variable(store.pull(ids))
    optimizer.build([table])
    for step in range(200):
        # a schedule changes it; Keras' Ftrl then changes rows without a gradient, too
        rate = 0.02 if step >= 100 and (name != "Ftrl" or whole) else 0.05
        optimizer.learning_rate = rate
        touched = np.arange(ROWS) if whole else rng.permutation(ROWS)[:11]
        gradient = np.zeros((ROWS, DIM), np.float32)
        gradient[touched] = rng.normal(size=(len(touched), DIM))
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [table])
        store.push(ids[touched], gradient[touched], rate)
    expected = np.array(table)
    assert abs(expected).max() > 0.05
    np.testing.assert_allclose(store.pull(ids), expected, rtol=1e-5, atol=1e-6)


def test_adagrad_has_the_known_first_step() -> None:
    """From 0 with a0 = 0.1, gradient 1, rate 0.1: -0.1 / sqrt(1.1)."""
    store = RowStore(1, "adagrad", "zeros")
    store.push(np.array([5]), np.ones((1, 1), np.float32), 0.1)
    assert store.pull(np.array([5]))[0, 0] == pytest.approx(-0.0953462, abs=1e-7)


def test_one_number_of_state_is_adagrad_of_rows_of_one_number() -> None:
    stores = [RowStore(1, rule, "zeros") for rule in ("adagrad", "rowwise_adagrad")]
    for step in range(5):
        for store in stores:
            store.push(np.array([1, 2]), np.array([[step + 1], [0.5]], np.float32), 0.1)
    rows = [store.pull(np.array([1, 2])) for store in stores]
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-6)


def test_adam_does_not_move_rows_without_a_gradient() -> None:
    store = RowStore(2, "adam")
    one, other = np.array([1]), np.array([2])
    store.push(one, np.ones((1, 2), np.float32), 0.1)
    before = store.pull(one)
    for _ in range(10):
        store.push(other, np.ones((1, 2), np.float32), 0.1)
    assert (store.pull(one) == before).all()


@pytest.mark.parametrize(
    "option",
    [
        {"weight_decay": 0.01},
        {"clipnorm": 1.0},
        {"global_clipnorm": 1.0},
        {"clipvalue": 1.0},
        {"use_ema": True},
        {"momentum": 0.9},
        {"momentum": 0.5, "nesterov": True},
    ],
)
def test_what_cannot_be_right_on_rows_is_refused_by_name(option: dict[str, float]) -> None:
    config = keras.optimizers.SGD(0.1, **option).get_config()
    with pytest.raises(ConfigError, match=next(iter(option))) as found:
        row_rule_of("SGD", config)
    assert "Adagrad" in found.value.expected
    assert "optimizer='sgd'" in found.value.hint


def test_amsgrad_and_unknown_optimizers_are_refused() -> None:
    with pytest.raises(ConfigError, match="amsgrad"):
        row_rule_of("Adam", keras.optimizers.Adam(amsgrad=True).get_config())
    with pytest.raises(UnknownNameError, match="Lion"):
        row_rule_of("Lion", {})
    with pytest.raises(UnknownNameError, match="eps"):
        make_row_rule({"name": "adagrad", "eps": 1.0})
    with pytest.raises(ConfigError, match="no number"):
        make_row_rule({"name": "adagrad", "epsilon": "small"})


def test_a_rule_is_made_again_from_its_settings() -> None:
    for name in ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"):
        rule = make_row_rule(name)
        assert make_row_rule(rule.settings) == rule
