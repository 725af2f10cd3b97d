"""Models that Keras trains and that a worker could not take: all train, as plain Keras does."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from small_fits import CLASSES, X, as_keras
from whole_fit import MODES

from sparkdl.errors import DataError
from sparkdl.learner.signature import model_signature

layers = keras.layers


def classifier(loss: Any = "sparse_categorical_crossentropy", **settings: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(5, "relu"), layers.Dense(3, "softmax")]
    )
    model.compile(keras.optimizers.Adam(0.05), loss, **settings)
    return model


def numpy_loss(y: Any, predicted: Any) -> Any:
    """Cannot be compiled: it looks at numbers."""
    weight = float(np.mean(np.asarray(y)) > -1)
    return keras.ops.mean(keras.ops.square(predicted - keras.ops.cast(y, "float32")), -1) * weight


@pytest.mark.parametrize("mode", MODES)
def test_run_eagerly_takes_steps_that_are_not_compiled(mode: str) -> None:
    one_hot = np.eye(3, dtype="float32")[CLASSES]
    as_keras(lambda: classifier(numpy_loss, run_eagerly=True, metrics=["mae"]), one_hot, mode)


def two_outputs(as_list: bool) -> Any:
    keras.utils.set_random_seed(1)
    given = keras.Input((6,))
    hidden = layers.Dense(5, "relu")(given)
    a, b = layers.Dense(1, name="a")(hidden), layers.Dense(2, name="b")(hidden)
    model = keras.Model(given, [a, b] if as_list else {"a": a, "b": b})
    model.compile(keras.optimizers.Adam(0.05), ["mse", None] if as_list else {"a": "mse"})
    return model


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_outputs_without_a_loss_need_no_labels(mode: str, as_list: bool) -> None:
    as_keras(lambda: two_outputs(as_list), {"a": X[:, :1]}, mode)
    assert model_signature(two_outputs(as_list)).optional_labels == {"b"}


def test_the_labels_that_a_loss_ignores() -> None:
    for ignored in (255, -1):
        loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=ignored)
        found = model_signature(classifier(loss)).ignored_classes
        assert list(found.values()) == [ignored]
    assert model_signature(classifier()).ignored_classes == {}


def test_a_label_that_is_neither_a_class_nor_ignored_is_refused() -> None:
    from sparkdl.data import ColumnSpec, DataSpec, rows_from_numpy

    def rows(labels: list[int]) -> Any:
        spec = DataSpec(
            {"features": ColumnSpec(("f",), (6,))},
            {"label": ColumnSpec(("l",), (), "int32", "scalars", classes=3, ignored=255)},
        )
        return rows_from_numpy(X[: len(labels)], np.array(labels), spec=spec)

    assert rows([0, 255, 2]).take([1]).y["label"].tolist() == [255]
    with pytest.raises(DataError, match="label out of range"):
        rows([0, 255, 3])
