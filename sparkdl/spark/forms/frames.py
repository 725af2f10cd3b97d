"""Forms of rows that have columns: DataFrames of Spark, streams, tables of this process, files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from pyspark.errors import PySparkValueError

from sparkdl.data import ColumnSpec
from sparkdl.errors import DataError
from sparkdl.process.user_warnings import warn_user
from sparkdl.spark.forms.fields import field_of
from sparkdl.spark.forms.files import (
    FileFrame,
    FileSet,
    file_set,
    frame_of_files,
    is_exact,
    looks_like_files,
    same_names,
)
from sparkdl.spark.forms.matching import make_spec
from sparkdl.spark.forms.shipped import (
    PLACE,
    ReadColumn,
    numbered,
    places_in,
    plain_columns,
    ship_table,
)
from sparkdl.spark.forms.sources import Columns, Form, Source
from sparkdl.spark.forms.wire import GROUP, selection, wire_names
from sparkdl.spark.session.frames import column_named
from sparkdl.spark.session.running import require_running, session_of

if TYPE_CHECKING:
    from sparkdl.learner.signature import Signature


class FrameForm(Form):
    """A DataFrame of Spark whose rows end.

    Args:
        origin: The user's own frame, if ``data`` has its partitions; None: ``data``.
    """

    words: ClassVar[str] = "a DataFrame"
    has_columns: ClassVar[bool] = True

    lacking: Mapping[str, DataError] = {}
    """The errors of columns that the frame lacks, as Spark has no type for them."""
    refused: Mapping[str, DataError] = {}
    """The errors of those that it lacks for a value that Spark's type does not hold."""

    def __init__(self, data: Any, origin: Any = None) -> None:
        super().__init__(data)
        self._origin = origin

    def frame(self, spark: Any = None) -> Any:
        require_running(self.data.sparkSession)
        try:
            self.data.schema  # noqa: B018
        except (PySparkValueError, AssertionError) as error:  # of Spark 3.5, which lacks a type
            raise DataError(
                "the DataFrame has a column of a type that this PySpark lacks",
                expected="columns whose types df.schema shows", received=str(error)[:300],
                hint="cast it to a string before: spark.sql('SELECT CAST(span AS STRING) ...')",
            ) from None  # fmt: skip
        return self.data

    def open(self, signature: Signature, columns: Columns) -> Source:
        frame: Any = self.numbered()
        schema, places = frame.schema, places_in(frame)
        if places:
            schema = type(schema)([field for field in schema.fields if field.name != PLACE])
        try:
            spec = make_spec(
                schema, signature, columns.features, columns.label, columns.sample_weight,
                columns.decoder, pad=columns.pad,
            )  # fmt: skip
        except DataError as error:
            lost = {repr(name): why for name, why in {**self.lacking, **self.refused}.items()}
            raise lost.get(error.received, error) from None
        every = [name.lower() for name in schema.names]
        for name in spec.columns:
            if every.count(name.lower()) > 1 and not is_exact(frame.sparkSession):
                raise same_names("the data", ", ".join(map(repr, schema.names)))
        makes = signature.preprocessing
        if signature.needs_labels and not spec.labels and not (makes and makes.example(spec, 2).y):
            raise DataError(
                "label names no column",
                expected="a column for the loss that the model was compiled with",
                received="label=None",
                hint="label='column'; only a model compiled without a loss does without",
            )
        if columns.group is not None:
            field_of(schema, columns.group, "group")
            group = ColumnSpec((f"{GROUP}{columns.group}",), (), "int64", "scalars")
            spec = replace(spec, group=group)
        names = wire_names(len(spec.columns))
        origin = frame if self._origin is None else self._origin
        return Source(frame.select(*places, *selection(schema, spec, names)), spec, origin)

    def tell_of_lost_columns(self) -> None:
        """Warns of columns that the frame lacks.

        Raises:
            DataError: It lacks one for a value that Spark's type does not hold.
        """
        self.frame()
        for error in self.refused.values():
            raise error
        if lost := ", ".join(f"{name!r} ({e.received})" for name, e in self.lacking.items()):
            warn_user(f"Spark has no type for columns, which are left out: {lost}")

    def has_column(self, name: str) -> bool:
        return name in self.frame().schema.names or not looks_like_files(name)

    def weights_apart(self, columns: Columns) -> tuple[Form, Columns]:
        origin: Any = self.numbered()
        weight = columns.sample_weight
        names = list(weight.values()) if isinstance(weight, Mapping) else [weight]
        frame, copies = origin, dict[str, str]()
        for name in names:
            if isinstance(name, str) and origin.columns.count(name) == 1:
                copies[name] = f"{name} as sample_weight"
                frame = frame.withColumn(copies[name], column_named(name))
        if isinstance(weight, Mapping):
            weight = {output: copies.get(name, name) for output, name in weight.items()}
        elif isinstance(weight, str):
            weight = copies.get(weight, weight)
        return FrameForm(frame, origin), replace(columns, sample_weight=weight)


