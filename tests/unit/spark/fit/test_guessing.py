"""The loss of a classifier that has learned nothing from its inputs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.spark.fit.fit_warnings import guessing_loss

pytestmark = pytest.mark.keras


def model(loss: Any, outputs: int = 1) -> Any:
    inputs = keras.Input((2,))
    made = keras.Model(inputs, [keras.layers.Dense(3)(inputs) for _ in range(outputs)])
    made.compile("sgd", loss)
    return made


@pytest.mark.parametrize("kind", ["string", "object", "list"])
def test_classes_have_the_entropy_of_their_frequencies(kind: str) -> None:
    loss: Any = "sparse_categorical_crossentropy"
    if kind == "object":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if kind == "list":
        loss = [loss]
    assert guessing_loss(model(loss), (0.5, 0.25, 0.25)) == pytest.approx(1.5 * np.log(2))


def test_units_of_their_own_have_the_mean_of_their_entropies() -> None:
    found = guessing_loss(model("binary_crossentropy"), (0.5, 1.0, 0.0))
    assert found == pytest.approx(np.log(2) / 3)


def test_it_is_what_keras_says_of_such_answers() -> None:
    labels = np.array([0, 0, 1, 2])
    mean = np.bincount(labels) / len(labels)
    said = keras.losses.sparse_categorical_crossentropy(labels, np.tile(mean, (4, 1)))
    found = guessing_loss(model("sparse_categorical_crossentropy"), tuple(mean))
    assert found == pytest.approx(float(np.mean(said)), rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "mean"),
    [
        ("mse", (0.5, 0.5)),
        ("categorical_crossentropy", (0.5, 0.9)),
        ("binary_crossentropy", (1.7,)),
        ("sparse_categorical_crossentropy", (0.0, 1.0, 0.0)),
        ("sparse_categorical_crossentropy", ()),
        (lambda y, p: p, (0.5, 0.5)),
    ],
    ids=["no classes", "no parts of 1", "no probability", "one class", "nothing known", "own loss"],
)
def test_where_nothing_is_known(loss: Any, mean: tuple[float, ...]) -> None:
    assert guessing_loss(model(loss), mean) is None


def test_of_two_losses_nothing_is_known() -> None:
    both = ["sparse_categorical_crossentropy"] * 2
    assert guessing_loss(model(both, outputs=2), (0.5, 0.5)) is None
