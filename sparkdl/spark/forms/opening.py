"""The form of what a user gives; the rows that ``fit`` trains and validates on, as one frame.

Runs on the driver.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pyspark.sql import Column

from sparkdl.data import ColumnSpec, DataSpec
from sparkdl.errors import ConfigError, DataError
from sparkdl.files.file_system import NoFileSystemError
from sparkdl.learner.signature import Signature
from sparkdl.process.user_warnings import warn_user
from sparkdl.settings.values import shown
from sparkdl.spark.forms.arrays import ArraysForm, no_group
from sparkdl.spark.forms.fields import expression_error, require_booleans
from sparkdl.spark.forms.files import ENDS
from sparkdl.spark.forms.frames import FrameForm, PathForm, StreamForm, TableForm, kind_of
from sparkdl.spark.forms.rdds import RddForm
from sparkdl.spark.forms.shipped import PLACE, places_in
from sparkdl.spark.forms.sources import ROLE, Columns, Form, Source
from sparkdl.spark.forms.wire import selection, wire_names
from sparkdl.spark.session.frames import column_named, is_frame, is_rdd, without_index
from sparkdl.spark.session.running import require_running


def form_of(data: Any) -> Form:
    """The form of the rows that a user gives; a form itself as it is.

    Raises:
        ResourceError: The session of a DataFrame has been stopped.
    """
    if isinstance(data, Form):
        return data
    data = without_index(data)
    if is_frame(data):
        require_running(data.sparkSession)
        return StreamForm(data) if data.isStreaming else FrameForm(data)
    if is_rdd(data):
        return RddForm(data)
    if kind_of(data) in TableForm.KINDS:
        return TableForm(data)
    if isinstance(data, (str, os.PathLike)):
        return PathForm(os.fspath(data))
    paths = data if isinstance(data, (list, tuple)) else ()
    if paths and all(isinstance(p, (str, os.PathLike)) and str(p).endswith(ENDS) for p in paths):
        raise ConfigError(
            "several paths are no form of data", received=shown(data),
            expected="one path, or a pattern: 'rows/{a,b}.parquet'",
            hint="fit(spark.read.parquet(*paths)) takes the rows of all",
        )  # fmt: skip
    return ArraysForm(data)


def settled(data: Any) -> Any:
    """Data, or None, as ``fit`` takes them, for several calls; see :meth:`Form.settled`."""
    return None if data is None else form_of(data).settled()


@dataclass(frozen=True)
class RowChoice:
    """All that decides which rows a fit reads, and how it decodes them.

    Args:
        validation: Rows of the same kind, or None. As in Keras ``columns.sample_weight`` is for the
            rows to train on; arrays ``(x, y, sample_weight)`` have weights of their own. Or the
            name of a boolean column of the data, true in the rows to validate on.
        split: Share of the data to validate on where there is no ``validation``: of arrays the last
            rows, as in Keras, otherwise a random share.
    """

    signature: Signature
    columns: Columns
    validation: Any
    split: float
    seed: int

    def is_same_as(self, other: RowChoice) -> bool:
        """Whether both get the same rows: rows to validate on count by which object they are, for a
        table of pandas cannot be compared by ``==``, and a name by its text."""
        alike = replace(self, validation=None) == replace(other, validation=None)
        if isinstance(self.validation, str):
            return alike and self.validation == other.validation
        return alike and self.validation is other.validation


def open_fit_source(data: Any, choice: RowChoice) -> Source:
    """The rows to train and those to validate on, which travel to the executors in one stage.

    Args:
        data: See :func:`form_of`.

    Raises:
        DataError: The data do not fit the model, or each other.
        ConfigError: Not a form of data that is known.
    """
    signature, columns, validation_data = choice.signature, choice.columns, choice.validation
    form = form_of(data)
    if isinstance(validation_data, Column):
        raise expression_error(validation_data, "validation_data")
    if isinstance(validation_data, str) and form.has_column(validation_data):
        return _validated_by_column(form, validation_data, choice)
    held_out = None if validation_data is None else form_of(validation_data)
    grouped = columns.group is not None
    if grouped and not (
        isinstance(columns.group, str)
        if form.has_columns or held_out is not None
        else isinstance(form, ArraysForm)
    ):
        raise no_group(columns.group)
    cuts = choice.split and held_out is None and not grouped
    parts = form.cut(choice.split, signature) if cuts else None
    if parts is not None:
        (form, held_out), choice = parts, replace(choice, split=0.0)
    if (
        isinstance(form, PathForm)
        and not grouped
        and (held_out is None or isinstance(held_out, PathForm))
    ):
        try:
            return _open_files(form, held_out, choice)
        except NoFileSystemError as error:
            warn_user(
                f"the workers cannot read the files by themselves, so Spark does: {error.what}"
            )
    if held_out is None:
        return _add_validation(form.open(signature, columns), None, choice)
    held_out.refuse_frames("validation_data")
    words = form.words, held_out.words
    validation = held_out.like(form, signature, columns).open(
        signature, replace(columns, sample_weight=None)
    )
    form, columns = form.weights_apart(columns)
    source = form.open(signature, columns)
    if words[0] != words[1]:
        _check_forms(words, source.spec, validation.spec)
    return _add_validation(source, validation, choice)


def _check_forms(forms: tuple[str, str], training: DataSpec, held_out: DataSpec) -> None:
    """Refuses arrays beside a DataFrame, say, where that makes them other columns."""
    if (training.features, training.labels) == (held_out.features, held_out.labels):
        return
    raise ConfigError(
        "validation_data is of another form than the data", expected=f"{forms[0]}, as the data",
        received=forms[1],
        hint="validation_split=0.2 takes rows of the data"
        if forms[1] != "arrays"
        else "spark.createDataFrame(pandas.DataFrame({...})) makes a DataFrame of arrays",
    )  # fmt: skip


def _open_files(form: PathForm, held_out: PathForm | None, choice: RowChoice) -> Source:
    """Files that the workers read by themselves; Spark is asked for their schema alone."""
    signature, columns = choice.signature, choice.columns
    sets = [form.files(0)] if held_out is None else [form.files(0), held_out.files(1)]
    validation = None
    if held_out is not None:
        validation = held_out.open(signature, replace(columns, sample_weight=None))
        if sets[0].kind != sets[1].kind:
            raise NoFileSystemError(
                "the files to validate on are of another kind than the others",
                expected=sets[0].kind, received=sets[1].kind,
            )  # fmt: skip
    source = form.open(signature, columns)
    if validation is not None and source.spec.weights:
        raise DataError(
            "files to validate on have no sample weights",
            expected="sample_weight=None, or validation_split",
            received=f"sample_weight={columns.sample_weight!r}",
            hint="fit(spark.read.parquet(...), validation_data=...) takes both",
        )
    marked = _add_validation(source, validation, choice)
    share = 0.0 if validation is not None else choice.split
    return replace(marked, origin=None, files=tuple(sets), split=share, seed=choice.seed)


def _validated_by_column(form: Form, name: str, choice: RowChoice) -> Source:
    """Marks the rows in which a boolean column is true ; one pass over the rows."""
    from pyspark.sql import functions as F

    data = form.numbered()
    if data is None or choice.split:
        raise ConfigError(
            "validation_data names a column that chooses the rows to validate on",
            expected="a DataFrame, and validation_split=0",
            received=f"validation_split={choice.split}"
            if choice.split
            else type(form.data).__name__,
        )
    expected = "rows like data, or a boolean column of data"
    require_booleans(data.schema, name, "validation_data", expected)
    source = form.open(choice.signature, choice.columns)
    held_out = column_named(name).cast("byte")
    chosen = selection(data.schema, source.spec, wire_names(len(source.spec.columns)))
    places = places_in(data)
    frame = data.select(*places, *chosen, F.coalesce(held_out, F.lit(-1).cast("byte")).alias(ROLE))
    return Source(frame, replace(source.spec, role_column=ROLE), source.origin, validates="may")


def _add_validation(source: Source, validation: Source | None, choice: RowChoice) -> Source:
    from pyspark.sql import functions as F

    split, seed = choice.split, choice.seed
    origin, apart = source.origin, source.apart
    if validation is not None:
        origin = None
        source, validation = _with_weights(source, validation), _with_weights(validation, source)
        _check_alike(source, validation)
        source, validation = apart = (
            replace(source, frame=source.frame.withColumn(ROLE, F.lit(0).cast("byte"))),
            replace(validation, frame=validation.frame.withColumn(ROLE, F.lit(1).cast("byte"))),
        )
        frame = _union(source.frame, validation.frame)
    elif split > 0:
        drawn, group = F.rand(seed), source.group_column  # by partition and place in it
        if group is not None:  # all rows of a group have one role
            drawn = F.pmod(F.xxhash64(F.col(group), F.lit(seed)), F.lit(1 << 53)) / F.lit(2.0**53)
        elif places_in(source.frame):
            drawn = F.pmod(F.xxhash64(PLACE, F.lit(seed)), F.lit(1 << 53)) / F.lit(2.0**53)
        role = F.when(drawn < F.lit(split), 1).otherwise(0).cast("byte")
        frame = source.frame.withColumn(ROLE, role)
    else:
        return source
    spec = replace(source.spec, role_column=ROLE)
    validates: Literal["must", "split"] = "must" if validation is not None else "split"
    return Source(frame, spec, origin, validates=validates, apart=apart)


def _with_weights(source: Source, other: Source) -> Source:
    """The rows with weights of 1, where only the ``other`` rows have weights."""
    if source.spec.weights or not other.spec.weights:
        return source
    frame = source.frame
    weights = {spec.columns[0]: spec for spec in other.spec.weights.values()}
    names = dict(zip(wire_names(len(other.spec.columns)), other.spec.columns, strict=True))
    for name, column in [*names.items()][len(source.spec.columns) :]:
        frame = frame.withColumn(name, _ones(weights[column], other.frame.schema[name].dataType))
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
    """The rows of both frames; by number, if those of both are numbered."""
    from pyspark.errors import AnalysisException

    if places_in(training) != places_in(validation):
        training, validation = training.drop(PLACE), validation.drop(PLACE)
    try:
        both = training.unionByName(validation)
        both.schema  # noqa: B018  (Connect finds out only now)
    except AnalysisException as error:
        raise DataError(
            "validation_data has columns of other types than the training data",
            expected=training.schema.simpleString(), received=validation.schema.simpleString(),
        ) from error  # fmt: skip
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
    if spec is None:
        return "no such column"
    of = f" of {spec.source_dtype or spec.dtype}"
    form = "class numbers" if spec.one_hot is not None else spec.kind + of
    return f"{spec.label} as {form}, shape {spec.shape}"
