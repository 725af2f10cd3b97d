"""Models of classes without ``get_config``, as Keras' own pages have them, arrive as they are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from sparkdl.errors import ModelError
from sparkdl.learner.archives.archive import (
    decode_model,
    encode_model,
    load_state,
    model_bytes,
)
from sparkdl.learner.checks.compile_parts import require_loadable

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
CLASSES = np.arange(8) % 3


class Autoencoder(keras.Model):
    """Submodels as arguments, as in Keras' pages on autoencoders and adversarial networks."""

    def __init__(self, encoder: Any, decoder: Any, **options: Any) -> None:
        super().__init__(**options)
        self.encoder, self.decoder = encoder, decoder

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))


def autoencoder() -> Any:
    parts = (keras.Sequential([keras.Input((a,)), layers.Dense(b)]) for a, b in ((6, 3), (3, 6)))
    model = Autoencoder(*parts)
    model(X)
    return model, X


class Distiller(keras.Model):
    """As on Keras' page: a ``compile`` of its own beside submodels as arguments."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student

    def compile(self, optimizer: Any, metrics: Any, distillation_loss: Any, alpha: Any) -> None:
        super().compile(optimizer=optimizer, metrics=metrics)
        self.distillation_loss, self.alpha = distillation_loss, alpha

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        return self.alpha * self.distillation_loss(self.teacher(x), y_pred) + ops.mean(y_pred)

    def call(self, x: Any) -> Any:
        return self.student(x)


def distiller() -> Any:
    student, teacher = (
        keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="softmax")])
        for _ in range(2)
    )
    model = Distiller(student, teacher)
    model(X)
    model.compile("adam", ["accuracy"], keras.losses.KLDivergence(), 0.3)
    return model, CLASSES


class Residual(layers.Layer):
    def __init__(self, inner: Any, shift: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.inner, self._shift = inner, shift

    def call(self, x: Any) -> Any:
        return self.inner(x) + x + self._shift


def residual() -> Any:
    shared = layers.Dense(6, activation="tanh")
    blocks = [Residual(shared, np.arange(6.0)), Residual(shared, np.ones(6))]
    return keras.Sequential([keras.Input((6,)), *blocks, layers.Dense(2)]), X[:, :2]


class Kind(Enum):
    PLAIN = 1
    DOUBLED = 2


@dataclass
class Settings:
    width: int
    kinds: tuple[Kind, ...]
    sizes: dict[int, int]


class Network(keras.Model):
    """An object with its settings, and a function."""

    def __init__(self, config: Any, activation: Any = ops.tanh, *, blocks: Any = ()) -> None:
        super().__init__()
        self.config, self.activation, self.blocks = config, activation, list(blocks)
        self.out = layers.Dense(config.sizes[config.width])

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = self.activation(block(x))
        return self.out(x) * (2.0 if Kind.DOUBLED in self.config.kinds else 1.0)


def network() -> Any:
    config, blocks = Settings(4, (Kind.DOUBLED,), {4: 2}), [layers.Dense(5), layers.Dense(4)]
    model = Network(config, lambda v: ops.relu(v) + 0.5, blocks=blocks)
    model(X)
    return model, X[:, :2]


class Functional(keras.Model):
    """A functional model made by its class, of whose arguments Keras says nothing."""

    def __init__(self, units: int = 1, body: Any = None) -> None:
        inputs = keras.Input((6,))
        super().__init__(inputs, layers.Dense(units)(body(inputs)))
        self.units, self.body = units, body


class Counted(keras.Model):
    """A name that is a number as argument, and layers as attribute."""

    def __init__(self, blocks: int = 2, units: int = 2) -> None:
        super().__init__()
        self.blocks, self.units = [layers.Dense(4) for _ in range(blocks)], units
        self.out = layers.Dense(units)

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def counted() -> Any:
    model = Counted(units=3)
    model(X)
    return model, X[:, :3]


class Deep(keras.Model):
    """As on KerasRS' page on DLRM: a list of numbers, which Keras' own list keeps, and layers."""

    def __init__(self, units: list[int], more: Any = None) -> None:
        super().__init__()
        self.units, self.more = units, more
        self.hidden = [layers.Dense(n) for n in [*units, *more["units"]]]

    def call(self, x: Any) -> Any:
        for layer in self.hidden:
            x = layer(x)
        return x


def deep() -> Any:
    model = Deep([5, 4], {"units": [3, 2]})
    model(X)
    return model, X[:, :2]


class Stack(keras.Sequential):
    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        self.add(keras.Input((6,)))
        self.add(layers.Dense(units))


MODELS = {
    "submodels": autoencoder,
    "submodels and a compile": distiller,
    "a layer that two blocks share": residual,
    "settings, a function, blocks": network,
    "functional": lambda: (Functional(2, layers.Dense(4)), X[:, :2]),
    "a number and layers of one name": counted,
    "lists of numbers beside layers": deep,
    "a stack": lambda: (Stack(2, name="stack"), X[:, :2]),
}


def made(name: str) -> tuple[Any, Any]:
    keras.utils.set_random_seed(1)
    model, y = MODELS[name]()
    if not model.compiled:
        model.compile(keras.optimizers.Adam(0.1), "mse")
    return model, y


@pytest.mark.parametrize("name", MODELS)
def test_arguments_that_a_layer_keeps_travel(name: str) -> None:
    model, y = made(name)
    model.fit(X, y, verbose=0)
    require_loadable(model)
    copy = decode_model(encode_model(model))
    np.testing.assert_allclose(copy.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-6)
    for one in (model, copy):
        one.fit(X, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for mine, its in zip(model.variables, copy.variables, strict=True):
        np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (mine, its)), atol=1e-6)
    assert "get_config" not in vars(model)
    keys = {encode_model(made(name)[0]).key for _ in range(2)}
    assert len(keys) == 1  # models made anew by the same code


def test_a_checkpoint_has_such_a_model_and_a_file_for_keras_has_not() -> None:
    model, _ = made("submodels")
    with pytest.raises(ModelError, match="cannot be saved"):
        model_bytes(model)
    wanted = model.predict(X, verbose=0)
    content = model_bytes(model, told=True)
    model.set_weights([0 * weight for weight in model.get_weights()])
    load_state(model, content, "checkpoint")
    np.testing.assert_allclose(model.predict(X, verbose=0), wanted, atol=1e-6)


class Forgetful(layers.Dense):
    def __init__(self, units: int, inner: Any) -> None:
        super().__init__(units)
        self.held = inner

    def call(self, x: Any) -> Any:
        return self.held(super().call(x))


def test_an_argument_that_a_layer_on_one_of_keras_does_not_keep_is_refused() -> None:
    model = keras.Sequential([keras.Input((6,)), Forgetful(3, layers.Dense(2))])
    with pytest.raises(ModelError, match=r"cannot be sent[\s\S]*inner"):
        encode_model(model)


class Ranker(keras.Model):
    """As on KerasRS' page: nothing keeps the arguments."""

    def __init__(self, users: int, items: int, dimension: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self.users, self.items = (layers.Embedding(n, dimension) for n in (users, items))
        self.scores = keras.Sequential([layers.Dense(3, activation="relu"), layers.Dense(1)])
        self.seen = keras.metrics.Mean(name="seen")
        self._scale, self.noise = 2.0, keras.random.SeedGenerator(5)

    def call(self, inputs: Any) -> Any:
        self.last = both = ops.concatenate(
            [self.users(inputs["user"]), self.items(inputs["item"])], axis=1
        )
        return self._scale * self.scores(both)


def test_a_model_that_keeps_no_argument_travels() -> None:
    ids = {name: np.arange(8) % 5 for name in ("user", "item")}
    model = Ranker(5, 6, 3)
    model(ids)
    model.compile("adam", "mse")
    model.fit(ids, X[:, :1], verbose=0)
    copy = decode_model(encode_model(model))
    for one in (model, copy):
        one.fit(ids, X[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
    for mine, its in zip(model.variables, copy.variables, strict=True):
        np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (mine, its)), atol=1e-6)


class Building(keras.Model):
    """As KerasRS' page on retrieval: its ``build`` builds the layers, and gives one a variable."""

    def __init__(self, users: int, dimension: int) -> None:
        super().__init__()
        self.users, self.apart = (layers.Embedding(users, dimension) for _ in range(2))
        self.head = Held()

    def build(self, shape: Any) -> None:
        self.users.build(shape)
        self.apart.build(shape)
        self.head.held = self.apart.embeddings
        self.head.build(shape)
        super().build(shape)

    def call(self, x: Any) -> Any:
        return self.head(self.users(x))


class Held(layers.Layer):
    held: Any = None

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(self.held))


