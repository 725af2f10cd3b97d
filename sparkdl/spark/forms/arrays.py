"""Arrays of this process: opened, cut, and given to Keras; or refused with the line to write."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
from pyspark.sql import Column

from sparkdl.data import DataSpec, to_arrow_table
from sparkdl.data.arrays import as_numbers, rows_of
from sparkdl.data.conform import matches
from sparkdl.data.plain_arrow import plain
from sparkdl.errors import ConfigError, DataError, SparkDLError, fold
from sparkdl.learner.signature import Signature, TensorSpec
from sparkdl.settings.call_arguments import shows_signature
from sparkdl.settings.values import shown
from sparkdl.spark.forms.frames import FrameForm
from sparkdl.spark.forms.matching import label_dtype, make_spec
from sparkdl.spark.forms.shipped import PLACE, numbered, ship_table
from sparkdl.spark.forms.sources import Columns, Form, Source
from sparkdl.spark.forms.wire import wire_names
from sparkdl.spark.session.running import session_of

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


class ArraysForm(Form):
    """Arrays or lists of this process: ``(x, y)``, ``(x, y, sample_weight)``, ``(x,)``; or what is
    no form of data that is known, which every method refuses."""

    words: ClassVar[str] = "arrays"

    def open(self, signature: Signature, columns: Columns) -> Source:
        if not self._are_arrays(signature):
            raise unknown_data(self.data)
        numbers = self.arrays(signature, columns)
        if numbers is None or columns.group is not None:
            x, y, weight = arrays_of(by_name(self.data, signature))
            group = columns.group
            if isinstance(group, str):
                if not isinstance(x, Mapping) or group not in x:
                    raise no_group(group)
                group = x[group]
            frame, named = arrays_as_frame(x, y, weight, session_of(), group)
            return FrameForm(frame).open(signature, replace(columns, **named))
        x, y, weight = arrays_of(numbers)
        table, spec = to_arrow_table(x, y, weight, wanted_spec(x, y, weight, signature))
        frame = ship_table(session_of(), numbered(table.select(list(spec.columns))))
        return Source(frame.toDF(PLACE, *wire_names(len(spec.columns))), spec)

    def arrays(
        self, signature: Signature, columns: Columns | None = None
    ) -> tuple[Any, ...] | None:
        """See :meth:`Form.arrays`; None for texts and rows of different length."""
        if not self._are_arrays(signature):
            return None
        self.refuse_frames("data")
        data = by_name(self.data, signature)
        encoded = columns is not None and columns.decoder is not None and _has_texts(data[1:2])
        return None if encoded or has_texts_or_sequences(data) else data

    def cut(self, share: float, signature: Signature) -> tuple[Form, Form] | None:
        if not self._are_arrays(signature):
            return None
        self.refuse_frames("data")
        training, held_out = split_arrays(by_name(self.data, signature), share)
        return ArraysForm(training), ArraysForm(held_out)

    def like(self, training: Form, signature: Signature, columns: Columns) -> Form:
        if not self._are_arrays(signature):
            return self
        data = by_name(self.data, signature)
        if isinstance(training, ArraysForm) and training._are_arrays(signature):
            return ArraysForm(with_labels_like(data, by_name(training.data, signature)))
        features, label = columns.features, columns.label
        named = isinstance(features, str) and isinstance(label, str)
        if training.has_columns and named and len(data) == 2:
            x, y = data
            if not isinstance(x, Mapping) and not isinstance(y, Mapping):
                frame, _ = arrays_as_frame(x, y, None, session_of(training.frame()))
                return FrameForm(frame.withColumnsRenamed({"features": features, "label": label}))
        return self

    def _are_arrays(self, signature: Signature) -> bool:
        needed = signature.needs_labels and signature.preprocessing is None
        return are_arrays(self.data, needs_labels=needed)


def no_group(group: Any) -> ConfigError:
    """The error for what names no groups of the rows that are given."""
    return ConfigError(
        "group says which rows stay together in a batch",
        expected="a column of a DataFrame; for arrays an array with a value for each row, or the "
        "name of an input", received=shown(group),
    )  # fmt: skip


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
        received=f"{kind.__module__}.{kind.__qualname__}", hint=hint,
    )  # fmt: skip


def input_arrays(data: Any, inputs: Mapping[str, TensorSpec]) -> Any:
    """Inputs on the driver, as ``predict`` of Keras takes them; lists of rows become arrays.

    Args:
        data: An array or a list of rows; for several inputs a list of these, or input name ->
            these. Tensors, generators and data sets of Keras' frameworks stay as they are.

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
                expected=", ".join(map(repr, inputs)), received=", ".join(map(repr, data)),
            )  # fmt: skip
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
            received=f"dtype {array.dtype}", hint="" if text else f"x.astype({spec.dtype!r})",
        )  # fmt: skip
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
    """Arrays ``(x, y, ...)`` in which Keras' lists of a model's inputs and outputs have names."""
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


