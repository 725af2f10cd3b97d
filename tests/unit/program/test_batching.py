"""Methods that answer several calls at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sparkdl.errors import ConfigError, DataError
from sparkdl.program import CallClient, CallServer, batched_handler

TOKEN = b"t" * 32


class Policy:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.going = threading.Event()

    @batched_handler(4, timeout_s=5.0)
    def double(self, x: Any, names: Any = None) -> Any:
        self.sizes.append(len(x))
        return {"twice": 2 * x, "names": names}

    @batched_handler(4, timeout_s=0.2, pad_batch=True)
    def padded(self, pair: Any) -> Any:
        self.sizes.append(len(pair[0]))
        return pair[0] + pair[1], list(range(len(pair[0])))

    @batched_handler(2, timeout_s=0.1)
    def wrong(self, x: Any) -> Any:
        return x[:0]

    @batched_handler(2, timeout_s=5.0)
    def fail(self, x: Any) -> Any:
        raise KeyError("missing")

    @batched_handler(1)
    def slow(self, x: Any) -> Any:
        self.sizes.append(1)
        self.going.wait(10)
        return x

    def quick(self) -> str:
        return "here"


@pytest.fixture
def served() -> Iterator[tuple[Policy, CallClient]]:
    target = Policy()
    with CallServer(target, TOKEN, label="node", threads=1) as server:
        client = CallClient(server.address, TOKEN)
        yield target, client
        target.going.set()
        client.close()


def test_four_calls_are_one_batch_and_each_gets_its_own_row(served: Any) -> None:
    target, client = served
    rows = [np.array([i, 10 * i], np.float32) for i in range(4)]
    futures = [client.futures.double(row, names=f"n{i}") for i, row in enumerate(rows)]
    for i, future in enumerate(futures):
        result = future.result(10)
        np.testing.assert_array_equal(result["twice"], [2 * i, 20 * i])
        assert result["names"] == f"n{i}"
    assert target.sizes == [4], "one thread of the server, and no deadlock"


def test_a_batch_that_is_not_full_goes_after_its_time_and_is_padded(served: Any) -> None:
    target, client = served
    futures = [client.futures.padded((i, 100)) for i in range(2)]
    assert [future.result(10) for future in futures] == [(100, 0), (101, 1)]
    assert target.sizes == [4]


def test_errors_reach_all_callers_of_the_batch(served: Any) -> None:
    _, client = served
    for future in [client.futures.fail(i) for i in range(2)]:
        with pytest.raises(KeyError, match="missing"):
            future.result(10)
    with pytest.raises(DataError, match="wrong has not returned one element for each call"):
        client.wrong(1)
    shapes = [client.futures.double(np.zeros(i + 1)) for i in range(4)]
    for future in shapes:
        with pytest.raises(DataError, match="cannot be put into one batch"):
            future.result(10)


def test_a_waiting_call_holds_no_thread_and_can_be_cancelled(served: Any) -> None:
    target, client = served
    first = client.futures.slow(1)
    while not target.sizes:
        time.sleep(0.01)
    second = client.futures.slow(2)
    assert client.quick() == "here"
    assert second.cancel()
    assert client.quick() == "here"  # the order to cancel came before it
    target.going.set()
    assert first.result(10) == 1
    assert client.quick() == "here"
    assert target.sizes == [1]


def test_what_is_refused_and_a_call_in_the_same_process() -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        batched_handler(0)
    with pytest.raises(ConfigError, match="timeout_s"):
        batched_handler(1, timeout_s=0)
    policy = Policy()
    policy.going.set()
    assert policy.slow(3).result(10) == 3
