"""Every form of data that fit, evaluate and predict take, as one: a DataFrame and its spec."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparkdl.data import ColumnSpec, DataSpec, to_arrow_table
from sparkdl.errors import ConfigError, DataError
from sparkdl.learner.signature import Signature, TensorSpec
from sparkdl.spark.columns.schema import make_spec, selection
from sparkdl.spark.columns.wire import PROBLEM, pack_problem, wire_names
from sparkdl.spark.driver.cluster import is_connect, session_of

ROLE = "__sparkdl_role"


@dataclass(frozen=True)
class Columns:
    """Which columns mean what, as the user said it in ``fit`` or ``evaluate``."""

    features: Any = "features"
    label: Any = "label"
    sample_weight: Any = None
    decoder: Any = None


@dataclass(frozen=True)
class Source:
    """Selected columns of the user's data under their wire names, and how to read them.

    Args:
        frame: The selected columns.
        spec: How to read them.
        origin: The user's own frame, if ``frame`` has its partitions.
    """

    frame: Any
    spec: DataSpec
    origin: Any = None

    @property
    def spark(self) -> Any:
        return self.frame.sparkSession


def is_frame(data: Any) -> bool:
    """Whether ``data`` is a Spark DataFrame, classic or Connect."""
    return type(data).__module__.startswith("pyspark.") and hasattr(data, "mapInArrow")


def is_rdd(data: Any) -> bool:
    """Whether ``data`` is an RDD."""
    return (
        type(data).__module__.startswith("pyspark.")
        and hasattr(data, "mapPartitions")
        and (not hasattr(data, "mapInArrow"))
    )


def open_source(
    data: Any, signature: Signature, columns: Columns, *, with_labels: bool = True
) -> Source:
    """Checks ``data`` against the model and selects what is needed.

    Args:
        data: A DataFrame; an RDD of ``(x, y)`` pairs or ``LabeledPoint``; or NumPy arrays
            ``(x, y)`` or ``(x, y, sample_weight)``.
        signature: The model's.
        columns: Which columns mean what (DataFrames only).
        with_labels: Whether labels are needed.

    Raises:
        DataError: The data do not fit the model.
        ConfigError: Not a form of data that is known.
    """
    if is_frame(data):
        label = columns.label if with_labels else None
        spec = make_spec(
            data.schema, signature, columns.features, label,
            columns.sample_weight if with_labels else None, columns.decoder,
        )  # fmt: skip
        names = wire_names(len(spec.columns))
        return Source(data.select(*selection(data.schema, spec, names)), spec, data)
    if is_rdd(data):
        return _from_rdd(data, signature)
    if isinstance(data, (tuple, list)) and with_labels and len(data) in (2, 3):
        return _from_numpy(data, signature)
    raise ConfigError(
        "this kind of data is not known",
        expected="a DataFrame, an RDD of (x, y) or LabeledPoint, or a tuple of NumPy arrays (x, y)",
        received=f"{type(data).__module__}.{type(data).__qualname__}",
    )


def add_validation(source: Source, validation: Source | None, split: float, seed: int) -> Source:
    """Marks the rows to validate on, which then travel with the training rows in one stage."""
    from pyspark.sql import functions as F

    origin = source.origin
    if validation is not None:
        origin = None
        _check_alike(source, validation)
        frame = _union(
            source.frame.withColumn(ROLE, F.lit(0).cast("byte")),
            validation.frame.withColumn(ROLE, F.lit(1).cast("byte")),
        )
    elif split > 0:
        role = F.when(F.rand(seed) < F.lit(split), 1).otherwise(0).cast("byte")
        frame = source.frame.withColumn(ROLE, role)
    else:
        return source
    return Source(frame, replace(source.spec, role_column=ROLE), origin)


def _union(training: Any, validation: Any) -> Any:
    from pyspark.errors import AnalysisException

    try:
        both = training.unionByName(validation)
        both.schema  # noqa: B018  (Connect finds out only now)
    except AnalysisException as error:
        raise DataError(
            "validation_data has columns of other types than the training data",
            expected=training.schema.simpleString(),
            received=validation.schema.simpleString(),
        ) from error
    return both


def _check_alike(source: Source, validation: Source) -> None:
    """Refuses validation rows that the training rows' spec would misread."""
    training, held_out = source.spec, validation.spec
    if training == held_out:
        return
    described = [
        ", ".join(
            f"{e.label} as {e.source_dtype or e.kind} {e.shape}" for e in spec.entries
        )
        for spec in (training, held_out)
    ]  # fmt: skip
    raise DataError(
        "validation_data has other columns than the training data",
        expected=described[0],
        received=described[1],
        hint="the same kind of data, columns and sample weights for both",
    )


