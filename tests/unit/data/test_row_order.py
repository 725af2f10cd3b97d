"""The order of rows by their content: the same whatever the order in which they came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.data import Batches, rows_from_numpy
from sparkdl.data.columns import Ragged
from sparkdl.data.rows import content_order


def values_of(column: Any) -> list[bytes]:
    if isinstance(column, Ragged):
        return [column.slice(i, i + 1).values.tobytes() for i in range(len(column))]
    return [row.tobytes() for row in column]


def check(columns: list[Any], num_rows: int) -> None:
    """The rows in content order are the same for three orders of arrival."""
    found = []
    for seed in range(3):
        arrival = np.random.default_rng(seed).permutation(num_rows)
        came = [c.take(arrival) if isinstance(c, Ragged) else c[arrival] for c in columns]
        order = content_order(came, num_rows)
        assert sorted(order) == list(range(num_rows))
        taken = [c.take(order) if isinstance(c, Ragged) else c[order] for c in came]
        found.append(list(zip(*(values_of(c) for c in taken), strict=True)))
    assert found[0] == found[1] == found[2]


GENERATOR = np.random.default_rng(5)


@pytest.mark.parametrize(
    "column",
    [
        GENERATOR.normal(size=(300, 7)).astype("float32"),
        GENERATOR.normal(size=(300, 4)),
        GENERATOR.integers(0, 255, (300, 5, 3)).astype("uint8"),
        GENERATOR.integers(0, 3, (300, 2)).astype("int32"),
        GENERATOR.integers(0, 2, 300).astype("bool"),
        GENERATOR.integers(0, 9, 300).astype("int16"),
        np.sign(GENERATOR.normal(size=(300, 6))).astype("float32"),
        np.zeros((300, 3), "float16"),
        np.zeros((300, 0), "float32"),
    ],
    ids=lambda c: f"{c.dtype}{c.shape[1:]}",
)
def test_arrays(column: Any) -> None:
    check([column], 300)
    check([column, GENERATOR.integers(0, 4, 300).astype("int32")], 300)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_rows_of_different_length(dtype: str, shape: tuple[int, ...]) -> None:
    lengths = GENERATOR.integers(0, 9, 200)
    values = GENERATOR.integers(0, 3, (int(lengths.sum()), *shape)).astype(dtype)
    check([Ragged(values, lengths)], 200)
    check([np.zeros((200, 2), "float32"), Ragged(values, lengths)], 200)


def test_no_rows_and_one() -> None:
    for rows in (0, 1):
        assert list(content_order([np.ones((rows, 3))], rows)) == list(range(rows))
        ragged = Ragged(np.empty(0, np.uint8), np.zeros(rows, np.int64))
        assert list(content_order([ragged], rows)) == list(range(rows))


def test_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkdl.data.rows._CHUNK_WORDS", 8)
    monkeypatch.setattr("sparkdl.data.rows._TAKEN_BYTES", 10)
    lengths = GENERATOR.integers(0, 9, 200)
    values = GENERATOR.integers(0, 3, int(lengths.sum())).astype("uint8")
    few = GENERATOR.integers(0, 3, (200, 3)).astype("uint8")
    check([few, Ragged(values, lengths)], 200)
    check([few], 200)


def test_all_sixteen_bits_of_signs_are_told_apart() -> None:
    """Sums of words in which only the highest bit differs are equal: the second key decides."""
    signs = 1 - 2 * ((np.arange(1 << 12)[:, None] >> np.arange(12)) & 1)
    check([signs.astype("float32")], 1 << 12)


@pytest.mark.parametrize(("shuffle", "steps"), [(True, None), (False, None), (True, 3)])
def test_batches_of_rows_that_came_in_another_order_are_equal(
    shuffle: bool, steps: int | None
) -> None:
    x = GENERATOR.integers(0, 4, (50, 3)).astype("float32")
    found = []
    for seed in range(3):
        came = x[np.random.default_rng(seed).permutation(50)]
        rows = rows_from_numpy(came, came.sum(axis=1))
        rows.find_order()
        batches = Batches(
            rows, 8, shuffle=shuffle, seed=7, steps=steps, repeat=True, by_content=True
        )
        found.append([s.x["features"].tobytes() for e in (0, 1) for s in batches.stacks(e, 2, e)])
    assert found[0] == found[1] == found[2]


def test_rows_that_are_not_asked_for_their_content_come_as_they_are() -> None:
    x = GENERATOR.normal(size=(20, 3)).astype("float32")
    rows = rows_from_numpy(x, x[:, 0])
    rows.find_order()
    [stack] = Batches(rows, 20, shuffle=False).stacks(0, 1)
    np.testing.assert_array_equal(stack.x["features"][0], x)
