"""sparkdl.mllib: arrays as RDDs and back; a model for LabeledPoints, vectors and matrices."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from pyspark.mllib.linalg import Matrices, Vectors
from pyspark.mllib.regression import LabeledPoint

from sparkdl.errors import ConfigError, DataError
from sparkdl.mllib import (
    SparkMLlibModel,
    from_labeled_point,
    from_matrix,
    from_vector,
    to_labeled_point,
    to_matrix,
    to_simple_rdd,
    to_vector,
)

X = np.random.default_rng(0).normal(size=(60, 3)).astype("float32")
Y = X.argmax(1)


def network(loss: str = "categorical_crossentropy") -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, activation="softmax")])
    model.compile(keras.optimizers.Adam(0.05), loss)
    return model


def test_vectors_and_matrices() -> None:
    array = np.arange(6.0).reshape(2, 3)
    matrix = to_matrix(array)
    assert matrix[1, 0] == 3.0  # MLlib's matrices are stored by columns
    np.testing.assert_array_equal(from_matrix(matrix), array)
    np.testing.assert_array_equal(from_vector(to_vector(array[0])), array[0])
    np.testing.assert_array_equal(from_vector(Vectors.sparse(3, [1], [2.0])), [0, 2, 0])
    with pytest.raises(DataError, match="two dimensions"):
        to_matrix(array[0])
    with pytest.raises(DataError, match="one dimension"):
        to_vector(array)


def test_arrays_to_rdds_and_back(spark: Any) -> None:
    sc = spark.sparkContext
    x, y = to_simple_rdd(spark, X, Y).take(2)[1]
    np.testing.assert_array_equal(x, X[1])
    assert y == Y[1]
    hot = np.eye(3)[Y]
    points = to_labeled_point(sc, X, hot, categorical=True)
    assert isinstance(points.first(), LabeledPoint)
    features, labels = from_labeled_point(points)
    np.testing.assert_allclose(features, X, atol=1e-6)
    assert labels.dtype == np.int32
    np.testing.assert_array_equal(labels, Y)
    np.testing.assert_array_equal(from_labeled_point(points, True, 4)[1], np.eye(4)[Y])
    halves = to_labeled_point(sc, X[:2], [0.5, 1.5])
    np.testing.assert_array_equal(from_labeled_point(halves)[1], [0.5, 1.5])
    with pytest.raises(DataError, match="is no class"):
        from_labeled_point(halves, categorical=True)
    with pytest.raises(DataError, match=r"numbers of rows"):
        to_simple_rdd(sc, X, Y[:5])
    with pytest.raises(DataError, match="one-hot"):
        to_labeled_point(sc, X, Y, categorical=True)


def test_train_and_predict(spark: Any) -> None:
    points = to_labeled_point(spark, X, Y).repartition(2).cache()  # rows in one order
    model = SparkMLlibModel(network(), "synchronous", num_workers=2, batch_size=8)
    history = model.train(points, epochs=12, categorical=True, nb_classes=3)
    assert history.history["loss"][-1] < 0.7 * history.history["loss"][0]
    assert len(history.history["val_loss"]) == 12
    want = model.model.predict(X, verbose=0)
    one = model.predict(Vectors.dense(X[0].astype(float)))
    np.testing.assert_allclose(one.toArray(), want[0], atol=1e-6)
    several = model.predict(Matrices.dense(5, 3, X[:5].astype(float).ravel(order="F")))
    np.testing.assert_allclose(several.toArray(), want[:5], atol=1e-6)
    np.testing.assert_allclose(model.predict(points.map(lambda p: p.features)).collect(),
                               model.predict(from_labeled_point(points)[0]), atol=1e-6)  # fmt: skip
    with pytest.raises(ConfigError, match="nb_classes=3"):
        model.fit(points, categorical=True, nb_classes=7)
    with pytest.raises(ConfigError, match="an RDD of LabeledPoint"):
        model.fit(spark.range(3))