class StreamForm(FrameForm):
    """A streaming DataFrame: it can be predicted and fed, and not trained on in epochs."""

    endless: ClassVar[bool] = True

    def open(self, signature: Signature, columns: Columns) -> Source:
        raise DataError(
            "a stream of rows cannot be trained on or evaluated",
            expected="a DataFrame of spark.read, whose rows end",
            received="a streaming DataFrame (spark.readStream)",
            hint="spark_model.fit_stream(stream, checkpoint_dir=...) trains on each of its batches",
        )


class TableForm(FrameForm):
    """A DataFrame of pandas or polars, or an Arrow table: shipped to Spark when it is needed."""

    KINDS: ClassVar[Mapping[tuple[str, str], Callable[[Any], Iterable[tuple[str, ReadColumn]]]]] = {
        ("pandas", "DataFrame"): lambda data: (
            (str(name), partial(pa.array, column, from_pandas=True))
            for name, column in data.items()
        ),
        **dict.fromkeys(
            [("polars", "DataFrame"), ("polars", "LazyFrame")],
            lambda data: ((column.name, column.to_arrow) for column in data.lazy().collect()),
        ),
        **dict.fromkeys(
            [("pyarrow", "Table"), ("pyarrow", "RecordBatch")],
            lambda data: ((f.name, partial(data.column, i)) for i, f in enumerate(data.schema)),
        ),
    }
    """Package and class -> its columns, each with what makes an Arrow column of it."""

    def frame(self, spark: Any = None) -> Any:
        return self._shipped.drop(PLACE)

    def numbered(self, spark: Any = None) -> Any:
        return self._shipped

    def settled(self) -> Any:
        self.numbered()
        return self

    @cached_property
    def _shipped(self) -> Any:
        columns = self.KINDS[kind_of(self.data)](self.data)
        table, self.lacking, self.refused = plain_columns(columns)
        return ship_table(session_of(), numbered(table))


class PathForm(FrameForm):
    """The path of Parquet, Arrow or TFRecord files, as a text."""

    def frame(self, spark: Any = None) -> Any:
        if "_read" not in vars(self):
            spark = session_of() if spark is None else spark
            require_running(spark)
            self._read: FileFrame = frame_of_files(spark, self.data)
            self.lacking = self._read.lacking
        return self._read.frame

    def open(self, signature: Signature, columns: Columns) -> Source:
        source = super().open(signature, columns)
        narrow, names = self._read.of(source.spec.columns), wire_names(len(source.spec.columns))
        return replace(source, frame=narrow.select(*selection(narrow.schema, source.spec, names)))

    def has_column(self, name: str) -> bool:
        return name in self.frame().schema.names

    def files(self, role: int) -> FileSet:
        """The files, for workers that read them by themselves.

        Args:
            role: 0 for rows to train on, 1 for rows to validate on.

        Raises:
            NoFileSystemError: Only Spark finds them.
        """
        return file_set(self.data, self.frame(), role)


def kind_of(data: Any) -> tuple[str, str]:
    """Package and class of what a user gave."""
    return type(data).__module__.split(".")[0], type(data).__name__
