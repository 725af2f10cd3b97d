"""Optimizers on the server against the papers' equations and against Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.rules import AdamW, Commit, make_rule
from sparkdl.weights import FloatArray

pytestmark = pytest.mark.keras

# Imported here and not in a test: frameworks set environment variables for good.
keras = pytest.importorskip("keras")

# Keras' own float32 bias correction is off by 1e-7 a step (ours by 1e-8), so few steps.
STEPS = 10


def gradients(size: int = 300) -> list[FloatArray]:
    rng = np.random.default_rng(5)
    return [rng.normal(0, 1, size).astype(np.float32) for _ in range(STEPS)]


def run(rule: Any, learning_rate: float = 0.0) -> FloatArray:
    """The center after all gradients of one worker."""
    center = np.linspace(-1, 1, 300).astype(np.float32)
    state = rule.init(center)
    for i, g in enumerate(gradients()):
        commit = Commit(0, 1, i, i, 1, 32, learning_rate)
        rule.update(center, g, state, commit, center)
    return center


def test_adam_is_the_papers() -> None:
    x = np.linspace(-1, 1, 300)
    m = v = np.zeros(300)
    for t, g in enumerate(gradients(), start=1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g.astype(np.float64) ** 2
        m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.999**t)
        x = x - 0.01 * m_hat / (np.sqrt(v_hat) + 1e-12)
    # Where epsilon is added differs from algorithm 1 (see section 2 of the paper): keep it tiny.
    got = run(make_rule("adam", learning_rate=0.01, epsilon=1e-12))
    np.testing.assert_allclose(got, x, atol=1e-6)


def test_adam_in_the_efficient_order_of_the_paper() -> None:
    x = np.linspace(-1, 1, 300)
    m = v = np.zeros(300)
    for t, g in enumerate(gradients(), start=1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g.astype(np.float64) ** 2
        x = x - 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-7)
    np.testing.assert_allclose(run(make_rule("adam", learning_rate=0.01)), x, atol=1e-6)


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adagrad", {}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Adam", {}),
    ("Adam", {"beta_1": 0.5, "epsilon": 1e-3}),
    ("Adam", {"weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.1}),
]


@pytest.mark.parametrize(("class_name", "options"), CONFIGS)
def test_one_worker_is_local_training_with_keras(class_name: str, options: dict[str, Any]) -> None:
    optimizer = getattr(keras.optimizers, class_name)(learning_rate=0.01, **options)
    variable = keras.Variable(np.linspace(-1, 1, 300).astype(np.float32))
    optimizer.build([variable])
    for g in gradients():
        optimizer.apply([keras.ops.convert_to_tensor(g)], [variable])
    rule = make_rule({"class_name": class_name, "config": optimizer.get_config()})
    tolerance = 5e-6 if options.get("centered") else 1e-6
    want = keras.ops.convert_to_numpy(variable.value)
    np.testing.assert_allclose(run(rule), want, atol=tolerance)
    serialized = keras.optimizers.serialize(optimizer)
    assert make_rule(serialized) == rule


@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop", "adagrad", "adamw"])
def test_the_workers_learning_rate_is_taken_when_none_is_given(name: str) -> None:
    given = run(make_rule(name, learning_rate=0.02))
    np.testing.assert_array_equal(run(make_rule(name), learning_rate=0.02), given)


def test_a_learning_rate_schedule_becomes_the_workers() -> None:
    schedule = {"class_name": "ExponentialDecay", "config": {}}
    rule = make_rule({"class_name": "SGD", "config": {"learning_rate": schedule}})
    assert rule.config()["learning_rate"] is None


def test_adam_with_weight_decay_is_adamw() -> None:
    rule = make_rule({"class_name": "Adam", "config": {"weight_decay": 0.1}})
    assert isinstance(rule, AdamW)
    assert rule.weight_decay == 0.1


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(UnknownNameError, match="'Lion'"):
        make_rule({"class_name": "Lion", "config": {}})


@pytest.mark.parametrize("option", [{"clipnorm": 1.0}, {"gradient_accumulation_steps": 4}])
def test_an_option_that_cannot_be_honoured_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        make_rule({"class_name": "Adam", "config": {"learning_rate": 0.1, **option}})


def test_zero_gradients_leave_adagrad_in_place() -> None:
    rule = make_rule("adagrad", learning_rate=0.1, initial_accumulator_value=0.0)
    x = np.ones(10, np.float32)
    rule.update(x, np.zeros_like(x), rule.init(x), Commit(0, 1, 0, 0, 1, 1), x)
    np.testing.assert_array_equal(x, 1.0)


def test_eamsgd_takes_the_gradient_at_the_look_ahead_point() -> None:
    config = make_rule("eamsgd", momentum=0.8).local_optimizer()
    assert config is not None
    config["config"]["learning_rate"] = 0.05
    optimizer = keras.optimizers.deserialize(config)
    curvature, x, v = 3.0, 2.0, 0.0  # f(x) = curvature/2 · x²
    variable = keras.Variable(2.0)
    optimizer.build([variable])
    for _ in range(6):
        optimizer.apply([curvature * variable.value], [variable])
        v = 0.8 * v - 0.05 * curvature * (x + 0.8 * v)
        x = x + v
        assert float(variable.value) == pytest.approx(x + 0.8 * v, abs=1e-6)
