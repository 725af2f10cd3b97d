"""A reduce-scatter of the built-in communicator: which bytes go between hosts, and what comes out.

The ranks are threads of this process, each with its own sockets and mappings; hosts are names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from sparkdl.collective.arithmetic import shard_edges
from sparkdl.collective.builtin import BuiltinConnector
from sparkdl.collective.builtin.communicator import BuiltinCommunicator
from sparkdl.collective.builtin.ring import Ring

TOKEN = b"0123456789abcdef0123456789abcdef"
WORLDS = ["a", "aaa", "ab", "abcd", "abcde", "aabb", "abab", "aab", "aba", "ababa", "aabbcc",
          "abbbcc"]  # fmt: skip
"""The host of each rank."""
SIZE = 200_003


def on_hosts(hosts: str, work: Callable[[Any], Any]) -> list[Any]:
    """What ``work(communicator)`` returns on each rank."""
    connectors = [
        BuiltinConnector(r, host_id=h, advertised_host="127.0.0.1", timeout_s=60.0)
        for r, h in enumerate(hosts)
    ]
    members = [c.prepare() for c in connectors]
    results: list[Any] = [None] * len(hosts)

    def run(rank: int) -> None:
        try:
            with connectors[rank].connect(members, TOKEN) as communicator:
                results[rank] = work(communicator)
                communicator.barrier()
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(t.is_alive() for t in threads), "a rank hangs"
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.fixture
def sent() -> Iterator[dict[int, int]]:
    """Bytes that each rank has sent around its ring."""
    counted: dict[int, int] = {}
    send = Ring._send

    def counting(ring: Ring, data: memoryview) -> int:
        count = send(ring, data)
        rank = ring.ranks[ring.index]
        counted[rank] = counted.get(rank, 0) + count
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ring, "_send", counting)
        yield counted


def values(rank: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(rank).normal(size=SIZE).astype(dtype)


@pytest.mark.parametrize("hosts", WORLDS)
def test_shards_are_those_of_the_whole(hosts: str) -> None:
    """In new memory, in place, weighted and in half precision; sources keep what they have."""
    weights = [float(r % 3) for r in range(len(hosts))] if len(hosts) > 1 else [1.0]

    def work(c: Any) -> list[np.ndarray]:
        edges = shard_edges(SIZE, c.size)
        mine = slice(edges[c.rank], edges[c.rank + 1])
        found = []
        for dtype, op in (("float32", "sum"), ("float32", "weighted"), ("float16", "mean")):
            array = values(c.rank, dtype)
            whole = c.all_reduce(array, op, weight=weights[c.rank])[mine]
            kept = array.copy()
            new = c.reduce_scatter(array, op, weight=weights[c.rank])
            np.testing.assert_array_equal(array, kept)
            placed = c.reduce_scatter(array, op, weight=weights[c.rank], out=array[mine])
            assert placed.tobytes() == new.tobytes()
            found += [whole, new]
        return found

    exact = len(set(hosts)) < 3 or len(set(hosts)) == len(hosts)
    for sums, own, *rest in on_hosts(hosts, work):
        pairs = [(sums, own), *zip(rest[::2], rest[1::2], strict=True)]
        for whole, shard in pairs:
            if exact:  # of two hosts, or around one ring, the sums have one order
                np.testing.assert_array_equal(whole, shard)
            else:
                bound = 2e-2 if shard.dtype == np.float16 else 1e-5
                np.testing.assert_allclose(whole, shard, rtol=bound, atol=bound)


@pytest.mark.parametrize("size", [5_000, 16_384, 16_385, 50_001, 1_000_003])
@pytest.mark.parametrize("hosts", ["abab", "aab", "ababa"])
def test_sizes_that_do_not_divide(hosts: str, size: int) -> None:
    def work(c: Any) -> np.ndarray:
        result: np.ndarray = c.reduce_scatter(np.arange(size, dtype=np.int64) + c.rank)
        return result

    ranks = len(hosts)
    want = np.arange(size, dtype=np.int64) * ranks + sum(range(ranks))
    np.testing.assert_array_equal(np.concatenate(on_hosts(hosts, work)), want)


@pytest.mark.parametrize("hosts", [w for w in WORLDS if len(set(w)) > 1])
def test_a_host_sends_what_is_not_its_own_once(hosts: str, sent: dict[int, int]) -> None:
    def work(c: BuiltinCommunicator) -> None:
        array = np.ones(SIZE, np.float32)
        c.barrier()
        before = sent.get(c.rank, 0)
        c.reduce_scatter(array, out=array[: SIZE // c.size] if c.rank == 0 else None)
        taken[c.rank] = sent.get(c.rank, 0) - before

    taken: dict[int, int] = {}
    on_hosts(hosts, work)
    edges = shard_edges(SIZE, len(hosts))
    for host in set(hosts):
        ranks = [r for r, h in enumerate(hosts) if h == host]
        own = sum(edges[r + 1] - edges[r] for r in ranks)
        bytes_sent = sum(taken[r] for r in ranks)
        messages = 1000 * len(hosts)  # records before it
        assert 4 * (SIZE - own) <= bytes_sent < 4 * (SIZE - own) + messages


def test_no_memory_of_the_whole_size() -> None:
    """Two hosts of two ranks: half of the array, which a rank's ring carries, and no more."""
    made: list[int] = []
    lock = threading.Lock()
    empty = np.empty

    def counting(shape: Any, dtype: Any = float, **given: Any) -> np.ndarray:
        array = empty(shape, dtype, **given)
        with lock:
            made.append(array.nbytes)
        return array

    def work(c: Any) -> None:
        array = np.ones(SIZE, np.float32)
        with ExitStack() as stack:
            if c.rank == 0:
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                patch.setattr(np, "empty", counting)
            c.reduce_scatter(array)
            c.barrier()

    on_hosts("abab", work)
    assert max(made) <= 4 * (SIZE // 2 + 1)
