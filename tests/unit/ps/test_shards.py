"""Several servers with a part of the weights each give what one server gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from sparkdl.errors import ConfigError
from sparkdl.ps.client import Progress
from sparkdl.ps.server import ServerConfig
from sparkdl.ps.shards import ShardRouter, shards_of
from sparkdl.rules import BSP, DynSGD, Rule
from sparkdl.testing.inproc import InprocParameterServer
from sparkdl.weights import FloatArray, Layout

LAYOUT = Layout.of([("w", (7,), "float32"), ("b", (4,), "float32")], [("m", (3,), "float32")])


@contextmanager
def servers(rule: Rule, count: int) -> Iterator[list[InprocParameterServer]]:
    center = np.arange(LAYOUT.size, dtype=np.float32)
    with ExitStack() as stack:
        made = []
        for shard in shards_of(LAYOUT, count):
            part = np.empty(shard.layout.size, np.float32)
            shard.take(center, part)
            config = ServerConfig(shard.layout, rule, 2)
            made.append(stack.enter_context(InprocParameterServer(config, part)))
        yield made


def router(made: list[InprocParameterServer], rank: int, attempt: int = 0) -> ShardRouter:
    return ShardRouter([server.client(rank, attempt) for server in made], LAYOUT)


def centers(made: list[InprocParameterServer]) -> FloatArray:
    whole = np.empty(LAYOUT.size, np.float32)
    for server, shard in zip(made, shards_of(LAYOUT, len(made)), strict=True):
        shard.put(server.center, whole)
    return whole


def step(batch: int) -> Progress:
    return Progress(epoch=0, batch=batch, batches=1, rows=4)


def test_the_shards_cover_the_buffer_once() -> None:
    for count in range(1, 6):
        seen = np.zeros(LAYOUT.size, int)
        for shard in shards_of(LAYOUT, count):
            seen[shard.trained] += 1
            seen[shard.averaged] += 1
        np.testing.assert_array_equal(seen, 1)


@pytest.mark.parametrize("count", [2, 3])
def test_as_one_server(count: int) -> None:
    results = []
    for shards in (1, count):
        with servers(DynSGD(), shards) as made, router(made, 0) as a, router(made, 1) as b:
            for each in (a, b):
                each.join(batches_per_epoch=3)
                each.pull()
            for batch in range(1, 4):
                for rank, each in enumerate((a, b)):
                    each.buffer[...] = np.linspace(-1, 1, LAYOUT.size) * (batch + rank)
                    each.push_pull(step(batch))
            np.testing.assert_array_equal(b.buffer, centers(made))
            results.append(centers(made))
    np.testing.assert_array_equal(*results)


def test_a_window_that_one_server_has_is_not_committed_there_again() -> None:
    with servers(DynSGD(), 2) as made:
        with router(made, 0) as first:
            first.join(batches_per_epoch=3)
            first.pull()
            first.buffer[...] = 1
            first.push_pull(step(1))
            first.buffer[...] = 10
            first._push_pull(0, step(2))  # the process is killed before the other server's reply
        before = centers(made)
        with router(made, 0, attempt=1) as again:
            welcome = again.join(batches_per_epoch=3)
            assert (welcome.epoch, welcome.batch) == (0, 1)
            again.pull()
            again.buffer[...] = 10
            again.push_pull(step(2))
            after = centers(made)
            np.testing.assert_array_equal(again.buffer, after)
    shards = shards_of(LAYOUT, 2)
    np.testing.assert_array_equal(after[shards[0].trained], before[shards[0].trained])
    np.testing.assert_array_equal(after[shards[1].trained], before[shards[1].trained] + 10)


def test_rounds_need_one_server() -> None:
    with servers(BSP(), 2) as made, ExitStack() as stack:
        each = [stack.enter_context(router(made, rank)) for rank in range(2)]
        other = each[1]._pool.submit(lambda: [c.join() for c in each[1]._clients])
        with pytest.raises(ConfigError, match="needs one server"):
            each[0].join()
        other.result(10)