def spread(source: Source, num_workers: int) -> Any:
    """The rows in ``num_workers`` partitions; as they are where a cached frame has as many.

    Looking at the partitions of a frame that is not cached could run Spark jobs.
    """
    if source.origin is not None and not is_connect(source.spark):
        level = source.origin.storageLevel
        cached = level.useMemory or level.useDisk
        # The user's frame keeps its plan between fits; that of our selection is new each time.
        if cached and source.origin.rdd.getNumPartitions() == num_workers:
            return source.frame
    return source.frame.repartition(num_workers)


# -- NumPy --------------------------------------------------------------------------------------


def _from_numpy(data: Any, signature: Signature) -> Source:
    x, y = data[0], data[1]
    weight = data[2] if len(data) == 3 else None
    spec = wanted_spec(x, y, weight, signature)
    table, spec = to_arrow_table(x, y, weight, spec)
    frame = session_of().createDataFrame(table.select(list(spec.columns)))
    return Source(frame.toDF(*wire_names(len(spec.columns))), spec)


def wanted_spec(x: Any, y: Any, weight: Any, signature: Signature) -> DataSpec:
    """The spec that NumPy arrays must fit, found as if they were DataFrame columns."""
    from pyspark.sql import types as T

    fields: list[Any] = []

    def columns(arrays: Any, prefix: str) -> Any:
        if isinstance(arrays, Mapping):
            return {name: columns(array, f"{prefix} {name}") for name, array in arrays.items()}
        array = np.asarray(arrays)
        if array.ndim == 0 or array.dtype.kind not in "biuf":
            raise DataError(
                f"{prefix} is no array of numbers",
                expected="one row per entry of the first axis",
                received=f"{array.dtype} of shape {array.shape}",
            )
        kind: Any = T.FloatType()
        for _ in range(array.ndim - 1):
            kind = T.ArrayType(kind)
        fields.append(T.StructField(prefix, kind))
        return prefix

    features = columns(x, "features")
    label = columns(y, "label")
    weights = None if weight is None else columns(weight, "sample_weight")
    return make_spec(T.StructType(fields), signature, features, label, weights)


# -- RDD ----------------------------------------------------------------------------------------


def _from_rdd(rdd: Any, signature: Signature) -> Source:
    spark = session_of()
    encoder = pair_encoder(signature)
    data_spec = DataSpec(encoder.features, encoder.labels)
    fields = [f"{name} binary" for name in wire_names(len(data_spec.columns))]
    schema = ", ".join([*fields, f"{PROBLEM} string"])
    return Source(spark.createDataFrame(rdd.mapPartitions(encoder), schema), data_spec)


def pair_encoder(signature: Signature) -> PairEncoder:
    """What turns an RDD's elements into rows of bytes, by the model's own, fixed shapes.

    Raises:
        DataError: A shape of the model is free.
    """
    labels: dict[str, ColumnSpec] = {}
    for name, spec in signature.outputs.items():
        kind = signature.label_kinds.get(name)
        if kind == "sparse":
            shape = spec.shape or (None,)
            labels[name] = ColumnSpec(
                (f"label {name}",), tuple(d or 1 for d in shape[:-1]), "int32", "binary",
                classes=shape[-1],
            )  # fmt: skip
        elif kind == "own":
            labels[name] = ColumnSpec((f"label {name}",), (None,), "float32", "binary")
        else:
            labels[name] = _fixed(spec, "output")
    return PairEncoder(rdd_features(signature), labels)


def rdd_features(signature: Signature) -> dict[str, ColumnSpec]:
    """How an RDD's inputs become arrays: by the model's own, fixed shapes."""
    return {name: _fixed(spec, "input") for name, spec in signature.inputs.items()}


def stack_inputs(
    rows: list[Any], specs: Mapping[str, ColumnSpec], first_row: int
) -> dict[str, Any]:
    """A list of inputs ``x`` (or pairs, or LabeledPoints) as one array per model input."""
    raw: dict[str, list[bytes]] = {name: [] for name in specs}
    for number, row in enumerate(rows, first_row):
        x = row.features if hasattr(row, "features") and hasattr(row, "label") else row
        if isinstance(x, tuple) and len(x) == 2 and not _fits(x, specs) and _fits(x[0], specs):
            x = x[0]
        for name, content in zip(specs, _encode(x, specs, number, "x"), strict=True):
            raw[name].append(content)
    return {
        name: np.frombuffer(b"".join(raw[name]), np.dtype(s.dtype)).reshape(len(rows), *s.shape)
        for name, s in specs.items()
    }


