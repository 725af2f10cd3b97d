"""Columns of every type that Arrow has, in every form of data: what trains, and what ``predict``
passes on. The guide's table is made here (``SPARKDL_WRITE_TABLE=1``)."""

from __future__ import annotations

import datetime
import decimal
import os
import re
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from needed import needs_spark
from trained_rows import SIGNATURES, N, V, linear, trained, wanted

import sparkdl
from sparkdl.data.decode import decode
from sparkdl.errors import DataError
from sparkdl.spark.forms.opening import RowChoice, form_of, open_fit_source
from sparkdl.spark.forms.sources import Columns
from sparkdl.spark.session.versions import spark_version, table_of_frame

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "types.md"


def pairs(kind: pa.DataType) -> pa.Array:
    return pa.array([[v, v + 1.0] for v in V], kind)


def stored(kind: pa.DataType, storage: pa.Array) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, storage)


def tensors() -> pa.Array:
    storage = pa.array([[v, v + 1.0] for v in V], pa.list_(pa.float32(), 2))
    return stored(pa.fixed_shape_tensor(pa.float32(), (2,)), storage)


DAYS = [datetime.date(2020, 1, 1 + v) for v in V]
EXACT = [decimal.Decimal(25 * v).scaleb(-2) for v in V]
TYPES: dict[str, Callable[[], pa.Array]] = {
    "bool": lambda: pa.array([v % 2 == 0 for v in V]),
    "int8, and wider": lambda: pa.array(V, pa.int8()),
    "uint32, and narrower": lambda: pa.array(V, pa.uint32()),
    "uint64": lambda: pa.array(V, pa.uint64()),
    "float16": lambda: pa.array(np.array(V, np.float16)),
    "float64, float32": lambda: pa.array(V, pa.float64()),
    "decimal to 38 digits": lambda: pa.array(EXACT, pa.decimal128(38, 2)),
    "decimal of more digits": lambda: pa.array(EXACT, pa.decimal256(40, 2)),
    "string, large_string": lambda: pa.array([f"s{v}" for v in V], pa.large_string()),
    "string_view": lambda: pa.array([f"s{v}" for v in V], pa.string_view()),
    "binary": lambda: pa.array([np.float32([v, v + 1]).tobytes() for v in V]),
    "uuid": lambda: stored(pa.uuid(), pa.array([uuid.UUID(int=v).bytes for v in V], pa.binary(16))),
    "date32": lambda: pa.array(DAYS, pa.date32()),
    "date64": lambda: pa.array(DAYS, pa.date64()),
    "timestamp to microseconds": lambda: pa.array(V, pa.timestamp("us")),
    "timestamp of nanoseconds": lambda: pa.array([1000 * v for v in V], pa.timestamp("ns")),
    "time": lambda: pa.array(V, pa.time64("us")),
    "duration": lambda: pa.array(V, pa.duration("us")),
    "list, large_list": lambda: pairs(pa.large_list(pa.float32())),
    "list_view": lambda: pairs(pa.list_view(pa.float32())),
    "fixed_size_list": lambda: pairs(pa.list_(pa.float32(), 2)),
    "list of float16": lambda: pa.array(
        [np.array([v, v + 1], np.float16) for v in V], pa.list_(pa.float16())
    ),
    "list of uint64": lambda: pa.array([[v, v + 1] for v in V], pa.list_(pa.uint64())),
    "list of lists": lambda: pa.array([[[v], [v + 1.0]] for v in V]),
    "fixed_shape_tensor": tensors,
    "dictionary of numbers": lambda: pa.array(V).dictionary_encode(),
    "dictionary of strings": lambda: pa.array(["a", "b"] * 3).dictionary_encode(),
    "run_end_encoded": lambda: pc.run_end_encode(pa.array(V)),
    "struct": lambda: pa.array([{"a": v} for v in V]),
    "map": lambda: pa.array([[("a", v)] for v in V], pa.map_(pa.string(), pa.int64())),
    "month_day_nano_interval": lambda: pa.array([(1, 2, 3)] * N, pa.month_day_nano_interval()),
    "null": lambda: pa.nulls(N),
}


def table_of_types() -> dict[str, pa.Array]:
    """A column of each type that this pyarrow has."""
    found = {}
    for name, make in TYPES.items():
        try:
            found[name] = make()
        except (AttributeError, pa.ArrowNotImplementedError, TypeError):
            assert spark_version() < (4, 0), name  # the oldest packages
    return found


ABSENT = "no such type"
FORMS = ("Arrow file", "Parquet file", "Spark frame", "pandas", "polars", "Arrow table", "stream")


