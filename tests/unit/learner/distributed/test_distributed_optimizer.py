"""The distributed optimizer in a world of one: it stays the optimizer that it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import sparkdl
from sparkdl.collective.current import SoloCommunicator, current, use
from sparkdl.errors import ConfigError, ModelError, UnknownNameError
from sparkdl.learner.distributed.optimizer import is_distributed

X = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
Y = X[:, :2] * 0.5


def make_model() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])


def train(model: Any, optimizer: Any, epochs: int = 1, batch_size: int = 8) -> Any:
    model.compile(optimizer, "mse", jit_compile=False)
    return model.fit(X, Y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)


def test_it_is_of_the_class_of_the_one_given_which_is_not_changed():
    plain = keras.optimizers.Adam(0.01, weight_decay=0.1, name="mine")
    made = sparkdl.DistributedOptimizer(plain)
    assert isinstance(made, keras.optimizers.Adam)
    assert is_distributed(made)
    assert not is_distributed(plain)
    assert made.get_config() == plain.get_config()
    assert keras.saving.serialize_keras_object(made) == keras.saving.serialize_keras_object(plain)
    made.learning_rate = 0.5
    assert float(plain.learning_rate.value) == pytest.approx(0.01)


def test_a_saved_model_loads_without_this_library_and_goes_on(tmp_path: Path):
    reference = make_model()
    train(reference, keras.optimizers.Adam(0.01))
    for passes in (1, 2):
        model = make_model()
        optimizer = keras.optimizers.Adam(0.01)
        train(model, sparkdl.DistributedOptimizer(optimizer, backward_passes_per_step=passes),
              batch_size=8 // passes)  # fmt: skip
        model.save(tmp_path / f"{passes}.keras")
    code = f"""
import sys, keras, numpy as np
x = np.random.default_rng(0).normal(size=(64, 5)).astype('float32')
for passes in (1, 2):
    model = keras.models.load_model(f'{tmp_path}/{{passes}}.keras')
    assert not [m for m in sys.modules if m.startswith('sparkdl')]
    assert type(model.optimizer) is keras.optimizers.Adam and int(model.optimizer.iterations) == 8
    model.fit(x, x[:, :2] * 0.5, batch_size=8, shuffle=False, verbose=0)
    np.savez(f'{tmp_path}/{{passes}}.npz', *model.get_weights())
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning:keras", "-c", code], check=True,
                   timeout=100)  # fmt: skip
    reference.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    for passes in (1, 2):
        with np.load(tmp_path / f"{passes}.npz") as stored:
            for a, b in zip(stored.values(), reference.get_weights(), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_state_of_the_optimizer_is_taken_over():
    model, reference = make_model(), make_model()
    train(model, keras.optimizers.Adam(0.01))
    train(reference, keras.optimizers.Adam(0.01), epochs=2)
    train(model, sparkdl.DistributedOptimizer(model.optimizer))
    assert int(model.optimizer.iterations) == 16
    for a, b in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_callbacks_change_the_learning_rate():
    optimizer = sparkdl.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = make_model()
    model.compile(optimizer, "mse", jit_compile=False)
    rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    history = model.fit(X, Y, epochs=2, verbose=0, callbacks=[rates])
    assert float(optimizer.learning_rate.value) == pytest.approx(0.05)
    assert history.history["learning_rate"] == pytest.approx([0.1, 0.05])


def test_weight_decay_exclusions_are_kept():
    plain = keras.optimizers.SGD(0.0001, weight_decay=0.5)
    plain.exclude_from_weight_decay(var_names=["bias"])
    made = sparkdl.DistributedOptimizer(plain)
    model = make_model()
    made.build(model.trainable_variables)
    assert [made._use_weight_decay(v) for v in model.trainable_variables] == [True, False]


def test_mixed_float16_scales_the_loss_outside_of_the_exchange():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = sparkdl.DistributedOptimizer(keras.optimizers.SGD(0.1))
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        model = make_model()
        model.compile(optimizer, "mse", jit_compile=False)
        assert model.optimizer is optimizer, "Keras must not scale again"
    finally:
        keras.config.set_dtype_policy("float32")
    wrong = keras.optimizers.LossScaleOptimizer(
        sparkdl.DistributedOptimizer(keras.optimizers.SGD(0.1))
    )
    with pytest.raises(ModelError, match="scaled around"):
        wrong.build(make_model().trainable_variables)


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"op": "max"}, UnknownNameError, "average"),
        ({"compression": "fp61"}, UnknownNameError, "fp16"),
        ({"backward_passes_per_step": 0}, ConfigError, "at least 1"),
        ({"backward_passes_per_step": True}, ConfigError, "at least 1"),
        ({"sparse_as_dense": "yes"}, ConfigError, "True or False"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], word: str):
    with pytest.raises(error, match=word):
        sparkdl.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)


def test_what_cannot_be_wrapped():
    with pytest.raises(ConfigError, match=r"keras.optimizers.Optimizer"):
        sparkdl.DistributedOptimizer("adam")
    made = sparkdl.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ConfigError, match="distributed already"):
        sparkdl.DistributedOptimizer(made)
    twice = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="accumulated twice"):
        sparkdl.DistributedOptimizer(twice, backward_passes_per_step=2)

    class Bare(keras.optimizers.SGD):
        def __init__(self, special: int) -> None:
            super().__init__(0.1)

    with pytest.raises(ModelError, match="get_config"):
        sparkdl.DistributedOptimizer(Bare(3))


def test_the_communicator_of_a_run():
    assert current().size == 1
    mine = SoloCommunicator()
    with use(mine):
        assert sparkdl.communicator() is mine
    assert sparkdl.communicator() is not mine


def test_xla_is_refused_where_it_cannot_work():
    model = make_model()
    model.compile(sparkdl.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    with pytest.raises(ModelError, match="jit_compile"):
        model.fit(X, Y, verbose=0, callbacks=[sparkdl.BroadcastCallback()])


def test_callbacks_in_a_world_of_one(capsys: pytest.CaptureFixture[str]):
    model = make_model()
    model.compile(sparkdl.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    callbacks = [
        sparkdl.BroadcastCallback(), sparkdl.MetricAverageCallback(), sparkdl.LogCallback()
    ]  # fmt: skip
    history = model.fit(X, Y, verbose=0, callbacks=callbacks)
    assert f"epoch 1: loss {history.history['loss'][0]:.4f}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="root"):
        sparkdl.BroadcastCallback(root=1)


class Two(SoloCommunicator):
    def __init__(self) -> None:
        super().__init__()
        self.size = 2


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="Keras has it there alone")
@pytest.mark.parametrize("eagerly", [False, True])
def test_synchronized_moments_are_refused_where_several_ranks_train(eagerly: bool):
    norm = keras.layers.BatchNormalization(synchronized=True)
    model = keras.Sequential([keras.Input((5,)), norm, keras.layers.Dense(2)])
    optimizer = sparkdl.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=False, run_eagerly=eagerly)
    with use(Two()), pytest.raises(ConfigError, match="synchronized=True, which 2 workers"):
        model.fit(X, Y, verbose=0)
    assert "loss" in model.fit(X, Y, verbose=0).history  # no rank of several any more
