"""Whether a metric is to grow: as the metric itself says, never as the letters of a name do."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import metrics as m

from sparkdl.errors import ConfigError
from sparkdl.learner.state.metric_state import larger_is_better
from sparkdl.tune.spark_search import BuildRecipe, _maximizes


def compiled(metrics: Any, outputs: tuple[str, ...] = ("account",)) -> keras.Model:
    given = keras.Input((3,))
    heads = [keras.layers.Dense(2, name=name)(given) for name in outputs]
    model = keras.Model(given, heads if len(heads) > 1 else heads[0])
    model.compile("sgd", "mse", metrics=metrics)
    return model


def agreement(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(y_true * y_pred, -1)


TWO = {"account": ["mae"], "b": ["acc", "AUC"]}


@pytest.mark.parametrize(
    ("metrics", "name", "larger"),
    [
        ([], "val_loss", False),
        (["accuracy"], "val_accuracy", True),
        (["pearson_correlation"], "val_pearson_correlation", True),
        ([m.MeanIoU(2)], "val_mean_io_u", True),
        ([m.MeanIoU(2, name="overlap")], "overlap", True),
        ([m.FBetaScore()], "fbeta_score", True),
        ([m.MeanAbsoluteError(name="accuracy_of_sorts")], "val_accuracy_of_sorts", False),
        (["mae", m.MeanAbsoluteError(name="mae")], "mae_1", False),
        ([m.TruePositives(name="recalled")], "recalled", None),
        ([agreement], "val_agreement", None),
        (["accuracy"], "val_precision", None),
    ],
)
def test_the_metric_knows(metrics: Any, name: str, larger: bool | None) -> None:
    assert larger_is_better(compiled(metrics), name) is larger


@pytest.mark.parametrize(
    ("name", "larger"),
    [("val_account_loss", False), ("account_mae", False), ("b_acc", True), ("val_b_AUC", True)],
)
def test_of_several_outputs(name: str, larger: bool) -> None:
    assert larger_is_better(compiled(TWO, ("account", "b")), name) is larger


def test_of_other_kinds_of_models() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    for model in (Own(), keras.Sequential([keras.layers.Dense(2)])):
        model.compile("sgd", "mse", metrics=["accuracy", "mae"])
        model(keras.ops.zeros((1, 3)))
        assert larger_is_better(model, "val_accuracy") is True
        assert larger_is_better(model, "mae") is False


def test_the_metrics_work_as_before() -> None:
    model = compiled(["accuracy"])
    assert larger_is_better(model, "accuracy")
    assert {*model.evaluate(np.zeros((1, 3)), np.eye(2)[:1], verbose=0, return_dict=True)} == {
        "loss",
        "accuracy",
    }


def test_a_search_asks_where_nothing_tells() -> None:
    recipe = BuildRecipe(lambda trial: compiled([agreement, "accuracy"]), 0, {}, {})
    assert _maximizes("val_accuracy", recipe, 0, ())
    with pytest.raises(ConfigError, match="mode='max' or mode='min'"):
        _maximizes("val_agreement", recipe, 0, ())


def test_a_build_that_fails_tells_nothing() -> None:
    recipe = BuildRecipe(lambda trial: 1 / 0, 0, {}, {})  # type: ignore[arg-type,return-value]
    assert not _maximizes("val_loss", recipe, 0, ())
    with pytest.raises(ConfigError, match="ZeroDivisionError from build"):
        _maximizes("val_accuracy", recipe, 0, (Exception,))
