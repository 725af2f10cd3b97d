"""Opens the data that ``fit`` and ``evaluate`` take: any form becomes a DataFrame and its spec.

Runs on the driver.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparkdl.data import DataSpec, to_arrow_table
from sparkdl.errors import ConfigError, DataError
from sparkdl.files.arrow_file_system import NoFileSystemError
from sparkdl.learner.signature import Signature
from sparkdl.spark.columns.decoders import Decoder
from sparkdl.spark.columns.files import FileInput, FileSet, file_set, frame_of_files, is_path
from sparkdl.spark.columns.local_data import (
    are_arrays,
    arrays_as_frame,
    has_texts_or_sequences,
    unknown_data,
)
from sparkdl.spark.columns.matching import InputColumns, make_spec
from sparkdl.spark.columns.pairs import pair_encoder
from sparkdl.spark.columns.sequences import Pad
from sparkdl.spark.columns.wire import PROBLEM, selection, wire_names
from sparkdl.spark.driver.cluster import is_connect, require_running, session_of
from sparkdl.spark.driver.interpreter import this_interpreter

ROLE = "__sparkdl_role"
"""A column beside the user's: 0 in rows to train on, 1 in rows to validate on."""


@dataclass(frozen=True)
class Columns:
    """Which columns mean what, as the user said it in ``fit`` or ``evaluate``."""

    features: InputColumns = "features"
    label: InputColumns | None = "label"
    sample_weight: str | Mapping[str, str] | None = None
    decoder: Decoder | Mapping[str, Decoder] | None = None
    pad: Pad | None = None

    def __post_init__(self) -> None:
        for name in ("features", "label"):  # read more than once
            value = getattr(self, name)
            if isinstance(value, Iterator):
                object.__setattr__(self, name, list(value))


@dataclass(frozen=True)
class Source:
    """Selected columns of the user's data under their wire names, and how to read them.

    Args:
        frame: The selected columns.
        spec: How to read them.
        origin: The user's own frame, if ``frame`` has its partitions.
        files: From which the workers read the rows by themselves; then nobody reads ``frame``.
        split: Share of the files' rows to validate on.
        seed: Of the choice of these rows.
    """

    frame: Any
    spec: DataSpec
    origin: Any = None
    files: tuple[FileSet, ...] = ()
    split: float = 0.0
    seed: int = 0

    @property
    def spark(self) -> Any:
        """The session."""
        return self.frame.sparkSession

    def dealt(self, num_workers: int) -> FileInput | None:
        """What each worker reads from the files; None for rows that come from Spark."""
        if not self.files:
            return None
        return FileInput.dealt(self.files, num_workers, self.split, self.seed)


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


def open_source(data: Any, signature: Signature, columns: Columns) -> Source:
    """Checks ``data`` against the model and selects what is needed.

    Args:
        data: A path of Parquet or TFRecord files; a DataFrame; an RDD of ``(x, y)`` pairs or
            ``LabeledPoint``; or NumPy arrays
            ``(x, y)`` or ``(x, y, sample_weight)``.
        signature: The model's.
        columns: Which columns mean what (DataFrames only).

    Raises:
        DataError: The data do not fit the model.
        ConfigError: Not a form of data that is known.
    """
    data = read_by_spark(data)
    if is_frame(data):
        require_running(data.sparkSession)
        _refuse_streams(data)
        if columns.label is None and signature.needs_labels:
            raise DataError(
                "label names no column",
                expected="a column for the loss that the model was compiled with",
                received="label=None",
                hint="label='column'; only a model compiled without a loss does without",
            )
        spec = make_spec(
            data.schema, signature, columns.features, columns.label, columns.sample_weight,
            columns.decoder, pad=columns.pad,
        )  # fmt: skip
        names = wire_names(len(spec.columns))
        return Source(data.select(*selection(data.schema, spec, names)), spec, data)
    if is_rdd(data):
        return _from_rdd(data, signature)
    if are_arrays(data, needs_labels=signature.needs_labels):
        if any(is_frame(part) or is_rdd(part) for part in data):
            raise _in_a_tuple("data", data)
        if has_texts_or_sequences(data):
            frame, named = arrays_as_frame(*arrays_of(data), session_of())
            return open_source(frame, signature, replace(columns, **named))
        return _from_numpy(data, signature)
    raise unknown_data(data)


def _in_a_tuple(argument: str, data: Sequence[Any]) -> ConfigError:
    """The error for DataFrames in a tuple, as arrays are passed."""
    return ConfigError(
        f"{argument} must be one DataFrame, without a tuple",
        expected="one DataFrame (or RDD) that has both features and labels",
        received=f"a tuple of {', '.join(type(part).__name__ for part in data)}",
        hint=f"{argument}=df; features='column' and label='column' name the columns",
    )


