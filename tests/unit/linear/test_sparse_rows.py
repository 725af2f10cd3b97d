"""Sparse rows from Arrow's columns: what is read, what is refused, and their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.errors import DataError
from sparkdl.linear.sparse_rows import SparseRows, SparseVectors

KIND = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())),
     ("values", pa.list_(pa.float64()))]
)  # fmt: skip


def sparse(size: int, entries: dict[int, float]) -> dict[str, Any]:
    return {"type": 0, "size": size, "indices": list(entries), "values": list(entries.values())}


def dense(*values: float) -> dict[str, Any]:
    return {"type": 1, "size": None, "indices": None, "values": list(values)}


def vectors(*rows: Any) -> pa.Array:
    return pa.array(rows, KIND)


def rows_of(features: pa.Array, labels: list[Any], weights: list[Any] | None = None) -> SparseRows:
    given = None if weights is None else pa.array(weights, pa.float64())
    return SparseRows.from_arrow(features, pa.array(labels, pa.float64()), given)


def test_dense_and_sparse_vectors_are_read_alike() -> None:
    array = vectors(
        sparse(2**31 - 1, {3: 1.5, 2**31 - 2: -1.0}), dense(0.0, 2.0, 0.0, 4.0), sparse(9, {}),
        sparse(5, {0: 0.0, 4: 3.0}),
    )  # fmt: skip
    for given, first in ((array, 0), (array.slice(1, 3), 1)):
        found = SparseVectors.from_arrow(given)
        expected = [{3: 1.5, 2**31 - 2: -1.0}, {1: 2.0, 3: 4.0}, {}, {4: 3.0}][first:]
        assert found.values is not None
        read = [
            dict(zip(found.indices[a:b].tolist(), found.values[a:b].tolist(), strict=True))
            for a, b in zip(found.starts, found.starts[1:], strict=False)
        ]
        assert read == expected
        assert found.size == (2**31 - 1 if first == 0 else 9)
        assert found.indices.dtype == np.int32


def test_ones_are_not_stored() -> None:
    found = SparseVectors.from_arrow(vectors(sparse(9, {1: 1.0, 8: 1.0}), dense(0.0, 1.0)))
    assert found.values is None
    assert found.indices.tolist() == [1, 8, 1]
    assert found.dot(np.array([1.0, 2.0, 4.0])).tolist() == [3.0, 4.0]


def test_a_batch_without_any_entry_is_read() -> None:
    found = SparseVectors.from_arrow(vectors(sparse(4, {}), sparse(4, {})))
    assert found.dot(np.empty(0)).tolist() == [0.0, 0.0]
    assert len(SparseRows.joined([])) == 0


@pytest.mark.parametrize(
    ("features", "label", "weight", "what", "received"),
    [
        (sparse(9, {4: 2.0}), 2.0, 1.0, "label", "label 2 in the row with features {4: 2}; 1 such"),
        (sparse(9, {4: 2.0}), -1.0, 1.0, "label", "label -1"),
        (sparse(9, {4: 2.0}), None, 1.0, "label", "null or NaN"),
        (sparse(9, {4: 2.0}), float("nan"), 1.0, "label", "null or NaN"),
        (sparse(9, {4: 2.0}), 1.0, -0.5, "weight", "weight -0.5"),
        (sparse(9, {4: 2.0}), 1.0, float("inf"), "weight", "weight inf"),
        (sparse(9, {4: 2.0}), 1.0, None, "weight", "null or NaN"),
        (sparse(9, {i: float("nan") if i == 8 else 1.0 for i in range(9)}), 1.0, 1.0,
         "no finite number", "{0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 8: nan, ...}"),
        (dense(1.0, float("-inf")), 1.0, 1.0, "no finite number", "{0: 1, 1: -inf}"),
        (None, 1.0, 1.0, "no features", "null in 1 of 3 rows"),
        (sparse(4, {4: 1.0}), 1.0, 1.0, "malformed", "size 4"),
        ({**sparse(4, {1: 1.0}), "indices": [1, 2]}, 1.0, 1.0, "malformed", "2 indices and 1 v"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_trained_on_are_named(
    features: Any, label: Any, weight: Any, what: str, received: str
) -> None:
    good = sparse(9, {0: 1.0, 5: 0.5})
    with pytest.raises(DataError, match=what) as caught:
        rows_of(vectors(good, features, good), [0.0, label, 1.0], [1.0, weight, 1.0])
    assert received in caught.value.received


def random_rows(seed: int, count: int = 50) -> SparseRows:
    rng = np.random.default_rng(seed)
    features = [
        sparse(40, {int(i): float(rng.integers(1, 4)) for i in rng.permutation(40)[: i % 7]})
        for i in range(count)
    ]
    labels, weights = rng.integers(0, 2, count).tolist(), rng.random(count).tolist()
    return rows_of(vectors(*features), labels, weights)


def described(rows: SparseRows) -> list[Any]:
    parts = [rows.cut(at, at + 1) for at in range(len(rows))]
    return [
        (p.vectors.indices.tolist(), p.vectors.values.tolist(), *p.labels, *p.weights)  # type: ignore[union-attr, misc]
        for p in parts
    ]


def test_the_order_follows_from_the_rows_and_the_seed() -> None:
    rows = random_rows(0)
    shuffled = rows.taken(np.random.default_rng(1).permutation(len(rows)))
    first = described(rows.ordered(3))
    assert first == described(shuffled.ordered(3))
    assert first != described(rows.ordered(4))
    assert sorted(map(repr, first)) == sorted(map(repr, described(rows)))


def test_joined_rows_are_those_of_the_parts() -> None:
    rows = random_rows(2)
    parts = [rows.cut(0, 13), rows.cut(13, 13), rows.cut(13, 50)]
    assert described(SparseRows.joined(parts)) == described(rows)
    ones = rows_of(vectors(sparse(3, {2: 1.0})), [1.0])
    both = SparseRows.joined([ones, rows])
    assert described(both)[0] == ([2], [1.0], 1.0, 1.0)
    assert described(both)[1:] == described(rows)