def test_a_model_that_builds_its_layers_itself_travels() -> None:
    model, ids = Building(5, 3), np.arange(8) % 5
    model.build((None,))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    copy = decode_model(encode_model(model))
    for one in (model, copy):
        one.fit(ids, ids, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for mine, its in zip(model.variables, copy.variables, strict=True):
        np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (mine, its)), atol=1e-6)


@pytest.mark.parametrize("what", ["a loss", "a metric", "a Lambda"])
def test_a_function_that_refers_to_a_part_of_the_model_is_refused(what: str) -> None:
    """On a worker it had a copy, which nothing trains: other losses, rates and gradients."""
    given, hidden, optimizer = keras.Input((6,)), layers.Dense(3), keras.optimizers.SGD(0.1)

    def loss(t: Any, p: Any) -> Any:
        return ops.mean(ops.square(t - p), -1) + ops.sum(ops.square(hidden.kernel))

    def rate(t: Any, p: Any) -> Any:
        return optimizer.learning_rate

    tied = layers.Lambda(lambda v: ops.matmul(v, ops.transpose(hidden.kernel)))
    outputs = hidden(given)
    model = keras.Model(given, tied(outputs) if what == "a Lambda" else layers.Dense(2)(outputs))
    model.compile(
        optimizer, loss if what == "a loss" else "mse", metrics=[rate] if what == "a metric" else []
    )
    with pytest.raises(ModelError, match="cannot be sent to the workers") as caught:
        encode_model(model)
    part = optimizer if what == "a metric" else hidden
    assert f"{type(part).__name__} {part.name!r}" in caught.value.received
