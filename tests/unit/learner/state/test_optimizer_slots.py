"""The state of a rule's optimizer is kept in the Keras optimizer from one run to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.collective.choice import optimizer_config
from sparkdl.collective.current import SoloCommunicator
from sparkdl.collective.rule_synchronizer import RuleSynchronizer
from sparkdl.collective.rules import make_rule
from sparkdl.collective.synchronizer import AllReduceSynchronizer
from sparkdl.config import LoopSettings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.learner import make_learner
from sparkdl.learner.archives.archive import decode_model, encode_model
from sparkdl.learner.state.model_weights import write_model
from sparkdl.learner.state.optimizer_state import DriverSlots, take_averages
from sparkdl.optimizers.flat import FlatAdam, FlatSGD
from sparkdl.worker import train

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "SGD": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "AMSGrad": lambda: keras.optimizers.Adam(0.01, beta_2=0.6, amsgrad=True),
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05),
    "global clipnorm": lambda: keras.optimizers.SGD(0.5, momentum=0.5, global_clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.AdamW(0.01, clipvalue=0.02),
    "average": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.7),
    "overwritten": lambda: keras.optimizers.SGD(
        0.05, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=2.0**127, dynamic_growth_steps=3
    ),
    "scaled, clipped": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.1),
        initial_scale=2.0**10,
    ),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.02, 4, 0.5)
    ),
}


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(50, 5)).astype("float32"), rng.normal(size=(50, 1)).astype("float32")


def model_with(optimizer: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_sliced_runs_are_plain_keras(name: str) -> None:
    """Weights, every optimizer variable and the step counter, after two runs of two epochs."""
    x, y = data()
    model = model_with(OPTIMIZERS[name]())
    learner = make_learner(model)
    rule = make_rule("sliced").bind(1, optimizer_config(model.optimizer))
    for _ in range(2):
        with SoloCommunicator() as alone:
            steps = RuleSynchronizer(alone, learner.layout, rule)
            synchronizer = AllReduceSynchronizer(alone, learner.layout, steps=steps)
            batches = Batches(rows_from_numpy(x, y), 20, shuffle=False)
            train(
                learner, synchronizer, batches, LoopSettings(epochs=2, batch_size=20), num_rows=50
            )
            assert synchronizer.rule_state == b""
    learner.sync_model()
    take_averages(model)
    plain = model_with(OPTIMIZERS[name]())
    plain.fit(x, y, batch_size=20, epochs=4, shuffle=False, verbose=0)
    for mine, known in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), known.numpy(), atol=1e-5)
    pairs = zip(model.optimizer.variables, plain.optimizer.variables, strict=True)
    for mine, known in pairs:
        np.testing.assert_allclose(mine.numpy(), known.numpy(), atol=1e-5, err_msg=mine.path)
    taken = int(model.optimizer.iterations.numpy())
    assert taken < 12 if name == "scaled" else taken == 12  # the scale overflows at first


def test_variables_that_an_optimizer_does_not_have_are_none() -> None:
    learner = make_learner(model_with(keras.optimizers.SGD(0.1)))
    assert learner.optimizer.slots(["_momentums", "_velocities"]) is None
    assert learner.optimizer.slots([]) == {}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "SGD"])
def test_slots_that_stay_on_the_driver_end_as_those_of_keras(name: str) -> None:
    """Each of two runs trains a model of its own, without slots, as a worker does."""
    x, y = data()
    driver = model_with(OPTIMIZERS[name]())
    for number in range(2):
        rule = make_rule("sliced").bind(1, optimizer_config(driver.optimizer))
        slots = DriverSlots.of(driver, rule.optimizer, rule.keras_slots())
        assert slots is not None
        given = slots.to_bytes()
        assert bool(given) == (number > 0)
        with slots.left_out():
            archive = encode_model(driver)
        worker = decode_model(archive)
        kept = 2 + 4 * name.startswith("scaled") - (name == "schedule")
        assert len(worker.optimizer.variables) == kept
        learner = make_learner(worker)
        with SoloCommunicator() as alone:
            steps = RuleSynchronizer(alone, learner.layout, rule, state=given)
            synchronizer = AllReduceSynchronizer(alone, learner.layout, steps=steps)
            batches = Batches(rows_from_numpy(x, y), 20, shuffle=False)
            train(
                learner, synchronizer, batches, LoopSettings(epochs=2, batch_size=20), num_rows=50
            )
            state = synchronizer.outcome(learner, 2).state
        assert state is not None
        write_model(driver, learner.layout, state.weights)
        slots.take_run(state.rule, state.optimizer)
    take_averages(driver)
    plain = model_with(OPTIMIZERS[name]())
    plain.fit(x, y, batch_size=20, epochs=4, shuffle=False, verbose=0)
    for mine, known in zip(driver.variables, plain.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), known.numpy(), atol=1e-5)
    for mine, known in zip(driver.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), known.numpy(), atol=1e-5, err_msg=mine.path)


def test_slots_of_before_the_first_step_are_those_of_a_new_optimizer() -> None:
    driver = model_with(keras.optimizers.Adagrad(0.1))
    rule = make_rule("sliced").bind(2, optimizer_config(driver.optimizer))
    slots = DriverSlots.of(driver, rule.optimizer, rule.keras_slots())
    assert slots is not None
    slots.take(b"", 0)
    for variable in driver.optimizer._accumulators:
        np.testing.assert_allclose(variable.numpy(), 0.1)


def test_slots_of_another_optimizer_are_no_matter_of_the_driver() -> None:
    for optimizer in (FlatAdam(), FlatSGD()):
        slots = optimizer.keras_slots()
        assert DriverSlots.of(model_with(keras.optimizers.SGD(0.1)), optimizer, slots) is None
