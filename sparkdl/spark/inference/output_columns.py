"""Which column is made of which output of a model, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T

from sparkdl.data.ragged import Ragged, Stored
from sparkdl.data.vectors import is_vector
from sparkdl.errors import DataError
from sparkdl.learner.prediction.class_scores import ClassScores
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.learner.signature import Shape
from sparkdl.spark.session.versions import arrow_type_of

Array = npt.NDArray[Any]
Form = Literal["values", "probability", "raw", "class"]
"""The output as it is; probabilities of all classes; what grows with them (logits or logarithms);
the number of the most probable class."""
NumberType = Literal["float32", "float64", "int32"]
_SPARK: dict[str, T.DataType] = {
    "float32": T.FloatType(), "float64": T.DoubleType(), "int32": T.IntegerType(),
}  # fmt: skip
NUMBER_TYPES = tuple(_SPARK)
_VECTOR: pa.DataType = arrow_type_of(VectorUDT())


@dataclass(frozen=True)
class OutputColumn:
    """A column of predictions.

    Args:
        name: Of the column.
        output: Of the output in the predictor's signature; ``'layer <name>'`` for a layer.
        form: What becomes of the output. All but ``'values'`` need an output with
            ``PredictorArchive.scores``, ``'class'`` one with exclusive or two classes.
        dtype: Of the numbers in the column.
        thresholds: For ``'class'``: see :meth:`ClassScores.classes`.
        vector: An array of numbers per row becomes an ML vector, whose numbers are float64.
    """

    name: str
    output: str
    form: Form = "values"
    dtype: NumberType = "float32"
    thresholds: tuple[float, ...] = ()
    vector: bool = False

    def values(self, output: Array, scores: ClassScores | None) -> Array:
        """The column's values, ``(rows, ...)``.

        Args:
            output: Of the model, ``(rows, ...)``.
            scores: What its numbers mean.
        """
        if self.form == "values" or scores is None:
            return output.astype(self.dtype, copy=False)
        wide = np.float64 if self.dtype == "float64" else np.float32
        numbers = output.reshape(len(output), 1) if output.ndim == 1 else output
        numbers = numbers.astype(wide, copy=False)
        if self.form == "class":
            return scores.classes(numbers, self.thresholds).astype(self.dtype, copy=False)
        made = scores.probability(numbers) if self.form == "probability" else scores.raw(numbers)
        return made.astype(self.dtype, copy=False)

    def shape(self, predictor: PredictorArchive) -> Shape | None:
        """Per-row shape of the column's values; None if unknown."""
        shape = predictor.signature.outputs[self.output].shape
        if self.form == "values" or shape is None:
            return shape
        if self.form == "class":
            return shape[:-1]
        return (*shape[:-1], 2) if predictor.scores[self.output].binary else shape

    def field(self, predictor: PredictorArchive) -> T.StructField:
        """The column: a number where the model gives one per row, else an array or a vector.

        Raises:
            DataError: Arrays of arrays are to become vectors.
        """
        kind: T.DataType = _SPARK[self.dtype]
        shape = self.shape(predictor)
        if self.vector and (shape is None or not is_number(shape)):
            if shape is not None and len(shape) != 1:
                raise DataError(
                    f"column {self.name!r} cannot be a column of vectors",
                    expected="an output with one array of numbers per row",
                    received=f"shape {shape} per row",
                    hint="outputMode='array', or a layer that flattens the output",
                )
            return T.StructField(self.name, VectorUDT())
        if shape is None:
            kind = T.ArrayType(kind)
        elif not is_number(shape):
            for _ in shape:
                kind = T.ArrayType(kind)
        return T.StructField(self.name, kind)

    def arrow_type(self, predictor: PredictorArchive) -> pa.DataType:
        """The type of the column's Arrow arrays."""
        kind: pa.DataType = pa.from_numpy_dtype(self.dtype)
        spark = self.field(predictor).dataType
        if isinstance(spark, VectorUDT):
            return _VECTOR
        while isinstance(spark, T.ArrayType):
            kind, spark = pa.list_(kind), spark.elementType
        return kind


def is_number(shape: Sequence[int | None]) -> bool:
    """Whether values of this shape are plain numbers in a column."""
    return tuple(shape) in ((), (1,))


def to_arrow(parts: Sequence[Stored], kind: pa.DataType) -> pa.Array:
    """Values of consecutive rows, part by part, as one Arrow array.

    A free dimension may have another size in each part, or in each row.

    Args:
        parts: The values, ``(rows, ...)``, or rows of different lengths.
        kind: See :meth:`OutputColumn.arrow_type`.
    """
    make = _to_vectors if is_vector(kind) else _to_arrow
    arrays = [part for part in parts if not isinstance(part, Ragged)]
    if len(arrays) == len(parts) and len({array.shape[1:] for array in arrays}) == 1:
        return make(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
    return pa.concat_arrays([make(part) for part in parts])


def _to_arrow(rows: Stored) -> pa.Array:
    if isinstance(rows, Ragged):
        return pa.ListArray.from_arrays(
            pa.array(rows.starts.astype(np.int32)), _nested(rows.values)
        )
    if is_number(rows.shape[1:]):
        return pa.array(np.ascontiguousarray(rows.reshape(-1)))
    return _nested(rows)


def _nested(array: Array) -> pa.Array:
    values: pa.Array = pa.array(np.ascontiguousarray(array).reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        count = int(np.prod(array.shape[:axis]))
        offsets = np.arange(count + 1, dtype=np.int32) * array.shape[axis]
        values = pa.ListArray.from_arrays(pa.array(offsets), values)
    return values


def _to_vectors(rows: Stored) -> pa.Array:
    """Rows as dense ML vectors: what Spark stores of them, made here for all rows at once."""
    if isinstance(rows, Ragged):
        values = _to_arrow(Ragged(rows.values.astype(np.float64, copy=False), rows.lengths))
    else:
        values = _to_arrow(rows.astype(np.float64, copy=False))
    kinds = {field.name: field.type for field in _VECTOR}
    fields = {
        "type": pa.array(np.ones(len(rows), np.int8)),
        "size": pa.nulls(len(rows), kinds["size"]),
        "indices": pa.nulls(len(rows), kinds["indices"]),
        "values": values.cast(kinds["values"]),
    }
    return pa.StructArray.from_arrays([fields[f.name] for f in _VECTOR], fields=list(_VECTOR))


def with_nulls(values: pa.Array, valid: npt.NDArray[np.bool_]) -> pa.Array:
    """Values of the valid rows only -> one for each row, null for the others."""
    places = np.cumsum(valid) - 1
    return values.take(pa.array(places, mask=~valid))
