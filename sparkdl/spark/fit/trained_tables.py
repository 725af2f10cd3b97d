"""``TrainedTable``: the rows that a fit has written, read and changed by Spark's tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.errors import ConfigError, DataError
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.task import RankContext, Result, ReturningTask
from sparkdl.settings.values import require_int
from sparkdl.spark.fit.trained_model import TrainedModel
from sparkdl.spark.runs.launcher import run_on_partitions
from sparkdl.spark.session.frames import require_frame
from sparkdl.spark.session.running import session_of
from sparkdl.spark.session.versions import frame_of_table, map_in_arrow
from sparkdl.tables.checkpoints import TableCheckpoints, TableReference
from sparkdl.tables.files import TableFiles, TableReader, load_rows, write_part
from sparkdl.tables.functions import RowFunction, Statistics, TableFunction
from sparkdl.tables.hashing import signed
from sparkdl.tables.index import owner
from sparkdl.tables.store import RowStore, TableRows
from sparkdl.weights import FloatArray

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_NUMBERS = re.compile(rf"array<({'|'.join(_INTEGERS)}|float|double|decimal\(.*\))>")

_Change = Callable[[RowStore, "_Rows"], int]
"""Changes the rows of a part; returns how many."""
_Rows = list[tuple[npt.NDArray[np.int64], FloatArray]]


class TrainedTable(TableReader):
    """A table that a fit has written. Spark's tasks read it, and change it part by part.

    What is read is as it was when this object was made, or when a change by it has ended. A change
    begins from the present tables of the model, and takes their place when it is whole; changes
    from several threads wait for each other.

    Args:
        folder: A path or URI.
        of: The model whose table it is; None: a table to be read alone.
    """

    def __init__(self, folder: str, of: TrainedModel | None = None) -> None:
        super().__init__(folder)
        self._of = of

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainedTable, (self.folder,)

    def to_dataframe(self, since: int | None = None) -> DataFrame:
        """The rows as a DataFrame, which executors read from the files, part by part.

        Args:
            since: Only rows that had a gradient after that step (an earlier :attr:`step`): what a
                server of predictions needs that has the rows of that step. None: all rows.

        Returns:
            Columns ``id`` (bigint) and ``row`` (array of ``dim`` floats); of a table that counts
            its ids also ``seen`` (how often the id was) and ``step`` (of its last gradient). Its
            partitions are those of the fit's workers.

        Raises:
            ConfigError: ``since`` is given, and the table does not track its rows.
            ResourceError: No Spark session is running. In the tasks: the files are not whole, or
                not to be seen there.
        """
        if since is not None:
            self._require_tracking("to_dataframe(since=...)")
            require_int("since", since, least=0)
        kinds = "id bigint, row array<float>" + (", seen bigint, step bigint" * self.counts)
        read = partial(_read, self.folder, self.parts, since)
        return map_in_arrow(_numbers(self.parts), read, kinds)

    def load(self, data: DataFrame | npt.ArrayLike, rows: npt.ArrayLike | None = None) -> None:
        """Sets rows, those of ids that the table has and new ones, past any entry filter.

        The table is written anew, by a task for each part; the model reads it from then on, and the
        next fit goes on from it. The optimizer's state of these rows begins again.

        Args:
            data: A DataFrame with the columns ``id`` (integers) and ``row`` (arrays of ``dim``
                numbers), or the ids, of shape ``(n,)``.
            rows: Rows of the ids, of shape ``(n, dim)``; None with a DataFrame.

        Raises:
            DataError: The columns or shapes are others; an id is there twice, or has no row; a
                number is not finite.
            ConfigError: The table is none of a driver's model, or ``data`` is neither; a fit of the
                model runs, or another process has changed or trained the tables meanwhile.
            ResourceError: No Spark session is running, or the files cannot be read or written.
        """
        of, dim = self._changeable(), self.dim
        if rows is None:
            require_frame("the rows of a table, without an array of rows,", data)
            frame: Any = data
            _require_columns(frame, dim)
        else:
            frame = _frame_of(data, rows, dim)

        def put(store: RowStore, found: _Rows) -> int:
            ids = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in found)])
            store.load(
                ids, np.concatenate([np.zeros((0, dim), np.float32), *(r for _, r in found)])
            )
            return len(ids)

        from pyspark.sql import functions as F

        chosen = frame.select(
            F.col("id").cast("bigint").alias("id"), F.col("row").cast("array<float>").alias("row")
        )

        def spread(parts: int) -> DataFrame:
            owning = partial(_owned, parts)
            owned = map_in_arrow(chosen, owning, "part int, id bigint, row array<float>")
            return owned.union(_marks(frame.sparkSession, parts)).repartition(parts, "part")

        self._change(of, spread, put)

    def shrink(self, *, unseen: int | None = None, below: int | None = None) -> int:
        """Removes rows; the table is written anew, as by :meth:`load`.

        Args:
            unseen: Rows without a gradient for more steps than that go.
            below: Rows whose ids were seen fewer times go.

        Returns:
            How many rows left.

        Raises:
            ConfigError: The table does not track its rows, is none of a driver's model, or neither
                argument is given.
            ResourceError: No Spark session is running, or the files cannot be read or written.
        """
        of = self._changeable()
        self._require_tracking("shrink")
        if unseen is None and below is None:
            raise ConfigError(
                f"table {self.name!r}: nothing says which rows are to leave",
                expected="unseen=..., below=... or both", received="neither",
            )  # fmt: skip
        for name, value in (("unseen", unseen), ("below", below)):
            if value is not None:
                require_int(name, value, least=1)
        return self._change(
            of, _every_part, lambda store, _: store.shrink(unseen=unseen, below=below)
        )

    def get(self, function: str | RowFunction) -> float | npt.NDArray[np.float64]:
        """A number about all rows, which Spark's tasks compute part by part, where they read them.

        Args:
            function: ``'nrm2'`` (the root of the sum of squares), ``'sum'``, ``'asum'``,
                ``'amax'``, ``'max'``, ``'min'``, ``'nnz'`` (numbers that are not zero) or
                ``'size'`` (rows); or a function of a module that is installed on all hosts. It gets
                the ids of some rows, of shape ``(n,)``, and the rows, ``(n, dim)``; what it returns
                of all of them (a number, or an array of one shape) is added up.

        Raises:
            UnknownNameError: There is no such number.
            ConfigError: Other processes cannot import the function by its name.
            ResourceError: No Spark session is running, or the files cannot be read.

        Reference: psFunc of Angel (Tencent, 2017).
        """
        if isinstance(function, str):
            Statistics().get(function)
        asked = None if isinstance(function, str) else TableFunction.of(function)
        task = MeasureTask(self.folder, self.parts, asked)
        results = run_on_partitions(_numbers(self.parts), task, "measure a table")
        found = [json.loads(result.text) for result in results]
        if isinstance(function, str):
            every = Statistics()
            for part in found:
                every = every.joined(Statistics(**part))
            return every.get(function)
        total = np.sum([np.asarray(part, np.float64) for part in found], axis=0)
        return float(total) if np.ndim(total) == 0 else np.asarray(total)

    def update(self, function: str | RowFunction, *numbers: float) -> int:
        """Changes all rows; the table is written anew, as by :meth:`load`.

        ::

            table.update('multiply', .5)
            table.update('clip', -1, 1)
            table.update(my_package.rows.normalized)

        Args:
            function: ``'abs'``, ``'add'``, ``'clip'``, ``'divide'``, ``'exp'``, ``'fill'``,
                ``'log'``, ``'multiply'``, ``'negative'``, ``'power'``, ``'sqrt'`` or ``'square'``,
                as in NumPy; or a function of a module that is installed on all hosts. It gets the
                ids of some rows, of shape ``(n,)``, and the rows, ``(n, dim)``, and returns new
                rows.
            *numbers: Numbers of a change by name: one, for ``'clip'`` two.

        Returns:
            How many rows the table has. The optimizer's state of the rows stays.

        Raises:
            UnknownNameError: No change has that name.
            ConfigError: It takes other numbers, other processes cannot import the function, or the
                table is none of a driver's model.
            DataError: The function returns another shape, or numbers that are not finite.
            ResourceError: No Spark session is running, or the files cannot be read or written.

        Reference: psFunc of Angel (Tencent, 2017).
        """
        of, asked = self._changeable(), TableFunction.of(function, numbers)
        return self._change(of, _every_part, lambda store, _: store.apply(asked))

    def _change(self, of: TrainedModel, spread: Callable[[int], DataFrame], change: _Change) -> int:
        """Changes the model's present table; ``spread`` gives its parts their rows."""
        with of.changing_tables() as former:
            checkpoints = TableCheckpoints.of(former)
            checkpoints.require_newest(former)
            ranks = TableFiles(former.folder_of(self.name)).ranks
            changed = checkpoints.changed(former)
            task = ChangeTask(former, changed, self.name, self.dim, ranks, change)
            try:
                results = run_on_partitions(spread(ranks), task, "change a table")
                checkpoints.finish(changed, ranks, former.to_bytes())
            except BaseException:
                checkpoints.delete(changed)
                raise
            of.take_tables(changed)
        super().__init__(changed.folder_of(self.name))
        return sum(int(result.text) for result in results)

    def _changeable(self) -> TrainedModel:
        if self._of is None:
            raise ConfigError(
                f"table {self.name!r} can be read here, and not be changed",
                expected="a table of spark_model.tables on the driver", received="a copy of it",
            )  # fmt: skip
        return self._of

    def _require_tracking(self, what: str) -> None:
        if not self.counts:
            raise ConfigError(
                f"table {self.name!r} does not know when its rows changed, which {what} needs",
                expected="a layer that tracks its rows: ServedEmbedding(..., tracks=True), "
                "max_rows=... or expire_after=...",
                received="tracks=False",
            )


