"""Rows as Arrow streams for a broadcast: nothing beyond the limit is computed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pyarrow as pa

from sparkdl.spark.forms.shared_rows import HeldOutRows, batches_of, encode

BATCH = pa.RecordBatch.from_pydict({"x": pa.array(range(1000), pa.int64())})


def counted(seen: list[int]) -> Iterator[pa.RecordBatch]:
    for number in range(4):
        seen.append(number)
        yield BATCH


def test_what_is_encoded_is_read_in_its_order() -> None:
    batches = [BATCH.slice(number) for number in range(4)]
    encoded = [row.to_pylist()[0] for row in encode(iter(batches), 1 << 20)]
    assert all(row["size"] == len(row["content"]) > 8000 for row in encoded)
    content = SimpleNamespace(value=[row["content"] for row in encoded])
    assert list(batches_of(content)) == batches


def test_the_ranks_share_the_rows_to_validate_on_behind_their_own() -> None:
    content = [row.to_pylist()[0]["content"] for row in encode(counted([]), 1 << 20)]
    held_out = HeldOutRows(SimpleNamespace(value=content))
    own = BATCH.slice(0, 5)
    taken = [list(held_out.given(iter([own]), rank, 3)) for rank in range(3)]
    assert all(parts[0] == own for parts in taken)
    for number in range(4):
        shares = [parts[1 + number].to_pydict()["x"] for parts in taken]
        assert [row for share in shares for row in share] == list(range(1000))
        assert [len(share) for share in shares] == [333, 333, 334]


def test_a_partition_beyond_the_limit_is_given_up() -> None:
    seen: list[int] = []
    encoded = [row.to_pylist()[0] for row in encode(counted(seen), 10_000)]
    assert seen == [0, 1]
    assert [row["content"] != b"" for row in encoded] == [True, False]
    assert sum(row["size"] for row in encoded) > 10_000