def _refuse_streams(frame: Any) -> None:
    """Refuses a streaming DataFrame: epochs need rows that end."""
    if frame.isStreaming:
        raise DataError(
            "a stream of rows cannot be trained on or evaluated",
            expected="a DataFrame of spark.read, whose rows end",
            received="a streaming DataFrame (spark.readStream)",
            hint="spark_model.fit_stream(stream, checkpoint_dir=...) trains on each of its batches",
        )


def open_fit_source(
    data: Any,
    validation_data: Any,
    signature: Signature,
    columns: Columns,
    *,
    split: float,
    seed: int,
) -> Source:
    """The rows to train and those to validate on, which travel to the executors in one stage.

    Args:
        data: See :func:`open_source`.
        validation_data: Rows of the same kind, or None. As in Keras ``columns.sample_weight`` is
            for the rows to train on; arrays ``(x, y, sample_weight)`` have weights of their own.
            Or the name of a boolean column of ``data``, true in the rows to validate on.
        signature: The model's.
        columns: Which columns mean what.
        split: Share of ``data`` to validate on where there is no ``validation_data``.
        seed: Of the choice of these rows.

    Raises:
        DataError: The data do not fit the model, or each other.
        ConfigError: Not a form of data that is known.
    """
    if isinstance(validation_data, str) and is_frame(data) and _is_column(validation_data, data):
        return _validated_by_column(data, validation_data, signature, columns, split)
    if is_path(data) and (validation_data is None or is_path(validation_data)):
        try:
            return _open_files(data, validation_data, signature, columns, split, seed)
        except NoFileSystemError as error:
            warnings.warn(
                f"the workers cannot read the files by themselves, so Spark does: {error.what}",
                RuntimeWarning,
                stacklevel=4,
            )
    data, validation_data = read_by_spark(data), read_by_spark(validation_data)
    held_out = None
    origin = data
    if validation_data is not None:
        if isinstance(validation_data, (tuple, list)) and any(
            is_frame(part) or is_rdd(part) for part in validation_data
        ):
            raise _in_a_tuple("validation_data", validation_data)
        held_out = open_source(validation_data, signature, replace(columns, sample_weight=None))
        if is_frame(data):
            data, columns = _weights_apart(data, columns)
    source = open_source(data, signature, columns)
    if is_frame(data):
        source = replace(source, origin=origin)
    return _add_validation(source, held_out, split, seed)


def read_by_spark(data: Any) -> Any:
    """Files as a DataFrame; everything else as it is."""
    return frame_of_files(session_of(), data) if is_path(data) else data


def _open_files(
    path: str,
    validation_path: str | None,
    signature: Signature,
    columns: Columns,
    split: float,
    seed: int,
) -> Source:
    """Files that the workers read by themselves; Spark is asked for their schema alone."""
    frame = frame_of_files(session_of(), path)
    sets = [file_set(path, frame, 0)]
    held_out = None
    if validation_path is not None:
        other = frame_of_files(session_of(), validation_path)
        held_out = open_source(other, signature, replace(columns, sample_weight=None))
        sets.append(file_set(validation_path, other, 1))
        if sets[0].kind != sets[1].kind:
            raise DataError(
                "validation_data are files of another kind than the training data",
                expected=sets[0].kind,
                received=sets[1].kind,
            )
    source = open_source(frame, signature, columns)
    if held_out is not None and source.spec.weights:
        raise DataError(
            "files to validate on have no sample weights",
            expected="sample_weight=None, or validation_split",
            received=f"sample_weight={columns.sample_weight!r}",
            hint="fit(spark.read.parquet(...), validation_data=...) takes both",
        )
    marked = _add_validation(source, held_out, split, seed)
    share = 0.0 if held_out is not None else split
    return replace(marked, origin=None, files=tuple(sets), split=share, seed=seed)


def _is_column(text: str, frame: Any) -> bool:
    """Whether a text means a column of a frame and no path."""
    marks = ("/", ".parquet", ".tfrecord")
    return text in frame.schema.names or not any(mark in text for mark in marks)


