"""Which column is made of which output of a model, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T

from sparkdl.data import ColumnSpec
from sparkdl.data.columns import Ragged, Stored
from sparkdl.data.conform import lost
from sparkdl.data.decode import is_vector
from sparkdl.errors import DataError, ModelError
from sparkdl.learner.prediction.class_scores import ClassScores
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.learner.signature import Shape
from sparkdl.spark.session.versions import arrow_type_of

Array = npt.NDArray[Any]
Form = Literal["values", "probability", "raw", "class"]
"""The output as it is; probabilities of all classes; what grows with each (logit or logarithm);
the number of the most probable class."""
_SPARK: dict[str, T.DataType] = {
    "bool": T.BooleanType(), "int8": T.ByteType(), "int16": T.ShortType(),
    "int32": T.IntegerType(), "int64": T.LongType(), "float32": T.FloatType(),
    "float64": T.DoubleType(), "string": T.StringType(),
}  # fmt: skip
_HELD_BY = {
    "uint8": "int16", "uint16": "int32", "uint32": "int64", "uint64": "int64",
    "float16": "float32", "bfloat16": "float32",
}  # fmt: skip
"""A dtype that Spark lacks -> one that holds its numbers (of uint64 those below 2**63)."""
_VECTOR: pa.DataType = arrow_type_of(VectorUDT())


def require_new(names: Sequence[str], taken: Sequence[str], what: str, hint: str) -> None:
    """Refuses a column that the data have, or that stands twice among the new ones."""
    seen = {name.lower() for name in taken}
    for name in names:
        if name.lower() in seen:
            raise DataError(
                f"the data already have a column {name!r}", expected=f"a new name for {what}",
                received=str([*taken, *names]), hint=hint,
            )  # fmt: skip
        seen.add(name.lower())


@dataclass(frozen=True)
class OutputColumn:
    """A column of predictions.

    Args:
        output: Name of the output in the predictor's signature; ``'layer <name>'`` for a layer.
        form: What is made of the output. All but ``'values'`` need an output with
            ``PredictorArchive.scores``, ``'class'`` one with exclusive or two classes.
        dtype: Dtype of the values in the column; None: the output's own, see :meth:`typed`.
        thresholds: For ``'class'``: see :meth:`ClassScores.classes`.
        vector: An array of numbers per row becomes an ML vector, whose numbers are float64.
    """

    name: str
    output: str
    form: Form = "values"
    dtype: str | None = None
    thresholds: tuple[float, ...] = ()
    vector: bool = False

    def typed(
        self, predictor: PredictorArchive, given: Mapping[str, ColumnSpec] | None = None
    ) -> OutputColumn:
        """The column with the output's dtype where none is asked for; ``given``: its inputs.

        Raises:
            ModelError: Spark has no type that holds the output's values.
        """
        if self.dtype is not None:
            return self
        dtypes = None if given is None else {name: spec.dtype for name, spec in given.items()}
        dtype = predictor.signature.output_dtype(self.output, dtypes)
        dtype = "float32" if dtype.startswith("float8") else _HELD_BY.get(dtype, dtype)
        if dtype not in _SPARK:
            raise ModelError(
                f"output {self.output!r} cannot become a column",
                expected="numbers, booleans or texts", received=f"dtype {dtype}",
            )  # fmt: skip
        if isinstance(self.field(predictor, dtype).dataType, VectorUDT):
            dtype = "float64"
        elif self.form != "values" and not dtype.startswith("float"):
            dtype = "float32"
        return replace(self, dtype=dtype)

    def values(self, output: Array, scores: ClassScores | None) -> Array:
        """The column's values, ``(rows, ...)``, of an output and the meaning of its numbers.

        Raises:
            DataError: An integer that the column's dtype does not hold.
        """
        if self.dtype == "string":
            texts = [
                v.decode() if isinstance(v, bytes) else v and str(v) for v in output.ravel()
            ]  # None is a row without a text
            return np.array(texts, object).reshape(output.shape)
        if self.form == "values" or scores is None:
            return self._exact(output)
        wide = np.float64 if self.dtype == "float64" else np.float32
        numbers = output.reshape(len(output), 1) if output.ndim == 1 else output
        numbers = numbers.astype(wide, copy=False)
        if self.form == "class":
            return scores.classes(numbers, self.thresholds).astype(self.dtype, copy=False)
        made = scores.probability(numbers) if self.form == "probability" else scores.raw(numbers)
        return made.astype(self.dtype, copy=False)

    def _exact(self, output: Array) -> Array:
        if output.dtype.kind in "OSU":
            raise DataError(
                f"column {self.name!r} cannot hold a prediction",
                expected=f"{self.dtype}, which the model says of output {self.output!r}",
                received=f"texts: {output.ravel()[:1]}",
            )
        with np.errstate(over="ignore", invalid="ignore"):
            made = output.astype(self.dtype, copy=False)
        bad, expected, _ = lost(output, made)
        if bad.any():
            raise DataError(
                f"column {self.name!r} of {self.dtype} cannot hold a prediction", expected=expected,
                received=f"{output[bad][0]}, of dtype {output.dtype}",
                hint="without dtype= and outputMode='vector' a column has the output's own dtype",
            )  # fmt: skip
        return made

    def shape(self, predictor: PredictorArchive) -> Shape | None:
        """Per-row shape of the column's values; None if unknown."""
        shape = predictor.signature.outputs[self.output].shape
        if self.form == "values" or shape is None:
            return shape
        if self.form == "class":
            return shape[:-1]
        return (*shape[:-1], 2) if predictor.scores[self.output].binary else shape

    def field(self, predictor: PredictorArchive, dtype: str | None = None) -> T.StructField:
        """The column: a value where the model gives one per row, else an array or a vector.

        Raises:
            DataError: Arrays of arrays are to become vectors.
        """
        kind = _SPARK[dtype or self.typed(predictor).dtype or ""]
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

        def arrow(kind: T.DataType) -> pa.DataType:
            nested = isinstance(kind, T.ArrayType)
            return pa.list_(arrow(kind.elementType)) if nested else arrow_type_of(kind)

        return arrow(self.field(predictor).dataType)


