"""Which column is made of which output of a model, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import types as T

from sparkdl.learner.class_scores import ClassScores
from sparkdl.learner.predictor_archive import PredictorArchive
from sparkdl.learner.signature import Shape

Array = npt.NDArray[Any]
Form = Literal["values", "probability", "raw", "class"]
"""The output as it is; probabilities of all classes; what grows with them (logits or logarithms);
the number of the most probable class."""
NumberType = Literal["float32", "float64", "int32"]
_SPARK: dict[str, T.DataType] = {
    "float32": T.FloatType(), "float64": T.DoubleType(), "int32": T.IntegerType(),
}  # fmt: skip
NUMBER_TYPES = tuple(_SPARK)


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
    """

    name: str
    output: str
    form: Form = "values"
    dtype: NumberType = "float32"
    thresholds: tuple[float, ...] = ()

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
        """The column: a number where the model gives one per row, else a (nested) array."""
        kind: T.DataType = _SPARK[self.dtype]
        shape = self.shape(predictor)
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
        while isinstance(spark, T.ArrayType):
            kind, spark = pa.list_(kind), spark.elementType
        return kind


def is_number(shape: Sequence[int | None]) -> bool:
    """Whether values of this shape are plain numbers in a column."""
    return tuple(shape) in ((), (1,))


def to_arrow(parts: Sequence[Array]) -> pa.Array:
    """Values of consecutive rows, part by part, as one Arrow array.

    A free dimension may have another size in each part.
    """
    if len({part.shape[1:] for part in parts}) == 1:
        return _to_arrow(parts[0] if len(parts) == 1 else np.concatenate(parts))
    return pa.concat_arrays([_to_arrow(part) for part in parts])


def _to_arrow(array: Array) -> pa.Array:
    if is_number(array.shape[1:]):
        return pa.array(np.ascontiguousarray(array.reshape(-1)))
    values: pa.Array = pa.array(np.ascontiguousarray(array).reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        count = int(np.prod(array.shape[:axis]))
        offsets = np.arange(count + 1, dtype=np.int32) * array.shape[axis]
        values = pa.ListArray.from_arrays(pa.array(offsets), values)
    return values


def with_nulls(values: pa.Array, valid: npt.NDArray[np.bool_]) -> pa.Array:
    """Values of the valid rows only -> one for each row, null for the others."""
    places = np.cumsum(valid) - 1
    return values.take(pa.array(places, mask=~valid))
