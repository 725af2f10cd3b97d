"""RDDs and ``pyspark.mllib``: NumPy arrays as RDDs and back, and a model for LabeledPoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.mllib.linalg import DenseMatrix, Matrices, Matrix, Vector, Vectors
from pyspark.mllib.regression import LabeledPoint

from sparkdl.errors import ConfigError, DataError
from sparkdl.learner.signature import model_signature
from sparkdl.settings.values import shown
from sparkdl.spark.session.frames import is_rdd
from sparkdl.spark.session.running import with_this_interpreter
from sparkdl.spark.spark_model import SparkModel

Array = npt.NDArray[Any]


def to_simple_rdd(sc: object, features: Array, labels: Array) -> Any:
    """NumPy arrays as an RDD of pairs ``(x, y)``, one per row.

    Args:
        sc: A SparkContext, or a SparkSession (not of Spark Connect, which has no RDDs).
        features: ``(rows, ...)``.
        labels: ``(rows, ...)``.

    Raises:
        DataError: They have different numbers of rows.
        ConfigError: There are no RDDs here.
    """
    context = _context_of(sc)
    _check_rows(features, labels)
    return context.parallelize(list(zip(features, labels, strict=True)))


def to_labeled_point(sc: object, features: Array, labels: Array, categorical: bool = False) -> Any:
    """NumPy arrays as an RDD of ``LabeledPoint``.

    Args:
        sc: See :func:`to_simple_rdd`.
        features: ``(rows, features)``.
        labels: ``(rows,)``, or one-hot ``(rows, classes)`` where ``categorical`` is True.
        categorical: Labels are one-hot; each becomes the number of its class.

    Raises:
        DataError: They have different numbers of rows, or another shape.
        ConfigError: There are no RDDs here.
    """
    context = _context_of(sc)
    _check_rows(features, labels)
    y = np.asarray(labels)
    if y.ndim == 2 and y.shape[1] == 1 and not categorical:
        y = y.reshape(-1)
    if y.ndim != (2 if categorical else 1) or np.ndim(features) != 2:
        raise DataError(
            "a LabeledPoint is a vector of features and one number",
            expected="features (rows, features), labels "
            + ("(rows, classes), one-hot" if categorical else "(rows,)"),
            received=f"features {np.shape(features)}, labels {y.shape}",
            hint="to_simple_rdd takes arrays of any shape",
        )
    numbers = y.argmax(axis=1) if categorical else y
    points = [
        LabeledPoint(float(label), to_vector(np.asarray(row, np.float64)))
        for row, label in zip(features, numbers, strict=True)
    ]
    return context.parallelize(points)


def from_labeled_point(
    rdd: Any, categorical: bool = False, nb_classes: int | None = None
) -> tuple[Array, Array]:
    """An RDD of ``LabeledPoint`` as NumPy arrays, here on the driver.

    Args:
        rdd: Small enough for the driver.
        categorical: Labels become one-hot, ``(rows, classes)``.
        nb_classes: Their classes; None for one more than the greatest label.

    Returns:
        Features, float64 ``(rows, features)``, and labels: int32 ``(rows,)`` where all are whole
        numbers, else float64; float64 ``(rows, classes)`` where ``categorical`` is True.

    Raises:
        DataError: A label is no class.
    """
    pairs = with_this_interpreter(
        rdd.map(lambda point: (point.features.toArray(), point.label))
    ).collect()
    features = np.asarray([x for x, _ in pairs])
    labels = np.asarray([y for _, y in pairs], np.float64)
    whole = labels.astype(np.int32)
    is_whole = bool((whole == labels).all())
    if not categorical:
        return features, whole if is_whole else labels
    classes = nb_classes or int(whole.max(initial=-1)) + 1
    if not is_whole or whole.min(initial=0) < 0 or whole.max(initial=0) >= classes:
        strange = labels[(whole != labels) | (labels < 0) | (labels >= classes)]
        raise DataError(
            "a label is no class", expected=f"whole numbers from 0 to {classes - 1}",
            received=str(strange[0]),
        )  # fmt: skip
    return features, np.eye(classes)[whole]


def to_vector(array: Array) -> Vector:
    """A one-dimensional NumPy array as a vector of MLlib.

    Raises:
        DataError: It has another number of dimensions.
    """
    if np.ndim(array) != 1:
        raise DataError("a vector has one dimension", expected="shape (values,)",
                        received=str(np.shape(array)))  # fmt: skip
    return Vectors.dense(array)


def from_vector(vector: Any) -> Array:
    """A vector of MLlib or ML, dense or sparse, as a NumPy array ``(values,)``."""
    array: Array = vector.toArray()
    return array


def to_matrix(array: Array) -> DenseMatrix:
    """A NumPy array ``(rows, columns)`` as a matrix of MLlib, which is stored by columns.

    Raises:
        DataError: It has another number of dimensions.
    """
    if np.ndim(array) != 2:
        raise DataError("a matrix has two dimensions", expected="shape (rows, columns)",
                        received=str(np.shape(array)))  # fmt: skip
    return Matrices.dense(*np.shape(array), np.asarray(array, np.float64).ravel(order="F"))


def from_matrix(matrix: Any) -> Array:
    """A matrix of MLlib as a NumPy array ``(rows, columns)``."""
    array: Array = matrix.toArray()
    return array


class SparkMLlibModel(SparkModel):
    """A :class:`sparkdl.SparkModel` for RDDs of ``LabeledPoint``, vectors and matrices.

    ::

        model = SparkMLlibModel(keras_model, mode='synchronous')
        model.fit(points, epochs=5)
        model.predict(Vectors.dense([0.5, 1.0]))
    """

    def fit(  # type: ignore[override]
        self,
        labeled_points: Any,
        epochs: int = 10,
        batch_size: int | None = None,
        verbose: str | int = 0,
        validation_split: float = 0.1,
        categorical: bool = False,
        nb_classes: int | None = None,
        **fit_arguments: Any,
    ) -> Any:
        """Trains on an RDD of ``LabeledPoint``; see :meth:`sparkdl.SparkModel.fit`.

        Args:
            labeled_points: An RDD of ``LabeledPoint``.
            epochs: Passes over the data.
            batch_size: Rows per step and worker; None for the constructor's.
            verbose: 0, 1 or 2.
            validation_split: Share of the rows held out at random for validation.
            categorical: The loss wants one-hot labels. Class numbers are made one-hot for such a
                loss in any case.
            nb_classes: Classes; the model's last layer must have as many units.
            **fit_arguments: Others of :meth:`sparkdl.SparkModel.fit`.

        Raises:
            ConfigError: This is no RDD, or the model has another number of classes.
        """
        if not is_rdd(labeled_points):
            raise ConfigError(
                "SparkMLlibModel trains on an RDD", expected="an RDD of LabeledPoint",
                received=shown(labeled_points),
                hint="to_labeled_point(sc, features, labels); SparkModel takes DataFrames",
            )  # fmt: skip
        if categorical and nb_classes is not None:
            check_classes(self.model, nb_classes)
        return super().fit(
            labeled_points, epochs, batch_size, verbose, validation_split, **fit_arguments
        )

    train = fit

    def predict(self, data: Any, *arguments: Any, **options: Any) -> Any:
        """The model's outputs for a vector, the rows of a matrix, or what ``SparkModel`` takes.

        Returns:
            For a vector of MLlib a vector, for a matrix a matrix with a row for each of its rows.
        """
        if isinstance(data, Vector):
            return to_vector(super().predict(from_vector(data)[None], *arguments, **options)[0])
        if isinstance(data, Matrix):
            return to_matrix(super().predict(from_matrix(data), *arguments, **options))
        return super().predict(data, *arguments, **options)


def check_classes(model: object, nb_classes: int) -> None:
    """Refuses a number of classes that is not that of a Keras model's units.

    Raises:
        ConfigError: It is another.
    """
    for name, spec in model_signature(model).outputs.items():
        if spec.shape and spec.shape[-1] not in (None, nb_classes):
            raise ConfigError(
                f"output {name!r} has another number of classes",
                expected=f"nb_classes={spec.shape[-1]}, the units of the last layer",
                received=f"nb_classes={nb_classes}",
            )


def _context_of(sc: object) -> Any:
    """A SparkContext, also from a classic session."""
    if hasattr(sc, "parallelize"):
        return sc
    if type(sc).__module__.startswith("pyspark.sql.connect") or not hasattr(sc, "sparkContext"):
        raise ConfigError(
            "there are no RDDs here", expected="a SparkContext, or a SparkSession that has one",
            received=f"{type(sc).__module__}.{type(sc).__qualname__}",
            hint="Spark Connect has no RDDs: spark.createDataFrame makes a DataFrame",
        )  # fmt: skip
    return sc.sparkContext


def _check_rows(features: Any, labels: Any) -> None:
    if len(features) != len(labels):
        raise DataError(
            "features and labels have different numbers of rows",
            expected=f"{len(features)} labels", received=f"{len(labels)}",
        )  # fmt: skip
