"""Mistakes in what a model was compiled with are found on the driver, and blamed on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from sparkdl.data import ColumnSpec, DataSpec
from sparkdl.errors import DataError, ModelError
from sparkdl.learner.signature import model_signature
from sparkdl.spark.fit.trained_model import prepare_metrics
from sparkdl.spark.inference.evaluate import evaluate_arrays

pytestmark = pytest.mark.keras

KINDS = ("softmax", "sparse_categorical_crossentropy")


def model_of(activation: Any, loss: Any, metrics: Any = None) -> Any:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation)], name="m")
    model.compile("sgd", loss, metrics=metrics)
    return model


def prepare(model: Any, *shape: int, dtype: str = "int32") -> None:
    label = ColumnSpec(("label",), shape, dtype, "array" if shape else "scalars")
    spec = DataSpec({"x": ColumnSpec(("x",), (4,))}, {"y": label})
    prepare_metrics(model, SimpleNamespace(spec=spec), 32)  # type: ignore[arg-type]


def own(y_true: Any, y_pred: Any) -> Any:
    return unknown(y_pred)  # type: ignore[name-defined] # noqa: F821


class Own(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(y_pred.missing)


@pytest.mark.parametrize(
    ("loss", "metrics", "what", "received", "hint"),
    [
        ("mssse", None, "a loss that Keras does not know", "loss 'mssse'", "mean 'mse' or"),
        (
            KINDS[1],
            ["accurac"],
            "a metric that Keras",
            "metric 'accurac'",
            "'accuracy' or 'binary_",
        ),
        (KINDS[1], ["xqzw"], "a metric that Keras", "metric 'xqzw'", ""),
        (own, None, "loss 'own'", "NameError: name 'unknown'", "own ("),
        (Own(name="own"), None, "loss 'own'", "'missing'", "call ("),
        (KINDS[1], [own], "metric 'own'", "NameError: name 'unknown'", "own ("),
        (KINDS[1], ["auc"], "metric 'auc", "leading dimension", "one-hot"),
        (KINDS[1], [keras.metrics.Recall(name="r")], "metric 'r'", "Dimensions", "one-hot"),
    ],
)
def test_a_mistake_is_blamed_on_the_loss_or_the_metric(
    loss: Any, metrics: Any, what: str, received: str, hint: str
) -> None:
    model = model_of("softmax", loss, metrics)
    for _ in range(2):  # a second try finds it again
        with pytest.raises(ModelError) as caught:
            prepare(model)
        assert what in caught.value.what
        assert "model 'm'" in caught.value.what
        assert received in caught.value.received
        assert hint in caught.value.hint


def test_columns_that_do_not_fit_are_blamed_on_the_columns() -> None:
    with pytest.raises(DataError, match="cannot take these columns"):
        prepare(model_of("softmax", "categorical_crossentropy"), 5, dtype="float32")


def test_losses_that_keras_chooses_by_the_shapes() -> None:
    prepare(model_of("softmax", "crossentropy"))
    prepare(model_of("softmax", "ce"))


@pytest.mark.parametrize("metric", ["auc", "accuracy", "Acc", "f1_score", "mean_io_u"])
def test_metrics_of_one_hot_labels(metric: str) -> None:
    made = keras.metrics.MeanIoU(2) if metric == "mean_io_u" else metric
    prepare(model_of("softmax", "categorical_crossentropy", [made]), 3, dtype="float32")


def test_a_model_of_several_outputs_can_be_built_after_a_mistake() -> None:
    given = keras.Input((4,), name="x")
    model = keras.Model(given, {n: layers.Dense(3, name=n)(given) for n in ("a", "b")})
    model.compile("sgd", {"a": "mse", "b": "categorical_crossentropy"})
    for width in (5, 3):
        labels = {n: ColumnSpec((n,), (3 if n == "a" else width,)) for n in ("a", "b")}
        source: Any = SimpleNamespace(spec=DataSpec({"x": ColumnSpec(("x",), (4,))}, labels))
        if width == 5:
            with pytest.raises(DataError):
                prepare_metrics(model, source, 32)
        else:
            prepare_metrics(model, source, 32)
    assert [m.name for m in model.metrics] == ["loss", "a_loss", "b_loss"]


def test_evaluating_arrays_blames_the_metric() -> None:
    model = model_of(*KINDS, [keras.metrics.Recall(name="r")])
    data = np.zeros((8, 4), "float32"), np.zeros(8, "int64")
    with pytest.raises(ModelError, match="metric 'r'"):
        evaluate_arrays(model, data, model_signature(model), batch_size=4)
