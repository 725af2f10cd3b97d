"""Opens the rows that ``fit`` trains on and those that it validates on, as one frame.

Runs on the driver.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pyspark.sql import Column

from sparkdl.data import ColumnSpec, DataSpec
from sparkdl.errors import ConfigError, DataError
from sparkdl.files.arrow_file_system import NoFileSystemError
from sparkdl.learner.signature import Signature
from sparkdl.spark.columns.fields import expression_error
from sparkdl.spark.columns.files import file_set, is_path
from sparkdl.spark.columns.local_data import (
    are_arrays,
    arrays_as_frame,
    by_name,
    with_labels_like,
)
from sparkdl.spark.columns.sources import (
    ROLE,
    Columns,
    Source,
    in_a_tuple,
    open_source,
    read_by_spark,
)
from sparkdl.spark.columns.wire import selection, wire_names
from sparkdl.spark.session.frames import is_frame, is_rdd
from sparkdl.user_warnings import warn_user


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
        split: Share of ``data`` to validate on where there is no ``validation_data``: of arrays
            the last rows, as in Keras, otherwise a random share.
        seed: Of the choice of these rows.

    Raises:
        DataError: The data do not fit the model, or each other.
        ConfigError: Not a form of data that is known.
    """
    if split and validation_data is None and are_arrays(data, needs_labels=signature.needs_labels):
        data, validation_data = split_arrays(by_name(data, signature), split)
        split = 0.0
    if isinstance(validation_data, Column):
        raise expression_error(validation_data, "validation_data")
    if isinstance(validation_data, str) and is_frame(data) and _is_column(validation_data, data):
        return _validated_by_column(data, validation_data, signature, columns, split)
    paths = [data] if validation_data is None else [data, validation_data]
    data = read_by_spark(data)
    if all(map(is_path, paths)) and validation_data in data.schema.names:
        return _validated_by_column(data, validation_data, signature, columns, split)
    validation_data = read_by_spark(validation_data)
    if all(map(is_path, paths)):
        try:
            return _open_files(paths, [data, validation_data], signature, columns, split, seed)
        except NoFileSystemError as error:
            warn_user(
                f"the workers cannot read the files by themselves, so Spark does: {error.what}"
            )
    held_out = None
    forms = ("", "")
    origin = data
    if validation_data is not None:
        if isinstance(validation_data, (tuple, list)) and any(
            is_frame(part) or is_rdd(part) for part in validation_data
        ):
            raise in_a_tuple("validation_data", validation_data)
        forms = _form(data, signature), _form(validation_data, signature)
        validation_data = _like(data, validation_data, forms, signature, columns)
        held_out = open_source(validation_data, signature, replace(columns, sample_weight=None))
        if is_frame(data):
            data, columns = _weights_apart(data, columns)
    source = open_source(data, signature, columns)
    if is_frame(data):
        source = replace(source, origin=origin)
    if held_out is not None and forms[0] != forms[1]:
        _check_forms(forms, source.spec, held_out.spec)
    return _add_validation(source, held_out, split, seed)


def split_arrays(data: Sequence[Any], split: float) -> tuple[Any, Any]:
    """Arrays cut into the rows to train on and the last ones, to validate on.

    Args:
        data: ``(x, y, ...)``; each an array, or name -> array.
        split: Share of the rows to validate on.
    """
    first = next(iter(data[0].values())) if isinstance(data[0], Mapping) else data[0]
    end = math.floor(len(first) * (1 - split))

    def cut(part: Any, place: slice) -> Any:
        if isinstance(part, Mapping):
            return {name: values[place] for name, values in part.items()}
        return part[place]

    training, held_out = slice(0, end), slice(end, None)
    return tuple(cut(p, training) for p in data), tuple(cut(p, held_out) for p in data)


def _check_forms(forms: tuple[str, str], training: DataSpec, held_out: DataSpec) -> None:
    """Refuses arrays beside a DataFrame, say, where that makes them other columns."""
    if (training.features, training.labels) == (held_out.features, held_out.labels):
        return
    raise ConfigError(
        "validation_data is of another form than the data",
        expected=f"{forms[0]}, as the data",
        received=forms[1],
        hint="validation_split=0.2 takes rows of the data"
        if forms[1] != "arrays"
        else "spark.createDataFrame(pandas.DataFrame({...})) makes a DataFrame of arrays",
    )