def _has_texts(data: Sequence[Any]) -> bool:
    parts = [a for p in data for a in (p.values() if isinstance(p, Mapping) else [p])]
    return any(a is not None and isinstance(next(iter(a), None), str) for a in parts)


def _is_irregular(values: Any) -> bool:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different length
        return True
    if array.dtype.kind in "US":
        return True
    listed = array.dtype == object and array.ndim == 1 and len(array) > 0
    return listed and isinstance(array[0], (str, bytes, list, tuple, np.ndarray))


def arrays_as_frame(
    x: Any, y: Any, weight: Any, spark: Any, group: Any = None
) -> tuple[Any, dict[str, Any]]:
    """Arrays and lists as a DataFrame of Spark, and which of its columns mean what.

    Args:
        x: Rows, or input name -> rows.
        y: Labels, or output name -> labels; None for none.
        weight: Sample weights, or output name -> weights; None for none.
        group: The group of each row; None for none.

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
        "group": None if group is None else place(group, "group"),
    }
    rows_of(columns)
    try:
        given = pa.table({name: _arrow(values) for name, values in columns.items()})
        table = pa.table([plain(column) for column in given.columns], names=given.column_names)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            "Spark cannot take these arrays",
            expected="numbers, strings, or lists of numbers of one depth",
            received=f"{type(error).__name__}: {str(error)[:300]}",
        ) from error
    return ship_table(spark, numbered(table)), named


def _arrow(values: Any) -> Any:
    if isinstance(values, np.ndarray) and values.dtype.kind in "US" and values.ndim == 2:
        values = values[:, 0] if values.shape[1] == 1 else values
    rows = [row.tolist() if isinstance(row, (np.ndarray, np.generic)) else row for row in values]
    return pa.array(rows)


P = ParamSpec("P")
R = TypeVar("R")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def takes_labels_apart(method: Callable[P, R]) -> Callable[P, R]:
    """A method of data that also takes arrays ``x, y``, and by name ``sample_weight``, as Keras'.

    Raises:
        ConfigError: From calls of the method: further arguments after ``x, y`` without names, whose
            order is another one in Keras.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        joined, options = join_labels(method.__name__, args[1:], kwargs)
        together: Callable[..., R] = method
        try:
            return together(args[0], *joined, **options)
        except SparkDLError as error:
            raise fold(error) from error.__cause__

    return shows_signature(call, method)