def _fits(x: Any, specs: Mapping[str, ColumnSpec]) -> bool:
    """Whether ``x`` has the sizes that the inputs want."""
    if isinstance(x, Mapping):
        return set(x) == set(specs)
    parts = x if len(specs) > 1 else [x]
    if not isinstance(parts, (list, tuple)) or len(parts) != len(specs):
        return False
    try:
        sizes = [int(p.size) if hasattr(p, "size") else int(np.size(p)) for p in parts]
    except ValueError:
        return False
    wanted = [math.prod(d or 0 for d in spec.shape) for spec in specs.values()]
    return sizes == wanted


def _fixed(spec: TensorSpec, what: str) -> ColumnSpec:
    if spec.shape is None or any(d is None for d in spec.shape):
        raise DataError(
            f"an RDD needs a model whose {what} shapes are fixed",
            expected=f"a fixed shape for {what} {spec.name!r}",
            received=f"shape {spec.shape}",
            hint="build the model with keras.Input(shape), or use a DataFrame",
        )
    prefix = "x" if what == "input" else "label"
    dtype = spec.dtype if what == "input" else "float32"
    return ColumnSpec((f"{prefix} {spec.name}",), spec.shape, dtype, "binary")


class PairEncoder:
    """Rows ``(x, y)`` or ``LabeledPoint`` -> tuples of little-endian bytes (on the executor).

    The last field is None, or an error that ends the partition: raised here, it would be an
    error of Spark's, retried and without its beats.
    """

    def __init__(self, features: dict[str, ColumnSpec], labels: dict[str, ColumnSpec]) -> None:
        self.features, self.labels = features, labels

    def __call__(self, rows: Iterable[Any]) -> Iterator[tuple[bytes | str | None, ...]]:
        for number, row in enumerate(rows):
            try:
                values = self._encode_row(row, number)
            except DataError as error:
                count = len(self.features) + len(self.labels)
                yield (*[None] * count, pack_problem(error))
                return
            yield (*values, None)

    def _encode_row(self, row: Any, number: int) -> list[bytes]:
        if hasattr(row, "features") and hasattr(row, "label"):
            x, y = row.features, row.label
        elif isinstance(row, (tuple, list)) and len(row) == 2:
            x, y = row
        else:
            raise DataError(
                f"row {number} of a partition is no example",
                expected="a pair (x, y) or a LabeledPoint",
                received=f"{type(row).__qualname__}",
            )
        return [*_encode(x, self.features, number, "x"), *_encode(y, self.labels, number, "y")]


def _encode(value: Any, specs: Mapping[str, ColumnSpec], number: int, side: str) -> Iterator[bytes]:
    parts = value if isinstance(value, Mapping) else None
    if parts is None:
        listed = isinstance(value, (list, tuple)) and len(specs) > 1
        parts = dict(zip(specs, value if listed else [value], strict=False))
    if set(parts) != set(specs):
        raise DataError(
            f"{side} of row {number} does not fit the model",
            expected=f"{len(specs)} parts, for {list(specs)}",
            received=f"{len(parts)}",
        )
    for name, spec in specs.items():
        yield encode_value(parts[name], spec, number)


def encode_value(value: Any, spec: ColumnSpec, number: int) -> bytes:
    """One value as the bytes of the array that the model wants."""
    try:
        array = np.asarray(value.toArray() if hasattr(value, "toArray") else value)
    except ValueError:  # lists of unequal length
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"row {number}: {spec.label} is no array of numbers",
            expected=f"numbers of shape {spec.shape}",
            received=f"{type(value).__qualname__} {str(value)[:60]}",
        )
    if None not in spec.shape:
        size = math.prod(d or 0 for d in spec.shape)
        if array.size == 1 and size > 1 and spec.label.startswith("'label "):
            return _one_hot(array, size, spec, number)
        if array.size != size:
            raise DataError(
                f"row {number}: {spec.label} does not fit the model",
                expected=f"shape {spec.shape}",
                received=f"shape {array.shape}",
            )
    dtype = np.dtype(spec.dtype).newbyteorder("<")
    with np.errstate(invalid="ignore", over="ignore"):
        encoded = array.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(encoded, array):
        raise DataError(
            f"row {number}: {spec.label} is not made of whole numbers",
            expected=f"values that {spec.dtype} can hold",
            received=str(array.ravel()[np.flatnonzero(encoded.ravel() != array.ravel())[0]]),
        )
    return encoded.tobytes()


def _one_hot(array: Any, size: int, spec: ColumnSpec, number: int) -> bytes:
    label = float(array.reshape(-1)[0])
    if not 0 <= label < size or label != int(label):
        raise DataError(
            f"row {number}: a label is out of range",
            expected=f"a class in [0, {size})",
            received=str(label),
        )
    row = np.zeros(size, np.dtype(spec.dtype).newbyteorder("<"))
    row[int(label)] = 1
    return row.tobytes()
