"""dist-keras' transformers, as expressions that Spark computes itself, also on Spark Connect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import functions as F

from sparkdl.errors import ConfigError, DataError
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.spark.forms.fields import field_of
from sparkdl.spark.session.frames import column_named as column
from sparkdl.spark.session.frames import require_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Transformer:
    """Adds a column to a DataFrame."""

    def transform(self, dataframe: object) -> Any:
        """The DataFrame with the new column."""
        raise NotImplementedError


class MinMaxTransformer(Transformer):
    """Moves numbers from one range to another: ``(x - o_max) · scale + n_max``.

    Args:
        o_min: The least of the old range.
        o_max: The largest of the old range.
        n_min: The least of the new range.
        n_max: The largest of the new range.
        input_col: A column of vectors, or of numbers.
        output_col: The new column.
        is_vector: Whether it is of vectors.

    Raises:
        ConfigError: The old range is empty.
    """

    @lists_its_arguments
    def __init__(
        self, o_min: float, o_max: float, n_min: float, n_max: float, input_col: str,
        output_col: str, is_vector: bool = True,
    ) -> None:  # fmt: skip
        if o_min == o_max:
            raise ConfigError(
                "MinMaxTransformer divides by the length of the old range",
                expected="o_min < o_max", received=f"{o_min} and {o_max}",
            )  # fmt: skip
        self.o_min, self.o_max = float(o_min), float(o_max)
        self.n_min, self.n_max = float(n_min), float(n_max)
        self.scale = (self.n_max - self.n_min) / (self.o_max - self.o_min)
        self.input_column, self.output_column = input_col, output_col
        self.is_vector = is_vector

    def transform(self, dataframe: DataFrame) -> Any:
        check_columns(self, dataframe, "input_col", self.input_column)
        if not self.is_vector:
            return dataframe.withColumn(self.output_column, self._moved(column(self.input_column)))
        values = F.transform(_array(dataframe, self.input_column), self._moved)
        return dataframe.withColumn(self.output_column, array_to_vector(values))

    def _moved(self, value: Any) -> Any:
        return (value - self.o_max) * self.scale + self.n_max


class BinaryLabelTransformer(Transformer):
    """``[1, 0]`` where a column has a value, else ``[0, 1]``, as vectors."""

    @lists_its_arguments
    def __init__(self, input_column: str, output_column: str, label: object) -> None:
        self.input_column, self.output_column, self.label = input_column, output_column, label

    def transform(self, dataframe: DataFrame) -> Any:
        check_columns(self, dataframe, "input_column", self.input_column)
        found = column(self.input_column).eqNullSafe(F.lit(self.label)).cast("double")
        return dataframe.withColumn(self.output_column, array_to_vector(F.array(found, 1 - found)))


class StandardTransformer(Transformer):
    """Numbers less their mean, divided by their standard deviation (of all rows, not of a sample).

    Args:
        columns: Columns of numbers.
        suffix: The new columns' names are the old ones with this at the end.
    """

    @lists_its_arguments
    def __init__(self, columns: Sequence[str], suffix: str = "_normalized") -> None:
        self.columns, self.column_suffix = list(columns), suffix
        self.means: dict[str, float] = {}
        self.stddevs: dict[str, float] = {}

    def transform(self, dataframe: DataFrame) -> Any:
        """The DataFrame with the new columns; one job computes the means and deviations.

        Raises:
            DataError: A column that does not vary, or has no values.
        """
        check_columns(self, dataframe, "columns", *self.columns)
        wanted = [f(column(name)) for name in self.columns for f in (F.mean, F.stddev_pop)]
        found = list(dataframe.agg(*wanted).first())
        self.means = dict(zip(self.columns, found[::2], strict=True))
        self.stddevs = dict(zip(self.columns, found[1::2], strict=True))
        for name in self.columns:
            if not self.stddevs[name]:
                raise DataError(
                    f"column {name!r} has no standard deviation to divide by",
                    expected="numbers that differ",
                    received=f"a standard deviation of {self.stddevs[name]}",
                )
        new = {
            f"{name}{self.column_suffix}": (column(name) - self.means[name]) / self.stddevs[name]
            for name in self.columns
        }
        return dataframe.withColumns(new)


class DenseTransformer(Transformer):
    """Sparse vectors -> dense ones."""

    @lists_its_arguments
    def __init__(self, input_col: str, output_col: str) -> None:
        self.input_column, self.output_column = input_col, output_col

    def transform(self, dataframe: DataFrame) -> Any:
        check_columns(self, dataframe, "input_col", self.input_column)
        vector = array_to_vector(_array(dataframe, self.input_column))
        return dataframe.withColumn(self.output_column, vector)


class ReshapeTransformer(Transformer):
    """Vectors -> nested arrays of a shape, row after row."""

    @lists_its_arguments
    def __init__(self, input_col: str, output_col: str, shape: Sequence[int]) -> None:
        self.input_column, self.output_column = input_col, output_col
        self.shape = tuple(shape)

    def transform(self, dataframe: DataFrame) -> Any:
        """The DataFrame with ``output_col``; a row of another size ends Spark's job."""
        check_columns(self, dataframe, "input_col", self.input_column)
        values, size = _array(dataframe, self.input_column), math.prod(self.shape)
        wrong = F.concat(
            F.lit(f"ReshapeTransformer expected {size} values per row; received "),
            F.size(values).cast("string"),
        )
        values = F.when(F.size(values) == size, values).otherwise(F.raise_error(wrong))
        for length in reversed(self.shape[1:]):
            values = _parts(values, length)
        return dataframe.withColumn(self.output_column, values)