def join_labels(method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments with arrays ``x, y`` (and ``sample_weight``) in one tuple; others as they are.

    Raises:
        ConfigError: See :func:`takes_labels_apart`; or ``x`` is no array.
    """
    given, options = list(args), dict(kwargs)
    for place, name in enumerate(("x", "y")):
        if len(given) == place and holds_arrays(options.get(name)):
            given.append(options.pop(name))
    if not given and "x" in options:
        raise ConfigError(
            f"{method} takes data that are no arrays without a name",
            expected=f"{method}(df, features='column', label='column'), or {method}(x=x, y=y) with "
            "arrays",
            received=f"x={shown(options['x'])}",
        )
    if len(given) < 2 or not (holds_arrays(given[0]) and holds_arrays(given[1])):
        return args, dict(kwargs)
    if len(given) > 2:
        raise ConfigError(
            f"what comes after the labels in {method} has no names",
            expected=f"{method}(x, y, {'epochs=5, ' if method == 'fit' else ''}batch_size=32)",
            received=", ".join(shown(value) for value in given[2:]),
            hint="Keras' order of the further arguments is another one than sparkdl's",
        )
    if holds_arrays(options.get("sample_weight")):
        given.append(options.pop("sample_weight"))
    return (tuple(map(_as_array, given)),), options


def holds_arrays(value: Any) -> bool:
    """Whether a value is an array, or several in a list, tuple or dict, and no name of a column."""
    if isinstance(value, (list, tuple)):
        return not value or not all(isinstance(part, str) for part in value)
    if isinstance(value, Mapping):
        return bool(value) and all(holds_arrays(part) for part in value.values())
    # A Column of Spark has every attribute, its class has not; a NumPy number has no dimension.
    return hasattr(type(value), "__array__") and np.ndim(value) > 0


def _as_array(value: Any) -> Any:
    return value if isinstance(value, (list, tuple, Mapping, np.ndarray)) else np.asarray(value)


def split_arrays(data: Sequence[Any], split: float) -> tuple[Any, Any]:
    """Arrays cut into the rows to train on and the last ones, to validate on."""
    first = next(iter(data[0].values())) if isinstance(data[0], Mapping) else data[0]
    end = math.floor(len(first) * (1 - split))

    def cut(part: Any, place: slice) -> Any:
        if isinstance(part, Mapping):
            return {name: values[place] for name, values in part.items()}
        return part[place]

    training, held_out = slice(0, end), slice(end, None)
    return tuple(cut(p, training) for p in data), tuple(cut(p, held_out) for p in data)


def arrays_of(data: Sequence[Any]) -> tuple[Any, Any, Any]:
    """``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)`` as the three; None for what is not there.

    Outputs without weights get ones.
    """
    x, y = data[0], data[1] if len(data) > 1 else None
    weight = data[2] if len(data) == 3 else None
    if isinstance(weight, Mapping) and isinstance(y, Mapping) and set(weight) < set(y):
        ones = {name: np.ones(len(y[name]), np.float32) for name in y}
        weight = {name: weight.get(name, ones[name]) for name in y}
    return x, y, weight


def wanted_spec(x: Any, y: Any, weight: Any, signature: Signature) -> DataSpec:
    """The spec that NumPy arrays must fit, found as if they were DataFrame columns."""
    from pyspark.sql import types as T

    fields: list[Any] = []
    dtypes: dict[str, str] = {}

    def columns(arrays: Any, prefix: str) -> Any:
        if isinstance(arrays, Mapping):
            return {name: columns(array, f"{prefix} {name}") for name, array in arrays.items()}
        array = as_numbers(arrays)
        if array.ndim == 0 or array.dtype.kind not in "biuf":
            raise DataError(
                f"{prefix} is no array of numbers", expected="one row per entry of the first axis",
                received=f"{array.dtype} of shape {array.shape}",
                hint="names, y = np.unique(y, return_inverse=True) makes numbers of them"
                if array.dtype.kind in "US" and prefix.startswith("label")
                else "",
            )  # fmt: skip
        kind: Any = T.FloatType()
        for _ in range(array.ndim - 1):
            kind = T.ArrayType(kind)
        fields.append(T.StructField(prefix, kind))
        dtypes[prefix] = array.dtype.newbyteorder("=").name
        return prefix

    features = columns(x, "features")
    label = None if y is None else columns(y, "label")
    weights = None if weight is None else columns(weight, "sample_weight")
    spec = make_spec(T.StructType(fields), signature, features, label, weights)
    inputs = {
        name: replace(entry, dtype=signature.inputs[name].dtype_for(dtypes[entry.columns[0]]))
        for name, entry in spec.features.items()
        if name in signature.inputs
    }
    own = {
        name: replace(entry, dtype=label_dtype(signature, name, dtypes[entry.columns[0]]))
        for name, entry in spec.labels.items()
        if entry.one_hot is None and signature.label_kinds.get(name) != "sparse"
    }
    return replace(spec, features={**spec.features, **inputs}, labels={**spec.labels, **own})