def stored_tables(of: TrainedModel) -> Mapping[str, TrainedTable]:
    """Table name -> the rows that a fit of a model has written; empty where there are none."""
    stored = of.stored_rows
    if stored is None:
        return {}
    return {name: TrainedTable(table.folder, of) for name, table in stored.tables.items()}


def _every_part(parts: int) -> DataFrame:
    return _marks(session_of(), parts).repartition(parts, "part")


def _numbers(parts: int) -> DataFrame:
    """The numbers of the parts, each in a partition of its own."""
    return session_of().range(0, parts, 1, max(1, parts))


def _marks(spark: SparkSession, parts: int) -> DataFrame:
    """A row for each part, which says that it is to be written."""
    return spark.range(0, parts, 1, 1).selectExpr(
        "cast(id as int) as part", "cast(null as bigint) as id", "cast(null as array<float>) as row"
    )


def _read(
    folder: str, parts: int, since: int | None, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    files = TableFiles(folder)
    for batch in batches:
        for number in batch.column(0).to_pylist():
            for rows in files.blocks(number, parts):
                found = _batch_of(rows)
                if since is not None:
                    found = found.filter(pa.array(np.asarray(rows.clocks) > since))
                yield found


class _TableTask(ReturningTask):
    """Work on the parts of a table, which needs no devices."""

    @property
    def devices(self) -> DeviceRequest:
        return DeviceRequest(None, unscheduled=True)


@dataclass(frozen=True)
class MeasureTask(_TableTask):
    """What a function makes of each part; None: its statistics."""

    folder: str
    parts: int
    function: TableFunction | None

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The numbers of each part whose number comes; none of a part without rows."""
        files = TableFiles(self.folder)
        for number in (n for batch in batches for n in batch.column(0).to_pylist()):
            blocks = files.blocks(number, self.parts)
            if self.function is None:
                every = Statistics()
                for rows in blocks:
                    every = every.joined(Statistics.of(rows.values))
                yield from Result(number, "measured", json.dumps(asdict(every))).batches()
            elif found := [self.function.measure(rows.ids, rows.values) for rows in blocks]:
                told = json.dumps(np.sum(found, axis=0).tolist())
                yield from Result(number, "measured", told).batches()


def _batch_of(rows: TableRows) -> pa.RecordBatch:
    columns = {"id": pa.array(rows.ids), "row": _lists(rows.values)}
    if rows.counts is not None and rows.clocks is not None:
        columns["seen"] = pa.array(rows.counts.astype(np.int64))
        columns["step"] = pa.array(rows.clocks.astype(np.int64))
    return pa.RecordBatch.from_pydict(columns)


def _lists(rows: FloatArray) -> pa.ListArray:
    count, dim = rows.shape
    ends = np.arange(0, (count + 1) * dim, dim, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(rows.reshape(-1)))


def _owned(parts: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        ids = batch.column(0)
        part = owner(np.asarray(ids.fill_null(0), np.int64), parts).astype(np.int32)
        part = pa.array(np.where(np.asarray(ids.is_null()), np.int32(-1), part))
        yield pa.RecordBatch.from_arrays([part, ids, batch.column(1)], ["part", "id", "row"])


@dataclass(frozen=True)
class ChangeTask(_TableTask):
    """Writes the parts of all tables anew, those of one table changed."""

    former: TableReference
    changed: TableReference
    table: str
    dim: int
    parts: int
    change: _Change

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """How many rows of each part were changed."""
        marks, found = _sorted(batches, self.table, self.dim)
        for part in marks:
            for name in self.changed.tables:
                former = self.former.folder_of(name)
                store = RowStore.from_settings(TableFiles(former).settings)
                load_rows(store, former, part, self.parts)
                if name == self.table:
                    count = self.change(store, found.pop(part, []))
                    yield from Result(part, "changed", str(count)).batches()
                write_part(store, self.changed.folder_of(name), part, self.parts)


def _sorted(
    batches: Iterator[pa.RecordBatch], table: str, dim: int
) -> tuple[list[int], dict[int, _Rows]]:
    """The parts that are to be written, and their new rows."""
    marks: list[int] = []
    found: dict[int, _Rows] = {}
    for batch in batches:
        part, ids, rows = batch.columns
        parts, none = np.asarray(part), np.asarray(ids.is_null())
        if (none != np.asarray(rows.is_null())).any() or (parts < 0).any():
            raise _bad(table, "an id with a row in each line", "a null")
        marks += parts[none].tolist()
        there = pa.array(~none)
        ids, lists = np.asarray(ids.filter(there), np.int64), rows.filter(there)
        values = np.asarray(lists.flatten().fill_null(np.nan), np.float32)
        lengths = set(np.asarray(lists.value_lengths()).tolist()) - {dim}
        if lengths:
            raise _bad(table, f"rows of {dim} numbers", f"one of {min(lengths)}")
        if not np.isfinite(values).all():
            raise _bad(table, "finite numbers", "a null, NaN or infinity")
        values = values.reshape(len(ids), dim)
        for number in np.unique(parts[~none]).tolist():
            own = parts[~none] == number
            found.setdefault(number, []).append((ids[own], values[own]))
    return marks, found


def _bad(table: str, expected: str, received: str) -> DataError:
    return DataError(
        f"these rows cannot be those of table {table!r}", expected=expected, received=received
    )


def _frame_of(ids: object, rows: npt.ArrayLike, dim: int) -> DataFrame:
    given, values = np.asarray(ids), np.asarray(rows, np.float32)
    if given.ndim != 1 or given.dtype.kind not in "iu" or values.shape != (len(given), dim):
        raise DataError(
            "these ids and rows are none of the table",
            expected=f"ids of shape (n,) (integers) and rows of shape (n, {dim})",
            received=f"{given.dtype} {given.shape} and {values.dtype} {values.shape}",
        )
    table = pa.table({"id": pa.array(signed(given)), "row": _lists(values)})
    return frame_of_table(session_of(), table)


def _require_columns(frame: DataFrame, dim: int) -> None:
    kinds = dict(frame.dtypes)
    arrays = _NUMBERS.fullmatch(str(kinds.get("row")))
    if kinds.keys() != {"id", "row"} or kinds["id"] not in _INTEGERS or not arrays:
        raise DataError(
            "these columns are not rows of a table",
            expected=f"id (bigint) and row (an array of {dim} floats)",
            received=", ".join(f"{name} ({kind})" for name, kind in kinds.items()),
            hint="df.select('id', 'row')",
        )
