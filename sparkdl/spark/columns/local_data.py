"""Data that are on the driver: taken through Spark, or refused with the line to write."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Column

from sparkdl.data.conform import is_text, matches
from sparkdl.errors import ConfigError, DataError
from sparkdl.learner.signature import Signature, TensorSpec
from sparkdl.spark.columns.shipped import ship_table
from sparkdl.spark.session.running import session_of
from sparkdl.values import shown

_LINES = {
    "tensorflow": "x, y = map(np.array, zip(*dataset.as_numpy_iterator())); fit((x, y)); for a "
    "dataset of batches np.concatenate instead of np.array",
    "torch": "x, y = map(np.array, zip(*dataset)); fit((x, y)), for a torch Dataset that fits in "
    "memory",
    "keras": "x, y = map(np.concatenate, zip(*(data[i] for i in range(len(data))))); fit((x, y))",
    "datasets": "fit(dataset.to_pandas(), features=..., label=...)",
    "dask": "fit(data.compute(), features=..., label=...)",
}
"""Package -> how to make something that ``fit`` takes of what it has."""
_OF_KERAS = ("tensorflow", "torch", "jax", "jaxlib", "keras")
"""Packages whose tensors and data sets ``predict`` of Keras takes as they are."""


def plain_path(data: Any) -> Any:
    """A path of ``pathlib`` as a text; others as it is."""
    return os.fspath(data) if isinstance(data, os.PathLike) else data


def as_frame(data: Any) -> Any:
    """A pandas or polars DataFrame, or an Arrow table, as a DataFrame of Spark; others as it is.

    A path of ``pathlib`` becomes a text.

    Raises:
        DataError: A column is of a type that Spark does not have.
    """
    kind = type(data)
    package, name = kind.__module__.split(".")[0], kind.__name__
    if package == "pandas" and name == "DataFrame":
        return _spark_frame(lambda: pa.Table.from_pandas(data, preserve_index=False), data)
    if package == "polars" and name in ("DataFrame", "LazyFrame"):
        frame = data.collect() if name == "LazyFrame" else data
        return _spark_frame(lambda: pa.table(frame.to_arrow()), data)
    if package == "pyarrow" and name in ("Table", "RecordBatch"):
        return _spark_frame(
            lambda: data if name == "Table" else pa.Table.from_batches([data]), data
        )
    return plain_path(data)


def _spark_frame(table_of: Callable[[], pa.Table], data: Any) -> Any:
    spark = session_of()
    try:
        return ship_table(spark, _plain(table_of()))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"Spark cannot take this {type(data).__module__.split('.')[0]} {type(data).__name__}",
            expected="columns of numbers, strings, or arrays of numbers of one depth",
            received=f"{type(error).__name__}: {str(error)[:300]}",
        ) from error


def _plain(table: pa.Table) -> pa.Table:
    """A table without Arrow's types of views, dictionaries and half floats."""
    fields = [field.with_type(_plain_type(field.type)) for field in table.schema]
    return table.cast(pa.schema(fields))


def _plain_type(kind: Any) -> Any:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if is_text(kind):
        return pa.string()
    if str(kind) in ("large_binary", "binary_view"):  # views have a name from pyarrow 16 on
        return pa.binary()
    if kind == pa.float16():
        return pa.float32()
    if pa.types.is_unsigned_integer(kind):
        return {8: pa.int16(), 16: pa.int32(), 32: pa.int64(), 64: pa.int64()}[kind.bit_width]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    return kind


def unknown_data(data: Any) -> ConfigError:
    """The error for what is no form of data that is known."""
    kind = type(data)
    packages = [base.__module__.split(".")[0] for base in kind.__mro__]
    hint = next((_LINES[package] for package in packages if package in _LINES), "")
    if isinstance(data, (list, tuple)):
        hint = (
            "a list of examples: fit(spark.sparkContext.parallelize(examples)); arrays: fit((x, y))"
        )
    elif hasattr(data, "__next__"):
        hint = "a generator: x, y = map(np.array, zip(*generator)); fit((x, y))"
    elif isinstance(data, np.ndarray):
        hint = "labels belong to it: fit((x, y))"
    elif isinstance(data, str):
        hint = f"fit(spark.read.parquet({data!r}))"
    elif isinstance(data, Column):
        hint = "an expression has no rows of its own: df.select(...) or df.filter(...) has"
    return ConfigError(
        "this kind of data is not known",
        expected="a DataFrame of Spark, pandas or polars, an Arrow table, an RDD of (x, y) or "
        "LabeledPoint, a tuple of arrays or lists (x, y), or a path of Parquet, Arrow or TFRecord "
        "files",
        received=f"{kind.__module__}.{kind.__qualname__}",
        hint=hint,
    )


