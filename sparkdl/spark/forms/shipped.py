"""Tables of the driver's process as DataFrames: through its JVM, large ones through files.

The driver's JVM holds the rows of such a frame, and has 1 GiB of memory unless it was given more.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.data.feed import size_of
from sparkdl.data.plain_arrow import plain
from sparkdl.errors import DataError, ResourceError
from sparkdl.files.temporary import TemporaryFolder
from sparkdl.launch import interrupts
from sparkdl.spark.forms.wire import no_type
from sparkdl.spark.session.running import is_connect, is_local
from sparkdl.spark.session.versions import frame_of_table, spark_fields_of, spark_schema_of

ReadColumn = Callable[[], pa.Array | pa.ChunkedArray]
"""Makes a column of Arrow's."""

PLACE = "__sparkdl_place"
"""A column of rows that the driver has, by which they are dealt: the number of each row."""
_LIMIT_BYTES = 64 << 20
"""Bytes of tables that may stay in the driver's JVM when nobody uses them any more."""
_SMALL_BYTES = 32 << 20
"""A table of this size fits in any JVM."""
_FILES_SHARE = 0.2
"""Tables above this share of the JVM's memory go through files, where executors see them."""
_JVM_SHARE = 0.8
"""Tables above this share of the JVM's memory do not fit into it beside what works on them."""
_GROUP_BYTES = 16 << 20
"""Bytes of a row group in such files: Spark's reader holds the rows of one at a time."""
_lock = threading.Lock()
_shipped_bytes = 0
"""Bytes that were shipped since this module collected garbage last."""
_folders: ContextVar[list[TemporaryFolder] | None] = ContextVar("folders", default=None)
"""Folders of the tables that the call of this thread has written; None outside of a call."""


def ship_table(spark: Any, table: pa.Table) -> Any:
    """``spark.createDataFrame(table)``; large tables go through files of this machine.

    The driver's JVM holds the rows of such a frame as long as Python has its objects. Those are
    in reference cycles (py4j's), and nothing tells Python's collector how much the JVM holds, so
    it would come too late: a fit of 94 MB of arrays, repeated in a notebook, filled the JVM's
    gigabyte after some ten times. So rows of frames that are gone are given back here.

    Files are removed at the end of the :func:`removes_tables` around the call, else at that of
    this process.

    Raises:
        ResourceError: The rows do not fit into the JVM, and there is no way around it.
    """
    size = size_of(table)
    if size > _SMALL_BYTES and not is_connect(spark):
        memory = _jvm_memory(spark)
        if size > _FILES_SHARE * memory and is_local(spark) and _fits_files(table.schema):
            return _frame_of_file(spark, table, size)
        if size > _JVM_SHARE * memory:
            raise ResourceError(
                "these rows are too large for the driver's JVM, which has to hold them",
                expected=f"at most {_JVM_SHARE * memory / 1e6:,.0f} MB, {_JVM_SHARE:.0%} of its "
                f"memory (spark.driver.memory: {memory / 1e6:,.0f} MB)",
                received=f"{size / 1e6:,.0f} MB in {table.num_rows:,} rows",
                hint="write them as Parquet files where the executors can read, and give the path "
                "('hdfs:///data/x.parquet'); or start the session with spark.driver.memory="
                f"{2 + int(2 * size / 2**30)}g",
            )
    _give_back(size)
    return frame_of_table(spark, table)


@contextlib.contextmanager
def removes_tables() -> Iterator[None]:
    """Removes at its end the files of tables that this thread ships inside.

    For calls that leave nobody with a frame of the rows.
    """
    folders: list[TemporaryFolder] = []
    outer = _folders.set(folders)
    try:
        yield
    finally:
        _folders.reset(outer)
        for folder in folders:
            folder.close()


def _give_back(new_bytes: int) -> None:
    global _shipped_bytes
    with _lock:
        full = _shipped_bytes > 0 and _shipped_bytes + new_bytes > _LIMIT_BYTES
        _shipped_bytes = new_bytes + (0 if full else _shipped_bytes)
    if full:
        gc.collect()


def _jvm_memory(spark: Any) -> int:
    with interrupts.held():
        return int(spark.sparkContext._jvm.java.lang.Runtime.getRuntime().maxMemory())


def _fits_files(schema: pa.Schema) -> bool:
    """Whether Spark reads the columns from Parquet as it takes them from Arrow."""

    def fits(kind: pa.DataType) -> bool:
        if pa.types.is_list(kind):
            return fits(kind.value_type)
        plain = (
            pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_string,
            pa.types.is_binary,
        )  # fmt: skip
        return any(is_kind(kind) for is_kind in plain)

    return all(fits(field.type) for field in schema)


def _frame_of_file(spark: Any, table: pa.Table, size: int) -> Any:
    folder = TemporaryFolder()
    of_call = _folders.get()
    if of_call is None:
        atexit.register(folder.close)
    else:
        of_call.append(folder)
    rows = max(1, _GROUP_BYTES * table.num_rows // size)
    names = table.column_names  # files cannot have all that a frame can: 'a' beside 'A'
    table = table.rename_columns([f"c{number}" for number in range(len(names))])
    try:
        pq.write_table(
            table, f"{folder.path}/rows.parquet", row_group_size=rows, compression="none",
            use_dictionary=False, write_statistics=False,
        )  # fmt: skip
    except OSError as error:
        folder.close()
        raise ResourceError(
            "rows that are too large for the driver's JVM cannot be written to this machine's disk",
            expected=f"room for {size / 1e6:,.0f} MB in {tempfile.gettempdir()}",
            received=str(error),
            hint="set TMPDIR to another folder, or start the session with spark.driver.memory="
            f"{2 + int(4 * size / 2**30)}g or more",
        ) from error
    reader = spark.read.schema(spark_schema_of(table.schema))
    return reader.parquet(f"file://{folder.path}/rows.parquet").toDF(*names)


def plain_columns(
    columns: Iterable[tuple[str, ReadColumn]],
) -> tuple[pa.Table, dict[str, DataError], dict[str, DataError]]:
    """A table of the columns that Spark can have, in its types.

    Args:
        columns: Each with a call that makes it.

    Returns:
        The table, the errors of columns without a type in Spark, and the errors of columns with a
        value that Spark's type does not hold.
    """
    found: list[pa.Array] = []
    names: list[str] = []
    lacking, refused = dict[str, DataError](), dict[str, DataError]()
    for name, read in columns:
        given = None
        try:
            given = read()
            if spark_fields_of(pa.schema([(name, given.type)])):
                found.append(plain(given))
                names.append(name)
            else:
                lacking[name] = no_type(name, str(given.type))
        except (pa.ArrowException, TypeError, ValueError) as error:
            lost = lacking if given is None else refused
            received = f"{type(error).__name__}: {str(error)[:200]}"
            lost[name] = no_type(name, received, value=given is not None)
    return pa.Table.from_arrays(found, names=names), lacking, refused


def numbered(table: pa.Table) -> pa.Table:
    """The table with a column :data:`PLACE` before its own."""
    return table.add_column(0, PLACE, pa.array(np.arange(table.num_rows)))


def places_in(frame: Any) -> list[str]:
    """:data:`PLACE`, if a frame has that column."""
    return [PLACE] if PLACE in frame.schema.names else []