class OneHotTransformer(Transformer):
    """Numbers of classes -> arrays with a 1 at that place.

    Args:
        output_dim: Classes.
        input_col: A column of numbers.
        output_col: The new column.
    """

    @lists_its_arguments
    def __init__(self, output_dim: int, input_col: str, output_col: str) -> None:
        self.output_dimensionality = output_dim
        self.input_column, self.output_column = input_col, output_col

    def transform(self, dataframe: DataFrame) -> Any:
        """The DataFrame with ``output_col``; a number that is no class ends Spark's job."""
        check_columns(self, dataframe, "input_col", self.input_column)
        label, classes = column(self.input_column), self.output_dimensionality
        wrong = F.concat(
            F.lit(f"OneHotTransformer expected a class from 0 to {classes - 1}; received "),
            F.coalesce(label.cast("string"), F.lit("null")),
        )
        hot = F.array(*[(label.cast("int") == place).cast("double") for place in range(classes)])
        known = F.when((label >= 0) & (label < classes), hot)
        return dataframe.withColumn(self.output_column, known.otherwise(F.raise_error(wrong)))


class LabelIndexTransformer(Transformer):
    """Outputs of a model -> the number of a class, as double.

    The first class whose output is at least ``activation_threshold``; if there is none, the one
    with the largest; if none is above 0, ``default_index``.

    Args:
        output_dim: Classes.
        input_col: A column of vectors or arrays.
        output_col: The new column.
    """

    @lists_its_arguments
    def __init__(
        self, output_dim: int, input_col: str = "prediction", output_col: str = "prediction_index",
        default_index: int = 0, activation_threshold: float = 0.55,
    ) -> None:  # fmt: skip
        self.output_dimensionality = output_dim
        self.input_column, self.output_column = input_col, output_col
        self.default_index, self.activation_threshold = default_index, activation_threshold

    def transform(self, dataframe: DataFrame) -> Any:
        check_columns(self, dataframe, "input_col", self.input_column)
        values = F.slice(_array(dataframe, self.input_column), 1, self.output_dimensionality)
        active = F.transform(values, lambda value: value >= self.activation_threshold)
        largest = F.array_max(values)
        # array_position counts from 1, and is 0 where nothing is found
        index = (
            F.when(F.array_contains(active, True), F.array_position(active, True) - 1)
            # by its name: before Spark 4 the function itself takes no column as second argument
            .when(largest > 0, F.call_function("array_position", values, largest) - 1)
            .otherwise(F.lit(self.default_index))
        )
        return dataframe.withColumn(self.output_column, index.cast("double"))


def check_columns(what: object, frame: DataFrame, argument: str, *names: str) -> None:
    """Refuses what is no DataFrame, or has not these columns.

    Raises:
        ConfigError: It is no DataFrame.
        DataError: A column is missing.
    """
    require_frame(type(what).__name__, frame)
    for name in names:
        field_of(frame.schema, name, argument)


def _array(frame: DataFrame, name: str) -> Any:
    if isinstance(frame.schema[name].dataType, VectorUDT):
        return vector_to_array(column(name))
    return column(name).cast("array<double>")


def _parts(values: object, length: int) -> Any:
    begins = F.sequence(F.lit(1), F.size(values) - length + 1, F.lit(length))
    return F.transform(begins, lambda begin: F.slice(values, begin, F.lit(length)))


class Evaluator:
    """Compares a column of labels with one of predictions."""

    @lists_its_arguments
    def __init__(self, label_col: str = "label", prediction_col: str = "prediction") -> None:
        self.label_column, self.prediction_column = label_col, prediction_col

    def evaluate(self, dataframe: object) -> float:
        """How good the predictions are."""
        raise NotImplementedError


class AccuracyEvaluator(Evaluator):
    """The share of the rows whose prediction is the label, both numbers."""

    def evaluate(self, dataframe: DataFrame) -> float:
        """The accuracy, from 0 to 1; a null is no right prediction.

        Raises:
            DataError: There are no rows.
        """
        check_columns(self, dataframe, "label_col", self.label_column)
        check_columns(self, dataframe, "prediction_col", self.prediction_column)
        same = column(self.label_column) == column(self.prediction_column)
        right = F.coalesce(same, F.lit(False))
        share = dataframe.agg(F.avg(right.cast("double"))).first()[0]
        if share is None:
            raise DataError(
                "there are no rows to evaluate", expected="at least one row", received="none"
            )
        return float(share)
