"""Keras' own call: features and labels as two arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from sparkdl.errors import ConfigError
from sparkdl.spark.forms.arrays import takes_labels_apart

X, Y, W = np.zeros((4, 3)), np.arange(4), np.ones(4)


class Model:
    @takes_labels_apart
    def fit(
        self, data: Any, epochs: int = 1, batch_size: Any = None, sample_weight: Any = None
    ) -> tuple[Any, ...]:
        return data, epochs, batch_size, sample_weight


def same(given: Any, wanted: Any) -> bool:
    return len(given) == len(wanted) and all(
        np.array_equal(one, other) for one, other in zip(given, wanted, strict=True)
    )


def test_features_and_labels_become_one_argument() -> None:
    for args, options in (((X, Y), {}), ((X,), {"y": Y}), ((), {"x": X, "y": Y})):
        data, epochs, batch_size, weight = Model().fit(*args, epochs=5, batch_size=2, **options)
        assert same(data, (X, Y))
        assert (epochs, batch_size, weight) == (5, 2, None)
    data, *_ = Model().fit(X, Y, sample_weight=W)
    assert same(data, (X, Y, W))
    assert Model().fit([X, X], {"a": Y})[0] == ([X, X], {"a": Y})
    data, *_ = Model().fit(pd.DataFrame(X), pd.Series(Y))
    assert same(data, (X, Y))
    assert all(isinstance(part, np.ndarray) for part in data)
    assert same(Model().fit(X.tolist(), Y.tolist())[0], (X.tolist(), Y.tolist()))


@pytest.mark.parametrize("second", [3, np.int64(3), None])
def test_other_calls_are_what_they_were(second: Any) -> None:
    data, epochs, _, weight = Model().fit((X, Y), second, sample_weight="weight")
    assert same(data, (X, Y))
    assert (epochs, weight) == (second, "weight")
    assert Model().fit("rows.parquet", 2)[:2] == ("rows.parquet", 2)
    with pytest.raises(ConfigError, match=r"(?s)without a name.*fit\(df, features=.*x='rows"):
        Model().fit(x="rows.parquet")
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        Model().fit("rows.parquet", y="label")


def test_what_follows_the_labels_must_have_a_name() -> None:
    with pytest.raises(ConfigError, match=r"(?s)fit\(x, y, epochs=5, batch_size=32\).*: 32, 5"):
        Model().fit(X, Y, 32, 5)


@pytest.mark.keras
def test_a_spark_model_evaluates_x_and_y_as_keras_does() -> None:
    import keras

    from sparkdl import SparkModel
    from sparkdl.compat.elephas.spark_model import SparkModel as ElephasModel

    keras.utils.set_random_seed(0)
    left, right = keras.Input((1,), name="left"), keras.Input((1,), name="right")
    model = keras.Model([left, right], keras.layers.Dense(1)(keras.layers.Add()([left, right])))
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(5, 2)).astype("float32")
    columns = [x[:, :1], x[:, 1:]]
    want = model.evaluate(columns, W[:4].sum() * np.ones(5), verbose=0)
    y = np.full(5, 4.0)
    assert SparkModel(model).evaluate(columns, y)["loss"] == pytest.approx(want, rel=1e-6)
    assert SparkModel(model).evaluate(x=columns, y=y)["loss"] == pytest.approx(want, rel=1e-6)
    of_elephas = ElephasModel(model)
    predicted = model.predict(columns, verbose=0)
    for given in (x, columns):  # Elephas' rows have the inputs side by side
        assert of_elephas.evaluate(given, y) == pytest.approx(want, rel=1e-6)
        np.testing.assert_allclose(of_elephas.predict(given), predicted, rtol=1e-6)
