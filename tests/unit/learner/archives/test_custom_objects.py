"""What a model holds of the user's own travels with it, wherever the model keeps it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from sparkdl.errors import ModelError
from sparkdl.learner.archives.archive import ModelArchive, decode_model, encode_model
from sparkdl.learner.checks.compile_parts import require_loadable
from sparkdl.learner.custom_objects import named_functions
from sparkdl.process import payload

PARTS = '''
import keras
from keras import ops

class Rounded(keras.constraints.Constraint):
    """Keeps a weight at multiples of a step."""

    def __init__(self, step):
        self.step = step

    def __call__(self, w):
        return ops.round(w / self.step) * self.step

    def get_config(self):
        return {"step": self.step}

class Scaled:
    """An activation that is an object."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x

    def get_config(self):
        return {"factor": self.factor}

    @classmethod
    def from_config(cls, config):
        return cls(**config)

class Weighted(keras.losses.Loss):
    """A loss that keeps a function."""

    def __init__(self, error=None, name="weighted", **options):
        super().__init__(name=name, **options)
        self.error = error

    def call(self, y_true, y_pred):
        return self.error(y_true, y_pred)

    def get_config(self):
        error = keras.saving.serialize_keras_object(self.error)
        return {"error": error, "name": self.name}

    @classmethod
    def from_config(cls, config):
        error = keras.saving.deserialize_keras_object(config.pop("error"))
        return cls(error, **config)

def absolute(y_true, y_pred):
    return ops.mean(ops.absolute(y_true - y_pred), axis=-1)
