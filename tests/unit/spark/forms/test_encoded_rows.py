"""Rows as Arrow streams for a broadcast: nothing beyond the limit is computed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pyarrow as pa

from sparkdl.spark.forms.shared_rows import batches_of, encode

BATCH = pa.RecordBatch.from_pydict({"x": pa.array(range(1000), pa.int64())})


def counted(seen: list[int]) -> Iterator[pa.RecordBatch]:
    for number in range(4):
        seen.append(number)
        yield BATCH


def test_what_is_encoded_is_read_in_its_order() -> None:
    encoded = [row.to_pylist()[0] for row in encode(counted([]), 1 << 20)]
    assert [row["number"] for row in encoded] == [0, 1, 2, 3]
    assert all(row["size"] == len(row["content"]) > 8000 for row in encoded)
    content = SimpleNamespace(value=[row["content"] for row in encoded])
    assert list(batches_of(content)) == [BATCH] * 4


def test_a_partition_beyond_the_limit_is_given_up() -> None:
    seen: list[int] = []
    encoded = [row.to_pylist()[0] for row in encode(counted(seen), 10_000)]
    assert seen == [0, 1]
    assert [row["content"] != b"" for row in encoded] == [True, False]
    assert sum(row["size"] for row in encoded) > 10_000