def input_arrays(data: Any, inputs: Mapping[str, TensorSpec]) -> Any:
    """Inputs on the driver, as ``predict`` of Keras takes them; lists of rows become arrays.

    Args:
        data: An array or a list of rows; for several inputs a list of these, or input name ->
            these. Tensors, generators and data sets of Keras' frameworks stay as they are.
        inputs: The model's.

    Raises:
        ConfigError: No form of data that is known, or rows that are no array.
        DataError: Arrays that do not fit the model's inputs.
    """
    specs = list(inputs.values())
    if isinstance(data, Mapping) and len(data) == len(inputs) == 1:  # whatever its name is
        return _input_array(next(iter(data.values())), specs[0])
    if isinstance(data, Mapping):
        if set(data) != set(inputs):
            raise DataError(
                "the arrays are for other inputs than the model has",
                expected=", ".join(map(repr, inputs)),
                received=", ".join(map(repr, data)),
            )
        return {name: _input_array(part, inputs[name]) for name, part in data.items()}
    if isinstance(data, (list, tuple)) and (len(inputs) > 1 or _is_one_array(data)):
        if len(data) != len(inputs):
            raise DataError(
                "the model has another number of inputs",
                expected=f"an array for each of {', '.join(map(repr, inputs))}",
                received=f"{len(data)} arrays",
            )
        return [_input_array(part, spec) for part, spec in zip(data, specs, strict=True)]
    if len(inputs) > 1 and isinstance(data, np.ndarray):
        raise DataError(
            f"the model has {len(inputs)} inputs",
            expected=f"a dict or list with an array for each of {', '.join(map(repr, inputs))}",
            received=shown(data),
        )
    return _input_array(data, specs[0])


def _is_one_array(data: Sequence[Any]) -> bool:
    """Whether it is ``[x]``, Keras' list of the arrays of a model with one input."""
    return len(data) == 1 and getattr(data[0], "ndim", 0) > 1


def _input_array(data: Any, spec: TensorSpec) -> Any:
    if isinstance(data, (list, tuple)):
        try:
            array = np.asarray(data)
        except ValueError:  # rows of different length
            array = np.asarray(None)
        if array.dtype.kind in "biufUS":
            _require_fit(array, spec)
            return array
    elif _is_read_by_keras(data):
        if isinstance(data, np.ndarray) or type(data).__module__.startswith("pandas."):
            _require_fit(np.asarray(data), spec)
        return data
    raise ConfigError(
        "predict cannot read inputs from this kind of data",
        expected="a DataFrame of Spark, pandas or polars, an Arrow table, an RDD, a path, arrays, "
        "or lists of numbers of one length",
        received=f"{type(data).__module__}.{type(data).__qualname__} {shown(data)}",
        hint="rows of different length are for a DataFrame and pad=...: "
        "predict(spark.createDataFrame([(row,) for row in rows], 'features array<float>'))",
    )


def _require_fit(array: Any, spec: TensorSpec) -> None:
    """Raises DataError unless an array has an input's shape per row, and its kind of values."""
    wanted, has = spec.shape, array.shape[1:]
    text = spec.dtype == "string"
    if text != (array.dtype.kind in "USO"):
        raise DataError(
            f"the array for input {spec.name!r} has values of another kind",
            expected="texts" if text else f"numbers, as {spec.dtype}",
            received=f"dtype {array.dtype}",
            hint="" if text else f"x.astype({spec.dtype!r})",
        )
    if wanted is None:
        return
    # As Keras does, which adds a last dimension of 1, or leaves it out.
    like = {tuple(wanted), wanted[:-1]} if wanted[-1:] == (1,) else {tuple(wanted), (*wanted, 1)}
    if array.ndim == 0 or not any(matches(has, shape) for shape in like):
        raise DataError(
            f"the array for input {spec.name!r} has another shape",
            expected=f"(rows, {', '.join('any' if d is None else str(d) for d in wanted)})",
            received=f"{array.shape}",
            hint="one row: x[None]" if matches(array.shape, wanted) else "",
        )


