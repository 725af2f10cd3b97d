"""RowIndex against a dict: any 64-bit number is an id, slots are reused, nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.tables.hashing import ids_of_texts, mix64
from sparkdl.tables.index import RowIndex, hash_range, owner, segments

LOWEST, HIGHEST = -(2**63), 2**63 - 1
SPARK_IDS = {
    "": -7444071767201028348,
    "a": -8582455328737087284,
    "ABC": 4105715581806190027,
    "über": 2643675957659961414,
    "user 7": 1593383309472475067,
    "abcdefgh": 2470326616177429180,
    "abcdefghijkl": 3897903351825168219,
    "0123456789" * 3 + "01": -7360845206938539012,
    "0123456789" * 3 + "012345": 2973810521890823202,
    "0123456789" * 8 + "abc": 2166121705207452292,
    "x" * 99: -638994430671845708,
}


def as_ids(ids: object) -> np.ndarray:
    return np.array(ids, np.int64).reshape(-1)


def same_as(index: RowIndex, expected: dict[int, int]) -> None:
    ids = as_ids(list(expected))
    assert index.find(ids).tolist() == list(expected.values())
    assert len(index) == len(expected)
    assert sorted(index.live().tolist()) == sorted(expected.values())
    assert sorted(index.ids(index.live()).tolist()) == sorted(expected)


def test_the_lowest_and_the_highest_number_are_ids() -> None:
    index = RowIndex()
    ids = as_ids([LOWEST, HIGHEST, 0, -1])
    assert index.find(ids).tolist() == [-1] * 4
    assert index.add(ids).tolist() == [0, 1, 2, 3]
    assert index.find(ids[::-1]).tolist() == [3, 2, 1, 0]
    index.remove(as_ids([LOWEST]))
    assert index.find(ids).tolist() == [-1, 1, 2, 3]


def test_200_random_steps_equal_those_of_a_dict() -> None:
    rng = np.random.default_rng(0)
    index, expected = RowIndex(), dict[int, int]()
    for _ in range(200):
        ids = np.unique(rng.integers(-400, 400, rng.integers(1, 200)))
        if rng.random() < 0.4:
            index.remove(ids)
            for gone in ids.tolist():
                expected.pop(gone, None)
        else:
            slots = index.add(ids).tolist()
            for new, slot in zip(ids.tolist(), slots, strict=True):
                assert expected.setdefault(new, slot) == slot
            assert len({*expected.values()}) == len(expected)
        same_as(index, expected)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.booleans(), st.sets(st.integers(LOWEST, HIGHEST) | st.integers(-5, 5), max_size=90)
        ),
        max_size=12,
    )
)
def test_any_ids_in_any_order_equal_a_dict(steps: list[tuple[bool, set[int]]]) -> None:
    index, expected = RowIndex(), dict[int, int]()
    for adds, some in steps:
        ids = as_ids(sorted(some))
        if adds:
            expected |= dict(zip(ids.tolist(), index.add(ids).tolist(), strict=True))
        else:
            index.remove(ids)
            expected = {i: s for i, s in expected.items() if i not in some}
        same_as(index, expected)


def test_a_million_ids_that_collide_are_all_found() -> None:
    ids = np.arange(-500_000, 500_000) * 4096
    index = RowIndex()
    slots = index.add(ids)
    assert (index.find(ids) == slots).all()
    assert np.unique(slots).size == ids.size
    assert index.nbytes <= 19 * ids.size


def test_room_is_made_before_ids_come_and_while_some_are_there() -> None:
    index = RowIndex()
    index.reserve(100_000)
    before = index.nbytes
    first = index.add(np.arange(100_000))
    assert index.nbytes == before
    index.reserve(300_000)
    assert (index.find(np.arange(100_000)) == first).all()
    index.reserve(10)
    assert (index.add(np.arange(-200_000, 0)) == np.arange(100_000, 300_000)).all()


def test_compacting_keeps_ids_and_tells_their_slots_before() -> None:
    index, ids = RowIndex(), np.arange(10)
    index.add(ids)
    index.remove(ids[::2])
    assert index.compact().tolist() == [1, 3, 5, 7, 9]
    assert index.find(ids).tolist() == [-1, 0, -1, 1, -1, 2, -1, 3, -1, 4]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 1000])
def test_ranks_own_ranges_of_hashes_one_after_another(ranks: int) -> None:
    ids = np.random.default_rng(1).integers(LOWEST, HIGHEST, 20_000)
    owners = owner(ids, ranks)
    hashes = mix64(ids)
    assert (np.diff(segments(np.sort(hashes), ranks)) >= 0).all()
    for rank in range(ranks):
        first, end = hash_range(rank, ranks)
        inside = (hashes >= np.uint64(first)) & (hashes <= np.uint64(end - 1))
        assert ((owners == rank) == inside).all()
    if ranks < 10:
        assert np.bincount(owners, minlength=ranks).min() > 0.9 * 20_000 / ranks


def test_different_ids_have_different_hashes() -> None:
    assert np.unique(mix64(np.arange(-50_000, 50_000))).size == 100_000


def test_texts_have_the_ids_that_spark_gives_them() -> None:
    """Values of ``SELECT xxhash64(...)`` in Spark: texts of 0 to 99 bytes."""
    assert ids_of_texts(list(SPARK_IDS)).tolist() == list(SPARK_IDS.values())