'''


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[ModuleType]:
    """A module that is there while the model is sent, and not where it is loaded."""
    path = tmp_path / "parts_of_a_notebook.py"
    path.write_text(PARTS)
    spec = importlib.util.spec_from_file_location("parts_of_a_notebook", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop(spec.name, None)


def elsewhere(model: Any) -> Any:
    """The model as a worker has it, that cannot import the module."""
    archive: ModelArchive = encode_model(model)
    del sys.modules["parts_of_a_notebook"]
    return decode_model(archive)


def dense(**options: Any) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), layers.Dense(2, **options)])


def test_a_constraint_travels(parts: ModuleType) -> None:
    model = dense(kernel_constraint=parts.Rounded(0.25))
    model.compile("sgd", "mse")
    there = elsewhere(model)
    np.testing.assert_array_equal(there.layers[0].kernel_constraint(np.array([0.3])), [0.25])


def test_an_object_as_activation_travels(parts: ModuleType) -> None:
    model = dense(activation=parts.Scaled(3.0))
    x = np.ones((1, 3), "float32")
    want = model.predict(x, verbose=0)
    np.testing.assert_allclose(elsewhere(model).predict(x, verbose=0), want, atol=1e-6)


class Bent:
    """An activation that Keras' own ``fit`` calls and its files cannot hold."""

    def __call__(self, x: Any) -> Any:
        return ops.sin(x)


def test_what_keras_calls_and_cannot_save_travels_as_a_function() -> None:
    gelu = partial(keras.activations.gelu, approximate=True)
    loss = partial(keras.losses.binary_crossentropy, label_smoothing=0.2)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([
        keras.Input((3,)), layers.Dense(4, activation=gelu), layers.Dense(4, activation=Bent()),
        layers.Dense(1, activation="sigmoid"),
    ])  # fmt: skip
    model.compile("sgd", loss, metrics=[[partial(keras.metrics.binary_accuracy, threshold=0.3)]])
    x, y = np.random.default_rng(0).random((8, 3), "float32"), np.ones((8, 1), "float32")
    with pytest.raises(RuntimeError, match="amid"), named_functions(model):
        raise RuntimeError("amid the saving")
    assert model.layers[0].activation is gelu
    archive = encode_model(model)
    assert model.layers[0].activation is gelu
    assert model._compile_config.config["loss"] is loss
    there = decode_model(archive)
    for trained in (model, there):
        trained.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for mine, its in zip(model.get_weights(), there.get_weights(), strict=True):
        np.testing.assert_allclose(its, mine, atol=1e-6)
    assert there.evaluate(x, y, verbose=0) == pytest.approx(model.evaluate(x, y, verbose=0))


@pytest.mark.parametrize("named", [True, False])
def test_a_function_that_a_loss_keeps_travels(parts: ModuleType, named: bool) -> None:
    shift = 2.0
    error = parts.absolute if named else lambda y, p: ops.mean(ops.absolute(y - p)) + shift
    model = dense()
    model.compile("sgd", parts.Weighted(error))
    x, y = np.ones((4, 3), "float32"), np.zeros((4, 2), "float32")
    want = model.evaluate(x, y, verbose=0)
    assert elsewhere(model).evaluate(x, y, verbose=0) == pytest.approx(want, abs=1e-6)


def test_an_object_that_does_not_travel_is_named_in_few_words(parts: ModuleType) -> None:
    """Keras quotes the configuration of the whole model."""
    archive = encode_model(dense(kernel_constraint=parts.Rounded(0.25)))
    del sys.modules["parts_of_a_notebook"]
    with pytest.raises(ModelError, match=r"constraint 'Rounded'.*\n.*custom_objects=") as caught:
        decode_model(replace(archive, objects=payload.dump({})))
    assert len(str(caught.value)) < 600


def test_a_model_that_keras_cannot_save_is_said_in_few_words() -> None:
    class Talking(layers.Dense):
        def get_config(self) -> dict[str, Any]:
            raise ValueError("no " * 2000)

    with pytest.raises(ModelError, match="ValueError: no no") as caught:
        encode_model(keras.Sequential([keras.Input((3,)), Talking(2)]))
    assert len(str(caught.value)) < 1200


class Applied(keras.layers.Layer):
    """A layer whose configuration has the function that it applies."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__(**options)
        self.function = function

    def call(self, inputs: Any) -> Any:
        return self.function(inputs)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "function": self.function}


def test_a_function_in_a_configuration_is_said_in_few_words() -> None:
    model = keras.Sequential([keras.Input((3,)), Applied(lambda x: 2 * x, name="twice")])
    with pytest.raises(ModelError, match="layer 'twice' has a function as 'function'") as caught:
        encode_model(model)
    text = str(caught.value)
    assert "'TrackedDict' object is not callable" in text
    assert "config={" not in text
    assert len(text) < 1500
    assert caught.value.__suppress_context__


class Bare(keras.losses.Loss):
    """Its constructor takes neither a name nor a reduction."""

    def __init__(self) -> None:
        super().__init__(reduction="sum")

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.abs(y_true - y_pred), -1)


class Powered(Bare):
    def __init__(self, power: float) -> None:
        super().__init__()
        self.power = power


class Forgetful(Bare):
    def __init__(self, power: float = 1.0, **options: Any) -> None:
        keras.losses.Loss.__init__(self, **options)
        self._power = power


class Told(Forgetful):
    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "power": self._power}


class Counted(keras.metrics.Mean):
    def __init__(self, scale: float, name: str = "counted") -> None:
        super().__init__(name=name)
        self.scale = scale

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(y_pred * self.scale)


class Slow(keras.optimizers.SGD):
    def __init__(self, rate: float) -> None:
        super().__init__(rate / 2)
        self.rate = rate


class Plain(keras.optimizers.SGD):
    def __init__(self, learning_rate: float) -> None:
        super().__init__(learning_rate, momentum=0.5)


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, start: float) -> None:
        self.start = start

    def __call__(self, step: Any) -> Any:
        return self.start / (1 + ops.cast(step, "float32"))

    def get_config(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("settings", "what", "line"),
    [
        ({"loss": Powered(2.0)}, "loss Powered", "'power': self.power}"),
        ({"loss": [Forgetful(2.0)]}, "loss Forgetful", "'power': self._power}"),
        ({"metrics": [Counted(2.0)]}, "metric Counted", "'scale': self.scale}"),
        ({"optimizer": Slow(0.1)}, "optimizer Slow", "'rate': self.rate}"),
        ({"optimizer": keras.optimizers.SGD(Falling(0.1))}, "object Falling", "'start': self.st"),
    ],
)
def test_what_would_arrive_without_an_argument_is_refused(
    settings: dict[str, Any], what: str, line: str
) -> None:
    model = dense(name="m")
    model.compile(**{"optimizer": "sgd", "loss": "mse", **settings})
    with pytest.raises(ModelError) as caught:
        require_loadable(model)
    assert what in caught.value.what
    assert f"get_config(self): return {{**super().get_config(), {line}" in caught.value.hint
    assert len(str(caught.value)) < 600


class Large(Counted):
    def __init__(self) -> None:
        super().__init__(3.0, name="large")


@pytest.mark.parametrize("make", [Bare, Forgetful, partial(Told, 2.0)])
def test_losses_metrics_and_optimizers_of_the_user_s_own_travel(make: Any) -> None:
    model = dense()
    model.compile(Plain(0.25), make(), metrics=[Large()])
    require_loadable(model)
    x, y = np.ones((4, 3), "float32"), np.zeros((4, 2), "float32")
    want = model.evaluate(x, y, verbose=0)
    there = decode_model(encode_model(model))
    assert there.evaluate(x, y, verbose=0) == pytest.approx(want, abs=1e-6)
    assert (float(there.optimizer.learning_rate), there.optimizer.momentum) == (0.25, 0.5)
    assert getattr(there.loss, "_power", 0) == getattr(model.loss, "_power", 0)
