"""NumPy arrays on the driver -> rows, or an Arrow table for Spark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.data.columns import Array, ColumnSpec, DataSpec
from sparkdl.data.conform import conform
from sparkdl.data.rows import Rows
from sparkdl.data.storage import MemoryStorage
from sparkdl.errors import DataError

ArrayLikes = npt.ArrayLike | Mapping[str, npt.ArrayLike]

_CHUNK_BYTES = 16 << 20
# The types that Spark has as plain columns; the rest travels as bytes.
_PLAIN = {np.dtype(n) for n in ("bool", "int8", "int16", "int32", "int64", "float32", "float64")}


def rows_from_numpy(
    x: ArrayLikes,
    y: ArrayLikes | None = None,
    sample_weight: ArrayLikes | None = None,
    spec: DataSpec | None = None,
) -> Rows:
    """Rows over NumPy arrays, without a copy where dtype and layout fit already.

    Args:
        x: One array, or input name -> array.
        y: One array, or output name -> array.
        sample_weight: One array that serves all outputs, or output name -> array.
        spec: Shapes, dtypes and classes wanted, by the same names (one array: the only name).
            Taken from the arrays by default; float64 becomes float32, as in Keras.

    Raises:
        DataError: Unequal lengths, no numbers, or values that do not fit ``spec``.

    >>> rows = rows_from_numpy(np.zeros((3, 2)), np.arange(3))
    >>> rows.take([2]).y['label'].tolist()
    [2]
    """
    found, columns, num_rows = _conform_all(x, y, sample_weight, spec)
    arrays = [columns[entry.columns[0]] for entry in found.entries]
    return Rows(found, MemoryStorage(arrays, num_rows))


def to_arrow_table(
    x: ArrayLikes,
    y: ArrayLikes | None = None,
    sample_weight: ArrayLikes | None = None,
    spec: DataSpec | None = None,
) -> tuple[pa.Table, DataSpec]:
    """NumPy arrays as an Arrow table, and the spec that reads it back.

    Single numbers become plain columns, all else binary columns of raw little-endian bytes: the
    most compact form that ``spark.createDataFrame`` takes. No copy is made of contiguous arrays.
    The columns are ``features``, ``label`` and ``sample_weight``, numbered if there are several.

    Args:
        x, y, sample_weight, spec: As for ``rows_from_numpy``.

    Raises:
        DataError: See ``rows_from_numpy``.
    """
    found, columns, num_rows = _conform_all(x, y, sample_weight, spec)
    row_bytes = sum(a.dtype.itemsize * math.prod(a.shape[1:]) for a in columns.values())
    step = max(1, _CHUNK_BYTES // max(row_bytes, 1))
    kinds = {entry.columns[0]: entry.kind for entry in found.entries}
    chunked = {
        name: pa.chunked_array(
            [
                _arrow(array[start : start + step], kinds[name])
                for start in range(0, max(num_rows, 1), step)
            ]
        )
        for name, array in columns.items()
    }
    return pa.table(chunked), found


def _arrow(rows: Array, kind: str) -> Any:
    if kind == "scalars":
        return pa.array(rows.reshape(len(rows)))
    width = rows.dtype.itemsize * math.prod(rows.shape[1:])
    little = np.ascontiguousarray(rows, rows.dtype.newbyteorder("<"))
    offsets = np.arange(len(rows) + 1, dtype=np.int64) * width
    if offsets[-1] >= 2**31:
        raise DataError(
            "a row is too large for Spark", expected="less than 2 GiB per row",
            received=f"{width} bytes",
        )  # fmt: skip
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(little.reshape(-1))]
    return pa.Array.from_buffers(pa.binary(), len(rows), buffers)


def _conform_all(
    x: ArrayLikes, y: ArrayLikes | None, sample_weight: ArrayLikes | None, spec: DataSpec | None
) -> tuple[DataSpec, dict[str, Array], int]:
    columns: dict[str, Array] = {}
    features = _group("features", x, None if spec is None else spec.features, columns)
    labels = _group("label", y, None if spec is None else spec.labels, columns)
    weights: Mapping[str, ColumnSpec] | ColumnSpec | None = None
    if isinstance(sample_weight, Mapping):
        wanted_weights = None if spec is None else spec.weights or None
        weights = _group("sample_weight", sample_weight, wanted_weights, columns)
    elif sample_weight is not None:
        wanted = None
        if spec is not None and spec.weights:
            wanted = {"sample_weight": next(iter(spec.weights.values()))}
        weights = _group("sample_weight", sample_weight, wanted, columns)["sample_weight"]
    return DataSpec(features, labels, weights), columns, rows_of(columns)


def rows_of(columns: Mapping[str, Sized]) -> int:
    """The number of rows, which all columns have.

    Raises:
        DataError: One has another number.
    """
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            "arrays of unequal length",
            expected="as many labels and sample weights as rows of features",
            received=", ".join(f"{name}: {count} rows" for name, count in lengths.items()),
        )
    return next(iter(lengths.values()), 0)


def _group(
    column: str,
    arrays: ArrayLikes | None,
    wanted: Mapping[str, ColumnSpec] | None,
    columns: dict[str, Array],
) -> dict[str, ColumnSpec]:
    """Conforms the arrays of one group into ``columns``; returns name -> spec."""
    if arrays is None:
        return {}
    if not isinstance(arrays, Mapping):
        arrays = {next(iter(wanted)) if wanted and len(wanted) == 1 else column: arrays}
    if wanted is not None and set(arrays) != set(wanted):
        raise DataError(
            f"the {column} arrays do not fit the model",
            expected=f"one array for each of {sorted(wanted)}",
            received=f"arrays for {sorted(arrays)}",
        )
    specs = {}
    for number, (name, values) in enumerate(arrays.items()):
        label = column if len(arrays) == 1 else f"{column}_{number}"
        columns[label], specs[name] = _conform_one(
            label, values, None if wanted is None else wanted[name], column == "sample_weight"
        )
    return specs


def as_numbers(values: npt.ArrayLike) -> Array:
    """An array; numbers of a dtype that NumPy lacks (bfloat16, float8) as float32."""
    array = np.asarray(values)
    lacks = array.dtype.kind == "V" and "float" in array.dtype.name
    return array.astype(np.float32) if lacks else array


def _conform_one(
    column: str, values: npt.ArrayLike, wanted: ColumnSpec | None, is_weight: bool
) -> tuple[Array, ColumnSpec]:
    array = as_numbers(values)
    if array.ndim == 0 or array.dtype.kind not in "biufc":
        raise DataError(
            f"{column}: no array of numbers",
            expected="a NumPy array of numbers, one row per example",
            received=f"dtype {array.dtype}, shape {array.shape}",
            hint="lists of unequal length need padding, strings a StringLookup or hash",
        )
    if wanted is None:
        dtype = "float32" if array.dtype == np.float64 else array.dtype.newbyteorder("=").name
        wanted = ColumnSpec((column,), array.shape[1:], dtype, is_weight=is_weight)
    spec = replace(wanted, columns=(column,), kind="array", decoder=None, source_dtype=None)
    array = np.ascontiguousarray(conform(array, spec))
    shape = array.shape[1:] if spec.one_hot is None else (*array.shape[1:], spec.one_hot)
    if math.prod(array.shape[1:]) == 1 and array.dtype in _PLAIN:
        return array, replace(spec, shape=shape, kind="scalars")
    return array, replace(spec, shape=shape, kind="binary", source_dtype=array.dtype.name)
