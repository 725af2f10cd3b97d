"""Whether a loaded model is the driver's is decided by what it computes of one batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from sparkdl.errors import ModelError
from sparkdl.learner.archives.archive import decode_model, encode_model
from sparkdl.learner.archives.rebuilt import _places

pytestmark = pytest.mark.keras


def built(model: Any, width: int = 3) -> Any:
    model(np.zeros((2, width), "float32"))
    model.compile("adam", "mse")
    return model


class Two(keras.Model):
    """Calls one of two equal layers last, which its configuration tells or not."""

    def __init__(self, last: str = "b", tells: bool = True) -> None:
        super().__init__()
        self.last, self.tells = last, tells
        self.a, self.b = layers.Dense(3, activation="tanh"), layers.Dense(3)

    def get_config(self) -> dict[str, Any]:
        return {"last": self.last} if self.tells else {}

    @property
    def order(self) -> list[Any]:
        return [self.b, self.a] if self.last == "a" else [self.a, self.b]

    def call(self, inputs: Any) -> Any:
        first, second = self.order
        return second(first(inputs))


class Rule:
    """Cannot be told apart from another such: it has no attributes that anybody lists."""

    __slots__ = ("function",)

    def __init__(self, function: Any) -> None:
        self.function = function


class Ruled(layers.Layer):
    """Computes by an object that its configuration does not have."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.rule = Rule(keras.ops.relu)

    def call(self, inputs: Any) -> Any:
        return self.rule.function(inputs - 0.5)


def test_what_computes_something_else_is_refused() -> None:
    model = built(keras.Sequential([keras.Input((3,)), Ruled(), layers.Dense(1)]))
    encode_model(model)
    model.layers[0].rule = Rule(keras.ops.tanh)
    with pytest.raises(ModelError, match="another one on the workers") as caught:
        encode_model(built(keras.Sequential([keras.Input((3,)), model.layers[0], layers.Dense(2)])))
    assert "in output 0" in caught.value.received


class Extended(keras.Model):
    """Has a layer without weights that a loaded model lacks, and that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Dense(2)

    def get_config(self) -> dict[str, Any]:
        return {}

    def call(self, inputs: Any) -> Any:
        for layer in self._layers:
            inputs = layer(inputs)
        return inputs


def test_a_layer_more_that_changes_nothing_is_no_other_model() -> None:
    model = Extended()
    model.first = layers.Activation("linear")
    model = built(model)
    model.head.trainable = False
    assert len(decode_model(encode_model(model))._layers) == 1
    assert not decode_model(encode_model(model)).head.trainable


def test_a_layer_more_that_changes_the_outputs_is_named() -> None:
    model = Extended()
    model.first = layers.Activation("tanh")
    with pytest.raises(ModelError, match="another one on the workers") as caught:
        encode_model(built(model))
    assert "none in place of Activation" in caught.value.received


@pytest.mark.parametrize("last", ["a", "b"])
def test_the_order_of_calls_travels_with_the_configuration(last: str) -> None:
    model = built(Two(last))
    rows = np.random.default_rng(0).normal(size=(2, 3)).astype("float32")
    copy = decode_model(encode_model(model))
    found, wanted = (m.predict(rows, verbose=0) for m in (copy, model))
    np.testing.assert_allclose(found, wanted, atol=1e-6)


class Drawing(layers.Layer):
    """Draws in prediction, too, outside of Keras."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.random = np.random.default_rng()

    def call(self, inputs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return inputs + self.random.normal()


def test_a_model_that_draws_numbers_of_its_own_is_not_refused_for_them() -> None:
    model = built(keras.Sequential([keras.Input((3,)), Drawing(), layers.Dense(1)]))
    calls = model.layers[0].calls
    decode_model(encode_model(model))
    assert model.layers[0].calls == calls


def test_places_of_parts() -> None:
    assert _places(["a", "b", "c"], ["a", "c"]) == (0, 2)
    assert _places(["a", "c"], ["a", "b", "c"]) == (0, None, 1)