def width_of(array: pa.Array) -> int:
    kind = str(array.type)
    return 2 if "list" in kind or "tensor" in kind or kind == "binary" else 1


def values_of(array: pa.Array) -> np.ndarray:
    """What is trained on where a type trains."""
    given = [[v, v + 1] for v in V] if width_of(array) == 2 else V
    if pa.types.is_boolean(array.type):
        given = [v % 2 == 0 for v in V]
    if pa.types.is_decimal(array.type):
        given = [v / 4 for v in V]
    return np.array(given, np.float32).reshape(N, -1)


def write_type(array: pa.Array, path: str) -> None:
    # "flag" is a column that is used beside one that is not
    table = pa.table({"id": V, "flag": [v % 2 == 0 for v in V], "c": array})
    if path.endswith(".parquet"):
        pq.write_table(table, path)
        return
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def of_file(folder: Path, ending: str) -> Iterator[str]:
    """The cells of files by path, of which each holds one column."""
    for number, array in enumerate(ARRAYS.values()):
        path = f"{folder}/{number}.{ending}"
        try:
            write_type(array, path)
        except pa.ArrowNotImplementedError:
            yield ABSENT
            continue
        np.testing.assert_array_equal(trained(path, "flag"), wanted("flag"))  # c is not looked at
        try:
            rows = trained(path, "c", width=width_of(array))
        except DataError as error:  # the library's, before a job
            used = "error" if "'c'" in error.what else f"error without the column's name: {error}"
        else:
            np.testing.assert_array_equal(rows, values_of(array))
            used = "trains"
        frame = form_of(path).frame()
        if "c" not in frame.columns:
            yield f"{used}, left out"
            continue
        passed = frame.sort("id").select("c").collect()
        assert len(passed) == N
        yield f"{used}, `{frame.schema['c'].dataType.simpleString()}`"


def of_frame(data: Any, passed: Any) -> Iterator[str]:
    """The cells of data that hold all columns.

    Args:
        data: For ``fit``.
        passed: The rows that ``predict`` gives, as a frame.
    """
    form, rows = form_of(data), table_of_frame(passed).sort_by("id")
    assert rows.num_rows == N
    for name, array in ARRAYS.items():
        signature = SIGNATURES[width_of(array)]
        try:
            source = open_fit_source(form, RowChoice(signature, Columns(name, "id"), None, 0.0, 0))
            (batch,) = rows.select(source.spec.columns).combine_chunks().to_batches()
            values = next(iter(decode(batch, source.spec).x.values()))
        except DataError as error:
            if "is not in the data" in error.what:
                yield ABSENT
                continue
            used = "error" if repr(name) in error.what else f"error without the name: {error}"
        else:
            np.testing.assert_array_equal(values, values_of(array), err_msg=name)
            used = "trains"
        if name in passed.columns:
            yield f"{used}, `{passed.schema[name].dataType.simpleString()}`"
        else:
            yield f"{used}, left out"


def converted(convert: Callable[[pa.Array], Any]) -> dict[str, Any]:
    """The columns that another library has."""
    found = {}
    for name, array in {
        "id": pa.array(V),
        "flag": pa.array([v % 2 == 0 for v in V]),
        **ARRAYS,
    }.items():
        try:
            found[name] = convert(array)
        except (Exception, pl.exceptions.PanicException):
            if name not in ARRAYS:
                raise
    return found


def frames_of(spark: Any, folder: Path) -> dict[str, Any]:
    """All columns in one frame, as each form has them."""
    table = pa.table(converted(lambda array: array))
    path = f"{folder}/all.arrow"
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    frame = form_of(path).frame().cache()
    unwritten = [f.name for f in frame.schema if f.dataType.simpleString() in ("void", "time(6)")]
    written = frame.drop(*unwritten).coalesce(1)
    written.write.parquet(f"{folder}/spark")
    return {
        "Spark frame": frame,
        "pandas": pd.DataFrame(converted(lambda array: array.to_pandas())),
        "polars": pl.DataFrame(converted(lambda array: pl.from_arrow(array))),
        "Arrow table": table,
        "stream": spark.readStream.schema(written.schema).parquet(f"{folder}/spark"),
    }


ARRAYS = table_of_types()


