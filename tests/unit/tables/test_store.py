"""RowStore: start values, filters, evictions, deltas, memory; and the sums over duplicates."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sparkdl.errors import ConfigError, DataError, ModelError, UnknownNameError
from sparkdl.tables.admission import CountFilter, Eviction, Probability
from sparkdl.tables.hashing import mix64
from sparkdl.tables.index import in_order
from sparkdl.tables.rules import RowStart, make_row_rule
from sparkdl.tables.store import BLOCK_ROWS, RowStore, Statistics, merged

LOWEST, HIGHEST = -(2**63), 2**63 - 1
SOME = np.array([3, -1, LOWEST, HIGHEST, 0])


def ones(ids: np.ndarray, dim: int = 2) -> np.ndarray:
    return np.ones((len(ids), dim), np.float32)


@pytest.mark.parametrize("kind", ["uniform", "normal", {"name": "uniform", "low": 1.0}])
def test_start_values_are_equal_in_any_order_and_split(kind: str) -> None:
    ids = np.arange(-1000, 1000)
    whole = RowStart("ads", 5, kind).rows(ids)
    order = np.random.default_rng(0).permutation(len(ids))
    split = np.concatenate([RowStart("ads", 5, kind).rows(i) for i in np.split(ids[order], 8)])
    assert (split == whole[order]).all()
    assert np.unique(whole).size > 0.99 * whole.size
    assert not (RowStart("ads", 5, kind, seed=1).rows(ids) == whole).any(axis=1).all()
    assert not (RowStart("users", 5, kind).rows(ids) == whole).any(axis=1).all()


def test_start_values_have_the_distribution_that_they_are_named_after() -> None:
    ids = np.arange(40_000)
    uniform = RowStart("t", 8).rows(ids)
    assert -0.05 <= uniform.min() < -0.0499 < 0.0499 < uniform.max() <= 0.05
    assert abs(uniform.mean()) < 2e-4
    normal = RowStart("t", 7, {"name": "normal", "stddev": 2.0}).rows(ids)
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 2) < 0.01
    assert abs(np.corrcoef(normal.T) - np.eye(7)).max() < 0.02
    assert (RowStart("t", 2, {"name": "constant", "value": 3}).rows(ids) == 3).all()


def test_a_row_is_stored_at_its_first_gradient_and_not_when_it_is_pulled() -> None:
    store = RowStore(2, "sgd", name="ads")
    start = store.pull(SOME)
    assert len(store) == 0
    assert (store.pull(SOME, create=False) == 0).all()
    assert (store.pull(SOME, create=False, default="initial") == start).all()
    store.push(SOME[:2], ones(SOME[:2]), 0.5)
    rows, stored = store.look_up(SOME)
    assert stored.tolist() == store.known(SOME).tolist() == [True, True, False, False, False]
    assert (rows[:2] == start[:2] - np.float32(0.5)).all()
    assert (rows[2:] == start[2:]).all()


def test_steps_equal_those_of_a_dict_of_rows() -> None:
    rng = np.random.default_rng(3)
    store, expected = RowStore(3, "adagrad"), dict[int, tuple[np.ndarray, np.ndarray]]()
    for _ in range(200):
        ids = np.unique(rng.integers(-300, 300, 40))
        gradients = rng.normal(size=(len(ids), 3)).astype(np.float32)
        store.push(ids, gradients, 0.1)
        for one, g in zip(ids, gradients, strict=True):
            w, a = expected.get(
                int(one), (store.start.rows(np.array([one]))[0], np.full(3, 0.1, np.float32))
            )
            a = a + g * g
            expected[int(one)] = w - np.float32(0.1) * (g / np.sqrt(a + np.float32(1e-7))), a
    ids = np.array(list(expected))
    assert len(store) == len(ids)
    wanted = np.stack([w for w, _ in expected.values()])
    np.testing.assert_allclose(store.pull(ids), wanted, rtol=0, atol=1e-6)


def test_duplicates_are_summed_in_their_order() -> None:
    ids = np.array([7, -3, 7, 7, LOWEST])
    gradients = np.arange(10, dtype=np.float32).reshape(5, 2)
    unique, sums, counts = merged(ids, gradients)
    assert unique.tolist() == [LOWEST, -3, 7]
    assert sums.tolist() == [[8, 9], [2, 3], [10, 13]]
    assert counts.tolist() == [1, 1, 3]
    assert merged(unique, sums, counts)[2].tolist() == [1, 1, 3]
    assert len(merged(ids[:0], gradients[:0])[0]) == 0


def test_counts_go_with_their_ids() -> None:
    """A fault planted here, counts in the order of the ids that came, was noticed by no test."""
    gradients = np.ones((3, 2), np.float32)
    unique, sums, counts = merged(np.array([5, 3, 5]), gradients, np.array([2, 7, 1]))
    assert (unique.tolist(), sums[:, 0].tolist(), counts.tolist()) == ([3, 5], [1, 2], [7, 3])


@pytest.mark.parametrize("different", [3, 400])
def test_sums_over_many_duplicates_equal_those_of_numpy(different: int) -> None:
    rng = np.random.default_rng(0)
    ids, gradients = rng.integers(0, different, 1000), rng.normal(size=(1000, 4)).astype("f4")
    expected = np.zeros((different, 4))
    np.add.at(expected, ids, gradients.astype(np.float64))
    unique, sums, counts = merged(ids, gradients)
    np.testing.assert_allclose(sums, expected[unique], rtol=1e-4, atol=1e-4)
    assert (counts == np.bincount(ids)[unique]).all()
    assert sums.dtype == np.float32


def test_an_id_twice_in_one_push_is_refused() -> None:
    with pytest.raises(DataError, match="several times"):
        RowStore(2).push(np.array([4, 4]), np.ones((2, 2), np.float32), 0.1)


@pytest.mark.parametrize("ids", [np.array([1.0]), np.array([[1]]), np.array([1], np.uint64)])
def test_what_is_no_id_is_refused(ids: np.ndarray) -> None:
    with pytest.raises(DataError, match="integers of 64 bits"):
        RowStore(2).pull(ids)


def test_gradients_of_another_shape_are_refused() -> None:
    with pytest.raises(DataError, match=r"shape \(1, 2\)"):
        RowStore(2).push(np.array([4]), np.ones((1, 3), np.float32), 0.1)


def test_gradients_that_are_not_finite_raise() -> None:
    ids, gradients = np.array([1, 2]), np.array([[1, np.inf], [1, 1]], np.float32)
    with pytest.raises(ModelError, match="id 1"):
        RowStore(2, name="ads").push(ids, gradients, 0.1)


def test_an_id_whose_row_is_loaded_waits_no_more() -> None:
    store = RowStore(2, "sgd", "zeros", entry=CountFilter(3))
    store.push(np.array([4, 5]), np.ones((2, 2), np.float32), 1)
    store.load(np.array([4, 6]), np.ones((2, 2), np.float32))
    assert store.waiting.export()[0].tolist() == [5]
    store.push(np.array([4, 5, 6]), np.ones((3, 2), np.float32), 1)
    assert store.pull(np.array([4, 5, 6]))[:, 0].tolist() == [0, 0, 0]
    assert store.waiting.export()[1].tolist() == [2]


def test_a_counted_id_gets_its_row_when_it_was_seen_often_enough() -> None:
    store = RowStore(2, "sgd", {"name": "constant", "value": 5}, entry=CountFilter(3))
    one, two = np.array([1]), np.array([1, 2])
    assert (store.pull(one) == 0).all()
    store.push(one, ones(one), 1)
    assert (len(store), len(store.waiting)) == (0, 1)
    store.push(two, ones(two), 1)
    assert (store.pull(one) == 5).all(), "its next gradient makes its row: it shows its start"
    store.push(two, ones(two), 1, counts=np.array([1, 1]))
    assert (len(store), len(store.waiting)) == (1, 1)
    assert store.pull(two).tolist() == [[4, 4], [5, 5]]


def test_a_probability_chooses_the_same_ids_every_time() -> None:
    ids = np.arange(20_000)
    stores = [RowStore(1, "sgd", "zeros", entry=Probability(0.1)) for _ in range(2)]
    stores[0].push(ids, ones(ids, 1), 1)
    for part in np.split(ids[::-1], 4):
        stores[1].push(part, ones(part, 1), 1)
    assert (stores[0].known(ids) == stores[1].known(ids)).all()
    assert 1_800 < len(stores[0]) < 2_200


def test_rows_seen_least_leave_a_full_table_and_those_in_flight_stay() -> None:
    store = RowStore(1, "sgd", "zeros", eviction=Eviction(max_rows=100))
    often = np.arange(50)
    for _ in range(3):
        store.push(often, ones(often, 1), 1)
    for start in range(1000, 1400, 40):
        new = np.arange(start, start + 40)
        store.push(new, ones(new, 1), 1)
        assert store.known(new).all()
        assert store.known(often).all()
        assert len(store) <= 100
    assert (store.pull(often) == -3).all()


def test_rows_leave_by_the_time_of_their_last_gradient() -> None:
    store = RowStore(1, "sgd", "zeros", eviction=Eviction(max_rows=10, by="timestamp"))
    old, new = np.arange(8), np.arange(8, 14)
    store.push(old, ones(old, 1), 1, counts=np.full(8, 99))
    store.push(new, ones(new, 1), 1)
    assert store.known(new).all()
    assert store.known(old).sum() == 3
    idle = RowStore(1, "sgd", "zeros", eviction=Eviction(expire_after=5))
    idle.push(old, ones(old, 1), 1)
    for _ in range(6):
        assert idle.known(old).all()
        idle.push(new, ones(new, 1), 1)
    assert not idle.known(old).any()


def test_shrinking_removes_rows_and_gives_memory_back() -> None:
    store, ids = RowStore(8, "adagrad", tracks=True), np.arange(50_000)
    store.push(ids, ones(ids, 8), 0.1)
    kept = ids[::10]
    store.push(kept, ones(kept, 8), 0.1)
    before, rows = store.nbytes, store.pull(kept)
    assert store.shrink(below=2) == 45_000
    assert (store.pull(kept) == rows).all()
    assert store.known(ids).sum() == len(store) == 5_000
    assert store.nbytes < before / 3
    assert store.shrink(unseen=0) == 0
    store.push(kept[:1], ones(kept[:1], 8), 0.1)
    assert store.shrink(unseen=0) == 4_999


def test_rows_leave_only_a_table_that_tracks_them() -> None:
    with pytest.raises(ConfigError, match="tracks"):
        RowStore(2).shrink(below=1)


def test_blocks_are_full_and_sorted_by_the_hash_of_ids() -> None:
    ids = np.arange(-200_000, 200_000)
    store = RowStore(1, "sgd", "zeros")
    store.load(ids, ids[:, None].astype(np.float32))
    blocks = [store.rows_at(slots) for slots in in_order(*store.slots(), BLOCK_ROWS)]
    assert {len(block.ids) for block in blocks[:-1]} == {BLOCK_ROWS}
    found = np.concatenate([block.ids for block in blocks])
    assert (found == ids[np.argsort(mix64(ids))]).all()
    assert all((block.values[:, 0] == block.ids).all() for block in blocks)
    whole = store.export()
    assert (whole.ids == found).all()
    assert (whole.values[:, 0] == found).all()


def test_a_table_goes_on_from_its_settings_and_its_rows() -> None:
    store, ids = RowStore(2, "adam", "normal", entry=CountFilter(1), tracks=True), SOME
    store.push(ids, ones(ids), 0.1)
    settings = json.loads(json.dumps(store.settings))
    other = RowStore.from_settings(settings)
    other.load(*store.export())
    for each in (store, other):
        each.push(ids, ones(ids), 0.1)
    assert (store.pull(ids) == other.pull(ids)).all()
    assert other.settings == store.settings


def test_settings_of_something_else_are_refused() -> None:
    with pytest.raises(ConfigError):
        RowStore.from_settings({"dim": 2, "colour": "red"})
    with pytest.raises(UnknownNameError):
        RowStore(2, "lion")
    with pytest.raises(ConfigError):
        RowStore(0)


def test_a_million_rows_take_little_more_than_their_numbers() -> None:
    """At most 1.25 of values, state and id."""
    ids = np.random.default_rng(0).integers(LOWEST, HIGHEST, 1_000_000)
    for rule, numbers in (("sgd", 16), ("adagrad", 32)):
        store = RowStore(16, rule)
        for part in np.split(ids, 10):
            store.push(part, np.zeros((len(part), 16), np.float32), 0.1)
        assert store.nbytes <= 1.25 * len(ids) * (4 * numbers + 8)


def test_statistics_of_ranks_join() -> None:
    store = RowStore(2, "sgd", "zeros")
    store.load(np.array([1, 2]), np.array([[3, 0], [-4, 0]], np.float32))
    found = store.statistics()
    expected = {
        "nrm2": 5,
        "max": 3,
        "min": -4,
        "sum": -1,
        "asum": 7,
        "amax": 4,
        "nnz": 2,
        "size": 2,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found.joined(found).get("sum") == -2
    assert found.joined(Statistics()) == found
    with pytest.raises(UnknownNameError):
        found.get("median")


def test_rules_have_the_state_that_they_say() -> None:
    widths = {n: make_row_rule(n).width(16) for n in ("sgd", "adagrad", "adam", "ftrl")}
    assert widths == {"sgd": 0, "adagrad": 16, "adam": 33, "ftrl": 32}
    assert make_row_rule("rowwise_adagrad").width(16) == 1