def _validated_by_column(
    data: Any, name: str, signature: Signature, columns: Columns, split: float
) -> Source:
    """Marks the rows in which a boolean column is true (null is false); one pass over the rows."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    if not is_frame(data) or split:
        raise ConfigError(
            "validation_data names a column that chooses the rows to validate on",
            expected="a DataFrame, and validation_split=0",
            received=f"validation_split={split}" if is_frame(data) else type(data).__name__,
        )
    field = next((f for f in data.schema.fields if f.name == name), None)
    if field is None or not isinstance(field.dataType, T.BooleanType):
        raise DataError(
            f"validation_data names no column of booleans: {name!r}",
            expected="rows like data, or a boolean column of data, true in those to validate on",
            received="no such column among " + ", ".join(map(repr, data.schema.names))
            if field is None
            else f"a column of type {field.dataType.simpleString()}",
            hint="F.col(...).cast('boolean')",
        )
    source = open_source(data, signature, columns)
    held_out = F.coalesce(F.col("`" + name.replace("`", "``") + "`"), F.lit(False))
    chosen = selection(data.schema, source.spec, wire_names(len(source.spec.columns)))
    frame = data.select(*chosen, held_out.cast("byte").alias(ROLE))
    return Source(frame, replace(source.spec, role_column=ROLE), source.origin)


def _weights_apart(frame: Any, columns: Columns) -> tuple[Any, Columns]:
    """A frame whose weights are no feature or label, too: rows to validate on have others."""
    from pyspark.sql import functions as F

    weight = columns.sample_weight
    names = list(weight.values()) if isinstance(weight, Mapping) else [weight]
    copies: dict[str, str] = {}
    for name in names:
        if isinstance(name, str) and frame.columns.count(name) == 1:
            copies[name] = f"{name} as sample_weight"
            frame = frame.withColumn(copies[name], F.col("`" + name.replace("`", "``") + "`"))
    if isinstance(weight, Mapping):
        weight = {output: copies.get(name, name) for output, name in weight.items()}
    elif isinstance(weight, str):
        weight = copies.get(weight, weight)
    return frame, replace(columns, sample_weight=weight)


def _add_validation(source: Source, validation: Source | None, split: float, seed: int) -> Source:
    """Marks the rows to validate on."""
    from pyspark.sql import functions as F

    origin = source.origin
    if validation is not None:
        origin = None
        source, validation = _with_weights(source, validation), _with_weights(validation, source)
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


def _with_weights(source: Source, other: Source) -> Source:
    """The rows with a weight of 1 each, where only the ``other`` rows have weights."""
    from pyspark.sql import functions as F

    if source.spec.weights or not other.spec.weights:
        return source
    frame = source.frame
    for name in wire_names(len(other.spec.columns))[len(source.spec.columns) :]:
        frame = frame.withColumn(name, F.lit(1.0).cast(other.frame.schema[name].dataType))
    return replace(
        source, frame=frame, spec=replace(source.spec, sample_weight=other.spec.sample_weight)
    )


def _union(training: Any, validation: Any) -> Any:
    """The rows of both frames."""
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

    Looking at the partitions of a frame that is not cached could run Spark jobs. Workers that read
    files by themselves get a partition each that says nothing.
    """
    if source.files:
        return source.spark.range(0, num_workers, 1, num_workers)
    if source.origin is not None and not is_connect(source.spark):
        level = source.origin.storageLevel
        cached = level.useMemory or level.useDisk
        # The user's frame keeps its plan between fits; that of our selection is new each time.
        if cached and source.origin.rdd.getNumPartitions() == num_workers:
            return source.frame
    return source.frame.repartition(num_workers)


# -- NumPy --------------------------------------------------------------------------------------


def _from_numpy(data: Any, signature: Signature) -> Source:
    """Arrays as a frame; Spark ships their rows to the executors."""
    x, y, weight = arrays_of(data)
    spec = wanted_spec(x, y, weight, signature)
    table, spec = to_arrow_table(x, y, weight, spec)
    frame = session_of().createDataFrame(table.select(list(spec.columns)))
    return Source(frame.toDF(*wire_names(len(spec.columns))), spec)


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
    label = None if y is None else columns(y, "label")
    weights = None if weight is None else columns(weight, "sample_weight")
    return make_spec(T.StructType(fields), signature, features, label, weights)


# -- RDD ----------------------------------------------------------------------------------------


def _from_rdd(rdd: Any, signature: Signature) -> Source:
    """A frame of the bytes that executors make of the RDD's elements."""
    spark = session_of()
    encoder = pair_encoder(signature)
    data_spec = DataSpec(encoder.features, encoder.labels)
    fields = [f"{name} binary" for name in wire_names(len(data_spec.columns))]
    schema = ", ".join([*fields, f"{PROBLEM} string"])
    with this_interpreter(rdd.context):
        frame = spark.createDataFrame(rdd.mapPartitions(encoder), schema)
    return Source(frame, data_spec)