@pytest.fixture(scope="module")
def found(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The cells of each type, in the order of ``FORMS``."""
    folder = tmp_path_factory.mktemp("types")
    columns = [list(of_file(folder, "arrow")), list(of_file(folder, "parquet"))]
    for kind, data in frames_of(spark, folder).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of columns that are left out
            passed = sparkdl.predict(linear(1), data, features="flag")
        if kind == "stream":  # fit_stream trains on each of its batches
            query = passed.writeStream.format("memory").queryName("types_passed").start()
            query.processAllAvailable()
            query.stop()
            passed = data = spark.table("types_passed")
        columns.append(list(of_frame(data, passed)))
    return dict(zip(ARRAYS, map(list, zip(*columns, strict=True)), strict=True))


def lines_of(found: dict[str, list[str]]) -> list[str]:
    return [f"| {name} | {' | '.join(cells)} |" for name, cells in found.items()]


def table_in(of: str, lines: list[str]) -> list[str]:
    """The lines that the guide has; ``SPARKDL_WRITE_TABLE=1`` puts these there first."""
    begin = f"<!-- {of}: made by tests/spark/files/test_column_types.py -->\n"
    place = re.compile(f"({re.escape(begin)}).*?(\n<!-- end -->)", re.DOTALL)
    text = GUIDE.read_text()
    header = [f"| type | {' | '.join(FORMS)} |", "|---" * (1 + len(FORMS)) + "|"]
    if os.environ.get("SPARKDL_WRITE_TABLE") and lines:
        table = "\n".join(header + lines)
        text = place.sub(lambda m: f"{m[1]}\n{table}\n{m[2]}", text)
        GUIDE.write_text(text)
    match = place.search(text)
    assert match is not None
    assert match[0].splitlines()[2:4] == header
    return match[0].splitlines()[4:-2]


def test_every_type_trains_or_says_why_and_is_not_looked_at_where_it_is_not_used(
    found: dict[str, list[str]],
) -> None:
    """Where one is used that does not train, the error names it."""
    assert len(found) > 20
    assert not [cell for cells in found.values() for cell in cells if "without" in cell]


@needs_spark(4, 1, "the guide's table is that of the newest Spark")
def test_the_guides_table_is_what_was_found(found: dict[str, list[str]]) -> None:
    assert table_in("PySpark 4.3", lines_of(found)) == lines_of(found)


@pytest.mark.skipif(spark_version() >= (4, 0), reason="the guide has what is other on Spark 3.5")
def test_the_guide_has_what_is_other_with_the_oldest_packages(found: dict[str, list[str]]) -> None:
    """Types that they lack are no rows of it."""
    newest = table_in("PySpark 4.3", [])
    other = [line for line in lines_of(found) if line not in newest]
    assert table_in("PySpark 3.5", other) == other


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_permuted_tensors_have_their_logical_order_on_every_way(
    spark: Any, tmp_path: Path, ending: str
) -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 2), permutation=[1, 0])
    storage = pa.array([[v, v + 1.0, v + 2, v + 3] for v in V], pa.list_(pa.float32(), 4))
    path = f"{tmp_path}/a.{ending}"
    write_type(stored(kind, storage), path)
    logical = [[v, v + 2.0, v + 1, v + 3] for v in V]
    np.testing.assert_array_equal(trained(path, "c", width=4), logical)
    assert [row.c for row in form_of(path).frame().sort("id").collect()] == logical


def test_hashes_of_64_bits_train_and_pass_in_every_form(spark: Any, tmp_path: Path) -> None:
    hashes = [2**63, 2**64 - 2**41, 5, 2**63 + 2**40, 1, 0]
    table = pa.table({"id": V, "c": pa.array(hashes, pa.uint64())})
    forms: list[Any] = [table, table.to_pandas(), pl.from_arrow(table)]
    for ending in ("arrow", "parquet"):
        path = f"{tmp_path}/a.{ending}"
        write_type(table["c"].combine_chunks(), path)
        np.testing.assert_array_equal(trained(path, "c"), np.array([hashes], np.float32).T)
        forms.append(path)
    for form in map(form_of, forms):
        columns = Columns("c", "id")
        frame = open_fit_source(form, RowChoice(SIGNATURES[1], columns, None, 0.0, 0)).frame
        assert sorted(row.c0 for row in frame.collect()) == sorted(hashes)


def test_a_value_that_sparks_type_does_not_hold_ends_predict_alone(spark: Any) -> None:
    """And a fit that uses it."""
    table = pa.table({"id": V, "odd": pa.array(V, pa.timestamp("ns"))})
    frame = pl.from_arrow(table)
    for data in (table, frame):
        source = open_fit_source(data, RowChoice(SIGNATURES[1], Columns("id", "id"), None, 0.0, 0))
        assert source.frame.count() == N
        for call in (
            lambda data=data: sparkdl.predict(linear(1), data, features="id"),
            lambda data=data: form_of(data).open(SIGNATURES[1], Columns("odd", "id")),
        ):
            with pytest.raises(DataError, match="'odd' holds a value"):
                call()
