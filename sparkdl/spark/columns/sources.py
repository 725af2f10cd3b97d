"""Opens the data that ``fit`` and ``evaluate`` take: any form becomes a DataFrame and its spec.

Runs on the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pyspark.sql import Column

from sparkdl.data import DataSpec, to_arrow_table
from sparkdl.errors import ConfigError, DataError
from sparkdl.learner.signature import Signature
from sparkdl.spark.columns.files import FileInput, FileSet, frame_of_files, is_path
from sparkdl.spark.columns.local_data import (
    are_arrays,
    arrays_as_frame,
    by_name,
    has_texts_or_sequences,
    unknown_data,
)
from sparkdl.spark.columns.matching import Decoder, InputColumns, make_spec
from sparkdl.spark.columns.pairs import pair_encoder
from sparkdl.spark.columns.sequences import Pad
from sparkdl.spark.columns.shared_rows import SharedRows
from sparkdl.spark.columns.shipped import ship_table
from sparkdl.spark.columns.wire import PROBLEM, selection, wire_names
from sparkdl.spark.session.frames import is_frame, is_rdd
from sparkdl.spark.session.interpreter import this_interpreter
from sparkdl.spark.session.running import (
    is_connect,
    require_running,
    require_running_rdd,
    session_of,
)
from sparkdl.user_warnings import warn_user

ROLE = "__sparkdl_role"
"""A column beside the user's: 0 in rows to train on, 1 in rows to validate on."""
_PLACE = "__sparkdl_place"
_SORTS = "spark.sql.execution.sortBeforeRepartition"


@dataclass(frozen=True)
class Columns:
    """Which columns mean what, as the user said it in ``fit`` or ``evaluate``.

    Several names become a list, in whatever form they came, and names by input a dict of these:
    they are read more than once, and written to model files.

    Raises:
        DataError: Names of columns in a set.
    """

    features: InputColumns = "features"
    label: InputColumns | None = "label"
    sample_weight: str | Mapping[str, str] | None = None
    decoder: Decoder | Mapping[str, Decoder] | None = None
    pad: Pad | None = None

    def __post_init__(self) -> None:
        for argument in ("features", "label"):
            object.__setattr__(self, argument, _listed(getattr(self, argument), argument))


def _listed(names: Any, argument: str) -> Any:
    """Several names as a list, also by input; what is no such thing is left to ``make_spec``."""
    if isinstance(names, Mapping):
        return {key: _listed(value, argument) for key, value in names.items()}
    if isinstance(names, (set, frozenset)):
        raise DataError(
            f"{argument} names columns in no order",
            expected="a name, or several in the order in which the model takes them",
            received=f"a {type(names).__name__}",
            hint=f"{argument}={sorted(map(str, names))}",
        )
    if isinstance(names, (str, Column)) or not isinstance(names, Iterable):
        return names
    return [str(name) if isinstance(name, str) else name for name in names]  # np.str_ is a str


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
        shared: The rows for several fits with one worker each, which then do not read ``frame``.
        validates: Whether there must be rows to validate on, or may be (where a column chooses
            them); None without.
    """

    frame: Any
    spec: DataSpec
    origin: Any = None
    files: tuple[FileSet, ...] = ()
    split: float = 0.0
    seed: int = 0
    shared: SharedRows | None = None
    validates: Literal["must", "may"] | None = None

    @property
    def spark(self) -> Any:
        """The session."""
        return self.frame.sparkSession

    def dealt(self, num_workers: int) -> FileInput | None:
        """The parts of the files that each worker reads; None for rows that come from Spark."""
        if not self.files:
            return None
        return FileInput.dealt(self.files, num_workers, self.split, self.seed)


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
        require_running_rdd(data)
        return _from_rdd(data, signature)
    if are_arrays(data, needs_labels=signature.needs_labels):
        if any(is_frame(part) or is_rdd(part) for part in data):
            raise in_a_tuple("data", data)
        data = by_name(data, signature)
        if has_texts_or_sequences(data):
            frame, named = arrays_as_frame(*arrays_of(data), session_of())
            return open_source(frame, signature, replace(columns, **named))
        return _from_numpy(data, signature)
    raise unknown_data(data)


def in_a_tuple(argument: str, data: Sequence[Any]) -> ConfigError:
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


def read_by_spark(data: Any) -> Any:
    """Files as a DataFrame; everything else as it is."""
    return frame_of_files(session_of(), data) if is_path(data) else data


def spread(source: Source, num_workers: int, *, in_order: bool = False) -> Any:
    """The rows in ``num_workers`` partitions; as they are where a cached frame has as many.

    Looking at the partitions of a frame that is not cached could run Spark jobs. Workers that read
    files or shared rows by themselves get a partition each that says nothing.

    Args:
        source: The rows.
        num_workers: How many partitions.
        in_order: See :func:`dealt`.
    """
    if source.files or source.shared is not None:
        return source.spark.range(0, num_workers, 1, num_workers)
    if source.origin is not None and not is_connect(source.spark):
        level = source.origin.storageLevel
        cached = level.useMemory or level.useDisk
        # The user's frame keeps its plan between fits; that of our selection is new each time.
        if cached and source.origin.rdd.getNumPartitions() == num_workers:
            return source.frame
    return dealt(source.frame, num_workers, in_order=in_order)


def dealt(frame: Any, num_workers: int, *, in_order: bool) -> Any:
    """The rows dealt in turn to ``num_workers`` partitions.

    Which rows a partition gets is decided by what the rows hold (Spark sorts them by their hash
    before it deals them), in which order they arrive there by chance.

    Args:
        frame: Of the rows.
        num_workers: How many partitions.
        in_order: Whether the rows of each partition have the order that they have in the frame.
    """
    if not in_order:
        return frame.repartition(num_workers)
    from pyspark.sql import functions as F

    numbered = frame.withColumn(_PLACE, F.monotonically_increasing_id())
    return numbered.repartition(num_workers).sortWithinPartitions(_PLACE).drop(_PLACE)


def warn_of_chance(source: Source, *, repartition: bool) -> None:
    """Warns where the frame has other rows, or deals them otherwise, each time it is computed.

    Spark Connect does not say.

    Args:
        source: The rows.
        repartition: Whether they are to be dealt to the workers.
    """
    frame = source.origin
    if source.files or frame is None or is_connect(source.spark):
        return
    level = frame.storageLevel
    kept = level.useMemory or level.useDisk  # its plan may be from before
    if not (kept or frame._jdf.queryExecution().withCachedData().deterministic()):
        warn_user(
            "the rows are computed by chance (rand(), uuid(), a non-deterministic function, or an "
            "aggregate such as first() or collect_list()): another fit, and a worker that is "
            "started again, may see other rows. Write them to files first, or cache them: "
            "df.cache()"
        )
    elif repartition and source.spark.conf.get(_SORTS, "true").lower() == "false":
        warn_user(
            f"{_SORTS} is false: Spark deals the rows to the workers by the order in which they "
            "arrive, so another fit, and a worker that is started again, may see other rows"
        )


# -- NumPy --------------------------------------------------------------------------------------


def _from_numpy(data: Any, signature: Signature) -> Source:
    """Arrays as a frame; Spark ships their rows to the executors."""
    x, y, weight = arrays_of(data)
    spec = wanted_spec(x, y, weight, signature)
    table, spec = to_arrow_table(x, y, weight, spec)
    frame = ship_table(session_of(), table.select(list(spec.columns)))
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
                hint="names, y = np.unique(y, return_inverse=True) makes numbers of them"
                if array.dtype.kind in "US" and prefix.startswith("label")
                else "",
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
