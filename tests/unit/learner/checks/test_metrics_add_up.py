"""Which metrics may be summed over workers: all of Keras', and those that are sums."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from sparkdl.data import ColumnSpec
from sparkdl.errors import ModelError
from sparkdl.learner.checks.compile_parts import check_metrics_add_up
from sparkdl.learner.state.metric_state import build_metrics


@dataclass
class Example:
    shape: tuple[int | None, ...]
    dtype: str = "float32"


class Total(keras.metrics.Metric):
    def __init__(self, name: str = "total", start: Any = "zeros", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.state = self.add_weight(shape=(), initializer=start, name="state")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.state.assign_add(ops.sum(ops.abs(y_pred)))

    def result(self) -> Any:
        return ops.convert_to_tensor(self.state)


class Largest(Total):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.state.assign(ops.maximum(self.state, ops.max(y_pred)))


class Running(Total):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.state.assign(0.9 * self.state + 0.1 * ops.mean(y_pred))


class Smallest(Total):
    def __init__(self, name: str = "smallest", **options: Any) -> None:
        super().__init__(name=name, start="ones", **options)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.state.assign(ops.minimum(self.state, ops.min(y_pred)))

    def reset_state(self) -> None:
        self.state.assign(1.0)


class Declared(Largest):
    sums_over_workers = True


class Denied(Total):
    sums_over_workers = False


class Choosy(Total):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        if hasattr(y_pred, "numpy"):  # not while the step is traced
            raise ValueError("only real rows")


def model_with(*metrics: Any, classes: int = 3) -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(classes, "softmax")])
    model.compile("sgd", "categorical_crossentropy", metrics=list(metrics))
    build_metrics(model, {"x": Example((None, 4))}, {"y": Example((None, classes))}, None)  # type: ignore[dict-item]
    return model


def check(model: Any, classes: int = 3) -> None:
    spec = ColumnSpec(("y",), (classes,), one_hot=classes)
    check_metrics_add_up(model, {"x": Example((None, 4))}, {"y": spec})


@pytest.mark.parametrize("metric", [Total, Declared])
def test_sums_and_what_is_declared_are_taken(metric: Any) -> None:
    model = model_with("accuracy", metric())
    check(model)
    assert float(model.metrics[1].metrics[1].result()) == 0.0  # reset


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (Largest, "as the sum of one and the other"),
        (Running, "as the sum of one and the other"),
        (Smallest, "start at"),
        (Denied, "sums_over_workers = False"),
        (Choosy, "only real rows"),
    ],
)
def test_what_is_no_sum_is_refused_by_name(metric: Any, said: str) -> None:
    with pytest.raises(ModelError, match="cannot be summed over the workers") as caught:
        check(model_with("accuracy", metric(name="mine")))
    assert "'mine'" in str(caught.value)
    assert said in caught.value.received
    assert "sums_over_workers = True" in caught.value.hint


def test_each_metric_sees_its_own_output() -> None:
    class Second(Total):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            assert y_true.shape[1:] == (5,)
            assert y_pred.shape[1:] == (5,)
            self.state.assign_add(ops.sum(y_true * y_pred))

    inputs = keras.Input((4,), name="x")
    outputs = {name: keras.layers.Dense(n, name=name)(inputs) for name, n in (("a", 2), ("b", 5))}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"a": "mse", "b": "mse"}, metrics={"b": [Second()]})
    y = {"a": Example((None, 2)), "b": Example((None, 5))}
    build_metrics(model, {"x": Example((None, 4))}, y, None)  # type: ignore[arg-type]
    specs = {name: ColumnSpec((name,), e.shape[1:]) for name, e in y.items()}
    check_metrics_add_up(model, {"x": Example((None, 4))}, specs)


KERAS = sorted(
    name
    for name, thing in vars(keras.metrics).items()
    if inspect.isclass(thing) and issubclass(thing, keras.metrics.Metric)
)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "MeanIoU": {"num_classes": 3},
    "IoU": {"num_classes": 3, "target_class_ids": [0, 1]},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0, 1]},
    "OneHotMeanIoU": {"num_classes": 3},
    "BinaryIoU": {},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
}


@pytest.mark.parametrize("name", [n for n in KERAS if n != "Metric"])
def test_the_variables_of_every_keras_metric_are_sums(name: str) -> None:
    metric = getattr(keras.metrics, name)(**ARGUMENTS.get(name, {}))
    rng = np.random.default_rng(3)

    def state(*batches: Any) -> Any:
        metric.reset_state()
        for y, p in batches:
            if name in ("Mean", "Sum"):
                metric.update_state(p)
            else:
                metric.update_state(y, p)
        return np.concatenate([np.ravel(v.numpy()) for v in metric.variables])

    def batch(rows: int) -> tuple[Any, Any]:
        p = rng.uniform(0.05, 0.95, (rows, 3)).astype("float32")
        classes = rng.integers(0, 3, rows)
        if name in ("MeanIoU", "IoU"):
            return classes, rng.integers(0, 3, rows)
        if name.startswith("Sparse"):
            return classes, p
        return np.eye(3, dtype="float32")[classes], p

    a, b = batch(6), batch(4)
    state(a)  # some make their variables now
    assert not state().any()
    np.testing.assert_allclose(state(a, b), state(a) + state(b), rtol=1e-5, atol=1e-6)


class Ranked(Total):
    """As ``keras_rs.metrics.NDCG``: a label for each of the values that a row is ranked by."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        assert tuple(y_true.shape) == tuple(y_pred.shape)
        super().update_state(y_true, y_pred)


def test_labels_of_a_loss_of_the_user_s_own_are_as_wide_as_the_output() -> None:
    model = model_with(Ranked(), classes=7)
    labels = {"output": ColumnSpec(("y",), (None,))}
    check_metrics_add_up(model, {"x": Example((None, 4))}, labels)


class Listed(keras.Model):
    """As on KerasRS' page on lists: its shape is of an array, and its inputs are a dict."""

    def call(self, inputs: dict[str, Any]) -> Any:
        return inputs["scores"] + inputs["more"]

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (input_shape[0], input_shape[1])


def test_a_shape_that_keras_never_asks_for_is_not_asked_for() -> None:
    model = Listed()
    x = {name: np.zeros((2, 5), "float32") for name in ("scores", "more")}
    model(x)
    model.compile("sgd", "mse", metrics=[Ranked()])
    model.fit(x, x["more"], verbose=0)
    labels = {"output": ColumnSpec(("y",), (None,))}
    check_metrics_add_up(model, {name: Example((None, 5)) for name in x}, labels)