def _is_read_by_keras(data: Any) -> bool:
    kind = type(data)
    packages = {base.__module__.split(".")[0] for base in kind.__mro__}
    listed = hasattr(kind, "__array__") or hasattr(kind, "__next__")
    return listed or not packages.isdisjoint(_OF_KERAS)


def are_arrays(data: Any, *, needs_labels: bool) -> bool:
    """Whether ``data`` is ``(x, y)`` or ``(x, y, sample_weight)``; ``(x,)`` without labels.

    A list of more examples than that, or of pairs, is none.
    """
    if not isinstance(data, (tuple, list)):
        return False
    if len(data) == 1:
        return not needs_labels
    pairs = isinstance(data, list) and all(isinstance(e, tuple) and len(e) == 2 for e in data)
    return len(data) in (2, 3) and not pairs


def by_name(data: Sequence[Any], signature: Signature) -> tuple[Any, ...]:
    """Arrays ``(x, y, ...)`` in which Keras' lists of a model's inputs and outputs have names.

    Args:
        data: See :func:`are_arrays`.
        signature: The model's.
    """
    wanted = (signature.inputs, signature.outputs, signature.outputs)
    return tuple(_named(part, names) for part, names in zip(data, wanted, strict=False))


def _named(values: Any, names: Mapping[str, Any]) -> Any:
    if isinstance(values, (list, tuple)) and len(values) == len(names):
        if len(names) > 1:
            return dict(zip(names, values, strict=True))
        if _is_one_array(values):
            return values[0]
    return values


def with_labels_like(data: Sequence[Any], other: Sequence[Any]) -> Sequence[Any]:
    """Arrays whose labels are ``(n,)`` or ``(n, 1)``, as those of the ``other`` arrays are."""
    if min(len(data), len(other)) < 2:
        return data
    shape, wanted = np.shape(data[1]), np.shape(other[1])
    if {len(shape), len(wanted)} == {1, 2} and (shape[1:] or wanted[1:]) == (1,):
        return (data[0], np.reshape(data[1], (shape[0], *wanted[1:])), *data[2:])
    return data


def has_texts_or_sequences(data: Any) -> bool:
    """Whether arrays ``(x, y)`` have text, or rows of different length, among the features."""
    parts = data[0].values() if isinstance(data[0], Mapping) else [data[0]]
    return any(_is_irregular(part) for part in parts)


def _is_irregular(values: Any) -> bool:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different length
        return True
    if array.dtype.kind in "US":
        return True
    return array.dtype == object and array.ndim == 1 and len(array) > 0 and _has_rows(array[0])


def _has_rows(value: Any) -> bool:
    return isinstance(value, (str, bytes, list, tuple, np.ndarray))


def arrays_as_frame(x: Any, y: Any, weight: Any, spark: Any) -> tuple[Any, dict[str, Any]]:
    """Arrays and lists as a DataFrame of Spark, and which of its columns mean what.

    Args:
        x: Rows, or input name -> rows.
        y: Labels, or output name -> labels; None for none.
        weight: Sample weights, or output name -> weights; None for none.
        spark: The session.

    Raises:
        DataError: They are of different lengths, or Spark has no such type.
    """
    columns: dict[str, Any] = {}

    def place(values: Any, name: str) -> Any:
        if isinstance(values, Mapping):
            return {key: place(part, f"{name} {key}") for key, part in values.items()}
        columns[name] = values
        return name

    named = {
        "features": place(x, "features"),
        "label": None if y is None else place(y, "label"),
        "sample_weight": None if weight is None else place(weight, "sample_weight"),
    }
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            "arrays of unequal length",
            expected="as many labels and sample weights as rows of features",
            received=", ".join(f"{name}: {count} rows" for name, count in lengths.items()),
        )
    try:
        table = pa.table({name: _arrow(values) for name, values in columns.items()})
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            "Spark cannot take these arrays",
            expected="numbers, strings, or lists of numbers of one depth",
            received=f"{type(error).__name__}: {str(error)[:300]}",
        ) from error
    return ship_table(spark, _plain(table)), named


def _arrow(values: Any) -> Any:
    if isinstance(values, np.ndarray) and values.dtype.kind in "US" and values.ndim == 2:
        values = values[:, 0] if values.shape[1] == 1 else values
    rows = [row.tolist() if isinstance(row, (np.ndarray, np.generic)) else row for row in values]
    return pa.array(rows)
