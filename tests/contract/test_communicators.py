"""What every communicator does, whatever it runs on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from communicator_worlds import WORLDS, example

from sparkdl.collective.arithmetic import shard_edges
from sparkdl.collective.communicator import Communicator, Member, make_communicator
from sparkdl.collective.current import SoloCommunicator
from sparkdl.errors import ConfigError, ProtocolError, UnknownNameError

SIZES = [0, 1, 7, 5000, 1_000_003]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        metafunc.parametrize("world", list(WORLDS), indirect=True, scope="session")


def run(world: Any, name: str, **arguments: Any) -> list[Any]:
    """Every rank's answer; raises the first error, with the rank's own traceback as a note."""
    answers = world.run(name, **arguments)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def expected(op: str, arrays: list[np.ndarray], weights: list[float]) -> np.ndarray:
    stacked = np.stack([a.astype(np.float64) for a in arrays])
    if op == "weighted":
        factors = np.array(weights[: len(arrays)])
        return np.tensordot(factors, stacked, 1) / factors.sum()
    return {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[op](stacked, axis=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["sum", "mean", "weighted", "max", "min"])
def test_all_reduce_equals_numpy_with_the_same_bits_on_all_ranks(world, op, size):
    weights = [64.0, 1.0, 0.0, 33.0]
    how = {0: "async", 1: "in place"}.get(size % 2 + (op == "mean"), "new array")
    answers = run(world, "reduce", size=size, dtype="float32", op=op, weights=weights, how=how)
    want = expected(op, [example(r, size, "float32") for r in range(world.size)], weights)
    np.testing.assert_allclose(answers[0], want, rtol=1e-6, atol=1e-5)
    assert answers[0].dtype == np.float32
    assert len({a.tobytes() for a in answers}) == 1


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint16", "int32", "int64"])
@pytest.mark.parametrize("size", [7, 40_001])
def test_all_reduce_of_other_dtypes(world, dtype, size):
    op = "weighted" if dtype.startswith("f") else "sum"
    weights = [3.0, 2.0, 1.0, 2.0]
    answers = run(world, "reduce", size=size, dtype=dtype, op=op, weights=weights, how="in place")
    want = expected(op, [example(r, size, dtype) for r in range(world.size)], weights)
    rtol, atol = (2e-3, 2e-2) if dtype == "float16" else (1e-12, 1e-12)
    np.testing.assert_allclose(answers[0].astype(np.float64), want, rtol=rtol, atol=atol)
    assert answers[0].dtype == dtype
    assert len({a.tobytes() for a in answers}) == 1


def test_half_precision_mean_does_not_overflow_on_the_way(world):
    for size in (10, 30_000):
        answers = run(world, "large_mean", size=size, value=60_000.0)
        assert all(abs(a - 60_000) < 100 for a in answers), answers


@pytest.mark.parametrize("size", [6, 30_000])
def test_all_weights_zero_gives_zero(world, size):
    answers = run(
        world, "reduce", size=size, dtype="float32", op="weighted", weights=[0.0] * 4, how="new"
    )
    assert all(not a.any() for a in answers)


@pytest.mark.parametrize("size", [10, 70_000])
def test_asynchronous_operations_keep_their_order(world, size):
    count, ranks = 12, world.size
    want = [float(i * ranks + sum(range(ranks))) for i in range(count)] + [float(ranks)]
    assert run(world, "in_order", count=count, size=size) == [want] * ranks


@pytest.mark.parametrize("size", [0, 3, 1001, 300_007])
def test_reduce_scatter_gives_each_rank_its_shard(world, size):
    answers = run(world, "scatter", size=size, op="mean")
    want = expected("mean", [example(r, size, "float32") for r in range(world.size)], [])
    edges = shard_edges(size, world.size)
    for rank, answer in enumerate(answers):
        np.testing.assert_allclose(
            answer, want[edges[rank] : edges[rank + 1]], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("sizes", [[2, 3, 0, 1], [20_000, 1, 0, 70_000]])
def test_all_gather_takes_uneven_shapes(world, sizes):
    want = [example(r, 3 * sizes[r], "float32").reshape(-1, 3) for r in range(world.size)]
    for answer in run(world, "gather", sizes=sizes):
        assert len(answer) == world.size
        for got, right in zip(answer, want, strict=True):
            np.testing.assert_array_equal(got, right)


def test_all_gather_takes_different_dtypes(world):
    kinds = ["float64", "int8", "uint16", "float16"]
    want = [(kinds[r], (2,) * r) for r in range(world.size)]
    assert run(world, "gather_kinds") == [want] * world.size


@pytest.mark.parametrize("dtype", ["int64", "float32", "uint8"])
@pytest.mark.parametrize("scale", [0, 3, 70_000])
def test_all_to_all_gives_each_rank_what_the_others_have_for_it(world, scale, dtype):
    sizes = [[scale * ((3 * a + b) % 4) for b in range(8)] for a in range(8)]
    for rank, answer in enumerate(run(world, "deal", sizes=sizes, dtype=dtype)):
        assert len(answer) == world.size
        for other, got in enumerate(answer):
            want = example(7 * other + rank, sizes[other][rank], dtype)
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)


def test_all_to_all_refuses_parts_that_are_not_one_for_each_rank(world):
    for error in run(world, "deal_wrongly"):
        assert "one for each rank" in error


@pytest.mark.parametrize("size", [0, 5, 600_001])
@pytest.mark.parametrize("in_place", [True, False])
def test_broadcast_from_each_root(world, size, in_place):
    for root in range(world.size):
        for answer in run(world, "spread", size=size, root=root, in_place=in_place):
            np.testing.assert_array_equal(answer, example(root, size, "float32"))


def test_barrier_holds_everyone_until_the_last(world):
    times = run(world, "meet")
    assert min(left for _, left in times) >= max(came for came, _ in times) - 1e-3


@pytest.mark.parametrize("size", [1, 50_000])
def test_groups_have_their_own_sums(world, size):
    for rank, answer in enumerate(run(world, "parity", size=size)):
        members = [r for r in range(world.size) if r % 2 == rank % 2]
        want = (sum(r + 1 for r in members), members.index(rank), len(members), world.size)
        assert answer == want


def test_random_operations_in_a_row(world):
    answers = run(world, "mixed", seed=7, count=60)
    assert all(a == answers[0] for a in answers)


def test_ranks_know_their_places(world):
    answers = run(world, "places")
    assert [a[0] for a in answers] == list(range(world.size))
    assert {a[1] for a in answers} == {world.size}
    assert all(0 <= a[2] < a[3] <= world.size for a in answers)
    assert all(a[4] for a in answers)


# -- refusals: checked before anything is sent, the same for all ----------------------------


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c: c.all_reduce([1.0], "avg"), UnknownNameError, "'sum'"),
        (lambda c: c.all_reduce(np.ones(2, int), "mean"), ConfigError, "floating-point"),
        (lambda c: c.all_reduce(["a"]), ConfigError, "number type"),
        (lambda c: c.all_reduce(np.ones(2, ">f4")), ConfigError, "native"),
        (lambda c: c.all_reduce([1.0], "weighted", weight=-1.0), ConfigError, "at least 0"),
        (lambda c: c.all_reduce([1.0], "weighted", weight=np.nan), ConfigError, "finite"),
        (lambda c: c.all_reduce([1.0], out=np.ones(2)), ConfigError, "shape (1,)"),
        (lambda c: c.all_reduce([1.0, 2.0], out=np.ones(4)[::2]), ConfigError, "contiguous"),
        (lambda c: c.broadcast([1.0], root=9), ConfigError, "root"),
        (lambda c: c.group([0, 0]), ConfigError, "different ranks"),
        (lambda c: c.group([5]), ConfigError, "ranks from 0"),
    ],
)
def test_wrong_arguments_are_refused(call, error, words):
    with SoloCommunicator() as communicator:
        with pytest.raises(error) as raised:
            call(communicator)
        assert words in str(raised.value)
        assert float(communicator.all_reduce(2.0)) == 2.0  # still usable


def test_overlapping_out_is_refused():
    buffer = np.zeros(10)
    with SoloCommunicator() as communicator, pytest.raises(ConfigError, match="in part"):
        communicator.all_reduce(buffer[:8], out=buffer[2:])


def test_unknown_communicator_is_refused_with_the_known_ones():
    with pytest.raises(UnknownNameError) as raised:
        make_communicator("builtins", rank=0)
    assert "did you mean 'builtin'" in str(raised.value)


def test_members_travel_as_json():
    member = Member("10.0.0.1", 4711, "a/1", "local", "builtin")
    assert Member.from_json(member.to_json()) == member
    for text in ("", "[]", '{"host": 1}', '{"host": 1, "port": 2, "host_id": "a"}'):
        with pytest.raises(ProtocolError):
            Member.from_json(text)


def test_solo_follows_the_protocol():
    with SoloCommunicator() as communicator:
        assert isinstance(communicator, Communicator)
    with pytest.raises(ConfigError, match="one member"):
        make_communicator("solo", rank=0).connect([Member("", 0, "")] * 2, b"")