def _like(
    data: Any,
    validation_data: Any,
    forms: tuple[str, str],
    signature: Signature,
    columns: Columns,
) -> Any:
    """Rows to validate on in the form of those to train on, if that can be made of them.

    Args:
        data: Rows to train on.
        validation_data: Rows to validate on.
        forms: Of the two; see :func:`_form`.
        signature: The model's.
        columns: Which columns of the rows to train on mean what.
    """
    if forms == ("arrays", "arrays"):
        held_out, rows = (by_name(part, signature) for part in (validation_data, data))
        return with_labels_like(held_out, rows)
    names = columns.features, columns.label
    if forms == ("a DataFrame", "arrays") and len(validation_data) == 2 and _are_names(names):
        x, y = by_name(validation_data, signature)
        if not isinstance(x, Mapping) and not isinstance(y, Mapping):
            frame, _ = arrays_as_frame(x, y, None, data.sparkSession)
            return frame.withColumnsRenamed({"features": names[0], "label": names[1]})
    return validation_data


def _form(data: Any, signature: Signature) -> str:
    """The form of the rows, in words for messages."""
    if is_frame(data):
        return "a DataFrame"
    if is_rdd(data):
        return "an RDD"
    return "arrays" if are_arrays(data, needs_labels=signature.needs_labels) else "no rows"


def _are_names(names: Sequence[Any]) -> bool:
    return all(isinstance(name, str) for name in names)


def _open_files(
    paths: Sequence[str],
    frames: Sequence[Any],
    signature: Signature,
    columns: Columns,
    split: float,
    seed: int,
) -> Source:
    """Files that the workers read by themselves; Spark is asked for their schema alone.

    Raises:
        NoFileSystemError: Only Spark finds them.
    """
    sets = [file_set(path, frames[role], role) for role, path in enumerate(paths)]
    held_out = None
    if len(sets) > 1:
        held_out = open_source(frames[1], signature, replace(columns, sample_weight=None))
        if sets[0].kind != sets[1].kind:
            raise DataError(
                "validation_data are files of another kind than the training data",
                expected=sets[0].kind,
                received=sets[1].kind,
            )
    source = open_source(frames[0], signature, columns)
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
    spec = replace(source.spec, role_column=ROLE)
    return Source(frame, spec, source.origin, validates="may")


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
    return Source(frame, replace(source.spec, role_column=ROLE), origin, validates="must")


def _with_weights(source: Source, other: Source) -> Source:
    """The rows with weights of 1, where only the ``other`` rows have weights."""
    if source.spec.weights or not other.spec.weights:
        return source
    frame = source.frame
    weights = {spec.columns[0]: spec for spec in other.spec.weights.values()}
    names = dict(zip(wire_names(len(other.spec.columns)), other.spec.columns, strict=True))
    for name, column in [*names.items()][len(source.spec.columns) :]:
        kind = other.frame.schema[name].dataType
        frame = frame.withColumn(name, _ones(weights[column], kind))
    return replace(
        source, frame=frame, spec=replace(source.spec, sample_weight=other.spec.sample_weight)
    )


def _ones(weight: ColumnSpec, kind: Any) -> Any:
    """A column in which each number of a weight is 1."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    if None in weight.shape:
        raise DataError(
            "some rows have weights for each position, and the others have none",
            expected="weights of the same kind for the rows to train and to validate on",
            received=f"sample_weight {weight.label}, whose length the model does not fix",
            hint="validation_data=(x, y, sample_weight), or a validation column of data",
        )
    shape = [size or 1 for size in weight.shape]
    if isinstance(kind, T.BinaryType):
        return F.lit(bytearray(np.ones(shape, weight.source_dtype or weight.dtype).tobytes()))
    ones = F.lit(1.0)
    if isinstance(kind, T.ArrayType):
        for size in reversed(shape):
            ones = F.array_repeat(ones, size)
    return ones.cast(kind)


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
    pairs = list(itertools.zip_longest(training.entries, held_out.entries))
    other = [(mine, yours) for mine, yours in pairs if mine != yours]
    one_hot = any(
        mine and yours and (mine.one_hot is None) != (yours.one_hot is None)
        for mine, yours in other
    )
    raise DataError(
        "validation_data has other columns than the training data",
        expected=", ".join(_described(mine) for mine, _ in other),
        received=", ".join(_described(yours) for _, yours in other),
        hint="keras.utils.to_categorical(y, classes) makes one-hot vectors of class numbers"
        if one_hot
        else "the same kind of data, columns and sample weights for both",
    )


def _described(spec: ColumnSpec | None) -> str:
    """A column and all that may differ in how it is read."""
    if spec is None:
        return "no such column"
    of = f" of {spec.source_dtype or spec.dtype}"
    form = "class numbers" if spec.one_hot is not None else spec.kind + of
    return f"{spec.label} as {form}, shape {spec.shape}"
