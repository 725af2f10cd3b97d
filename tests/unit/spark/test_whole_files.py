"""TFRecord files that Spark hands over whole, and files written of a partition without rows."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.data.tfrecord.encoding import encode_batch
from sparkdl.errors import DataError
from sparkdl.spark.tfrecord.files import TFRecordOptions, _Files, read_whole_files


class Frame:
    """What a DataFrame of files does, on batches of this process."""

    sparkSession = SimpleNamespace(sparkContext=SimpleNamespace(master="yarn", pythonExec="python"))

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self.batches = batches

    def select(self, *names: str) -> Frame:
        return Frame([batch.select(names) for batch in self.batches])

    def limit(self, count: int) -> Frame:
        return Frame([batch.slice(0, count) for batch in self.batches[:1]])

    def mapInArrow(self, function: Any, schema: Any) -> Frame:
        return Frame(list(function(iter(self.batches))))

    def head(self) -> dict[str, Any]:
        row: dict[str, Any] = self.batches[0].to_pylist()[0]
        return row


def session(contents: list[bytes]) -> Any:
    """A session whose source ``binaryFile`` has these files."""
    paths = [f"viewfs:/rows/{number}" for number in range(len(contents))]
    held = pa.RecordBatch.from_pydict({"path": paths, "content": pa.array(contents, pa.binary())})
    source = SimpleNamespace(load=lambda path: Frame([held]))
    return SimpleNamespace(read=SimpleNamespace(format=lambda name: source))


def test_rows_of_all_files_have_the_schema_of_the_first() -> None:
    schema = pa.schema({"x": pa.list_(pa.float32()), "y": pa.int64()})
    rows = [
        pa.RecordBatch.from_pydict({"x": [[1.0, 2.0]] * n, "y": [n] * n}, schema) for n in (3, 5)
    ]
    files = [bytes(encode_batch(batch, "Example")) for batch in rows]
    read = read_whole_files(session(files), "viewfs:/rows")
    found = [row for batch in read.batches for row in batch.to_pylist()]
    assert found == [row for batch in rows for row in batch.to_pylist()]
    with pytest.raises(DataError, match="no schema can be inferred"):
        read_whole_files(session([b""]), "viewfs:/rows")


def test_lists_of_no_rows_are_written_as_no_file() -> None:
    """As Spark 4.0 sends an empty partition: Arrow crashes where it is asked for their size."""
    nothing = pa.array([], pa.float32())
    lists = pa.Array.from_buffers(pa.list_(pa.float32()), 0, [None, None], children=[nothing])
    with ExitStack() as stack:
        files = _Files("nowhere", "1", TFRecordOptions(("nowhere",)), stack)
        files.write("", pa.RecordBatch.from_arrays([lists], ["v"]))
        assert files.names == []