def is_number(shape: Sequence[int | None]) -> bool:
    """Whether values of this shape are plain numbers in a column."""
    return tuple(shape) in ((), (1,))


def to_arrow(parts: Sequence[Stored], kind: pa.DataType) -> pa.Array:
    """Values of consecutive rows, part by part, as one Arrow array.

    A free dimension may have another size in each part, or in each row.

    Args:
        parts: The values, ``(rows, ...)``, or rows of different lengths.
        kind: See :meth:`OutputColumn.arrow_type`.

    Raises:
        DataError: They are of another type.
    """
    make = _to_vectors if is_vector(kind) else partial(_to_arrow, lists=pa.types.is_list(kind))
    arrays = [part for part in parts if not isinstance(part, Ragged)]
    if len(arrays) == len(parts) and len({array.shape[1:] for array in arrays}) == 1:
        made = make(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
    else:
        made = pa.concat_arrays([make(part) for part in parts])
    if made.type != kind:
        shapes = sorted({array.shape[1:] for array in arrays})
        raise DataError(
            "the model gives other values than its column has", expected=str(kind),
            received=f"{made.type}, shapes {shapes} per row",
            hint="a model that starts with keras.Input tells the shapes of its outputs before",
        )  # fmt: skip
    return made


def _to_arrow(rows: Stored, lists: bool) -> pa.Array:
    if isinstance(rows, Ragged):
        return pa.ListArray.from_arrays(
            pa.array(rows.starts.astype(np.int32)), _nested(rows.values)
        )
    if not lists and is_number(rows.shape[1:]):
        texts = pa.string() if rows.dtype == object else None  # also where all are null
        return pa.array(np.ascontiguousarray(rows.reshape(-1)), texts)
    return _nested(rows.reshape(len(rows), 1) if rows.ndim == 1 else rows)


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
        wide: Stored = Ragged(rows.values.astype(np.float64, copy=False), rows.lengths)
    else:
        wide = rows.astype(np.float64, copy=False)
    kinds = {field.name: field.type for field in _VECTOR}
    fields = {
        "type": pa.array(np.ones(len(rows), np.int8)),
        "size": pa.nulls(len(rows), kinds["size"]),
        "indices": pa.nulls(len(rows), kinds["indices"]),
        "values": _to_arrow(wide, lists=True).cast(kinds["values"]),
    }
    return pa.StructArray.from_arrays([fields[f.name] for f in _VECTOR], fields=list(_VECTOR))


def with_nulls(values: pa.Array, valid: npt.NDArray[np.bool_]) -> pa.Array:
    """Values of the valid rows only -> one for each row, null for the others."""
    return values.take(pa.array(np.cumsum(valid) - 1, mask=~valid))
