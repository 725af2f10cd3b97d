"""A center on shards: the same numbers as on one server, and every commit once on each of them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from inproc_shards import InprocShards
from ps_learner import LAYOUT, together

from sparkdl.codecs import make_codec
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import ConfigError, ProtocolError, TransportError
from sparkdl.ps.client import Client, Progress
from sparkdl.ps.kinds import StoreKind, ranges_of
from sparkdl.ps.server import ServerConfig
from sparkdl.ps.server.config import TablesOfRun, shards_of
from sparkdl.ps.shards.client import ShardedClient
from sparkdl.rules import BSP, Rule, make_rule
from sparkdl.tables.service import TableSpec
from sparkdl.tables.store import RowStore
from sparkdl.testing.inproc import InprocParameterServer
from sparkdl.training.changes import VariableChanges
from sparkdl.training.slices import Slices
from sparkdl.transport.frames import Flag, FrameLimits, Message
from sparkdl.weights import FloatArray, Layout

BIG = Layout.of([("w", (5, 4), "float32"), ("b", (7,), "float32")], [("m", (6,), "float32")])
RULES: list[tuple[Any, dict[str, Any]]] = [
    ("downpour", {}),
    ("hogwild", {}),
    ("adag", {}),
    ("downpour_adagrad", {}),
    ("dynsgd", {}),
    ("geo", {}),
    ("ssp", {"staleness": 2}),
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
    ("adam", {"learning_rate": 0.01}),
    ("dc_asgd", {}),
    ("gap_aware", {}),
    ("staleness_aware", {}),
    ("experimental", {}),
    ("aeasgd", {}),
    ("eamsgd", {}),
    ("async_diloco", {}),
    ("rmsprop", {"learning_rate": 0.01}),
    ("adagrad", {"learning_rate": 0.1}),
    ("adamw", {"learning_rate": 0.01}),
]
ROUNDS: list[tuple[Any, dict[str, Any]]] = [
    ("bsp", {"payload": "gradient"}),
    ("bsp", {"payload": "delta"}),
    ("averaging", {}),
    ("diloco", {}),
]


def center_of(layout: Layout) -> FloatArray:
    return np.random.default_rng(5).normal(size=layout.size).astype(np.float32)


def sent(rank: int, step: int, layout: Layout = BIG) -> FloatArray:
    return np.random.default_rng((rank, step)).normal(size=layout.size).astype(np.float32)


def at(step: int, rows: int = 4) -> Progress:
    return Progress(epoch=0, batch=step + 1, batches=1, rows=rows, learning_rate=0.05)


def config_of(rule: Rule, count: int, **more: Any) -> ServerConfig:
    settings = Settings(count, grace_s=0.2, round_timeout_s=20)
    return ServerConfig(BIG, rule.bind(count), count, settings=settings, **more)


def exchange(client: Client, steps: int) -> list[FloatArray]:
    """Joins, pulls, commits; all that came back."""
    rank = client.session.rank
    client.join(rows=8, batches_per_epoch=steps)
    found = [client.pull().copy()]
    for step in range(steps):
        client.buffer[...] = sent(rank, step)
        found.append(client.push_pull(at(step, rows=2 + rank)).copy())
    return found


@pytest.mark.parametrize(("name", "options"), RULES, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_worker_gets_the_same_bits_from_any_number_of_servers(
    name: str, options: dict[str, Any], count: int
) -> None:
    config = config_of(make_rule(name, **options), 1)
    with InprocParameterServer(config, center_of(BIG)) as server, server.client() as client:
        expected = exchange(client, 6)
    with InprocShards(config, center_of(BIG), count) as server, server.client() as client:
        found = exchange(client, 6)
        np.testing.assert_array_equal(server.center, expected[-1])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("name", "options"), ROUNDS, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rounds_of_three_workers_get_the_same_bits(
    name: str, options: dict[str, Any], count: int
) -> None:
    config = config_of(make_rule(name, **options), 3)

    def run(server: Any) -> dict[int, list[FloatArray]]:
        found: dict[int, list[FloatArray]] = {}
        clients = [server.client(rank) for rank in range(3)]

        def work(client: Client) -> None:
            found[client.session.rank] = exchange(client, 5)

        try:
            together(*(lambda c=c: work(c) for c in clients))
        finally:
            for client in clients:
                client.close()
        return found

    with InprocParameterServer(config, center_of(BIG)) as server:
        expected = run(server)
    with InprocShards(config, center_of(BIG), count) as server:
        found = run(server)
    for rank in range(3):
        np.testing.assert_array_equal(found[rank], expected[rank])


@pytest.mark.parametrize("name", ["fp16", "topk", "int8"])
@pytest.mark.parametrize("rule", ["downpour", "bsp"])
def test_encoded_commits_bring_what_one_server_would_get(name: str, rule: str) -> None:
    """A codec that looks at its whole vector chooses for each shard: it is near, not equal."""
    options = {"payload": "gradient"} if rule == "bsp" else {}
    codec = make_codec(name, **({"ratio": 0.5} if name == "topk" else {}))
    config = config_of(make_rule(rule, **options), 1, codec=codec)
    with InprocShards(config, center_of(BIG), 2) as server, server.client() as client:
        assert client.encodes
        client.join(rows=8, batches_per_epoch=9)
        client.pull()
        total = np.zeros(BIG.size, np.float32)
        for step in range(4):
            client.buffer[...] = sent(0, step)
            total += client.buffer
            client.push_pull(at(step))
        if rule == "downpour":
            trained = slice(0, BIG.trained_size)
            reached = server.center[trained] - center_of(BIG)[trained]
            coders = [s._coder for s in client._shards if s._coder is not None]
            kept = [r for r in (coder._compressor.residual for coder in coders) if r is not None]
            rest = np.concatenate(kept) if kept else 0
            np.testing.assert_allclose(reached + rest, total[trained], atol=2e-2)


def test_a_shard_takes_each_commit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies between two shards is tried again: one of them has its batches already."""
    config = config_of(make_rule("downpour"), 1)
    with InprocShards(config, np.zeros(BIG.size, np.float32), 3) as server:
        first = server.client()
        first.join(rows=8, batches_per_epoch=4)
        first.pull()
        first.buffer[...] = 1
        first.push_pull(at(0))
        first.buffer[...] = 1

        def only_the_first(self: ShardedClient, do: Any) -> None:
            do(self._shards[0])
            raise KeyboardInterrupt  # the worker is killed here

        with monkeypatch.context() as patch:
            patch.setattr(ShardedClient, "_on_all", only_the_first)
            with pytest.raises(KeyboardInterrupt):
                first.push_pull(at(1))
        first.close()
        with server.client(attempt=1) as second:
            welcome = second.join(rows=8, batches_per_epoch=4)
            assert (welcome.epoch, welcome.batch) == (0, 1)
            second.pull()
            for step in (1, 2):
                second.buffer[...] = 1
                second.push_pull(at(step))
            trained = slice(0, BIG.trained_size)
            np.testing.assert_array_equal(server.center[trained], 3)
            with (
                server.client(attempt=0) as late,  # it was silent, and not dead
                pytest.raises(TransportError, match="superseded"),
            ):
                late._send(StoreKind.PUSH, at(3))
            np.testing.assert_array_equal(server.center[trained], 3)


@pytest.mark.parametrize("payload", ["delta", "gradient"])
def test_a_worker_lost_between_putting_aside_and_saying_so_is_in_no_round(payload: str) -> None:
    """Its values are on all shards, and no shard counts them; its next attempt's are."""
    config = config_of(make_rule("bsp", payload=payload), 2)
    with InprocShards(config, np.zeros(BIG.size, np.float32), 2) as server:
        stays, dies = server.client(0), server.client(1)
        together(
            lambda: stays.join(rows=4, batches_per_epoch=3),
            lambda: dies.join(rows=4, batches_per_epoch=3),
        )
        stays.pull()
        stays.give_state = lambda: b"state"
        dies.pull()
        dies.buffer[...] = 100
        dies._send_aside(at(0))
        dies.close()
        found: dict[str, FloatArray] = {}

        def go_on() -> None:
            stays.buffer[...] = 1
            found["stays"] = stays.push_pull(at(0)).copy()

        def come_back() -> None:
            with server.client(1, attempt=1) as again:
                again.join(rows=4, batches_per_epoch=3)
                if again.source == "state":
                    assert again.get_state() == b"state"
                else:
                    again.pull()
                again.buffer[...] = 3
                found["again"] = again.push_pull(at(0)).copy()
                again.finish()

        together(go_on, come_back)
        np.testing.assert_array_equal(found["stays"], 2)
        np.testing.assert_array_equal(found["again"], 2)
        stays.close()


def test_a_round_that_nobody_has_heard_of_counts_for_who_comes_next() -> None:
    """All workers die after the coordinator has closed a round, before a shard has applied it."""
    config = config_of(make_rule("averaging"), 1)
    with InprocShards(config, np.zeros(BIG.size, np.float32), 2) as server:
        client = server.client()
        client.join(rows=4, batches_per_epoch=3)
        client.pull()
        client.buffer[...] = 1
        client._send_aside(at(0))
        client._commit(at(0), 0)
        client.close()
        with server.client(attempt=1) as again:
            assert again.join(rows=4, batches_per_epoch=3).batch == 1
            np.testing.assert_array_equal(again.pull(), 1)


def test_a_snapshot_is_that_of_the_position_that_was_decided() -> None:
    """A worker dies when some shards have its weights: the ones before them are still there."""
    config = config_of(make_rule("bsp", payload="gradient"), 1)
    with InprocShards(config, np.zeros(BIG.size, np.float32), 3) as server:
        client = server.client()
        client.join(rows=4, batches_per_epoch=3)
        for epoch in (1, 2):
            assert client.snapshot_wanted(epoch)
            client.buffer[...] = epoch
            client.snapshot(epoch)
        assert client.snapshot_wanted(3)
        client.buffer[...] = 3
        client._keep(3, 0)
        client.close()
        np.testing.assert_array_equal(server.center, 2)
        with server.client(attempt=1) as again:
            welcome = again.join(rows=4, batches_per_epoch=3)
            assert (welcome.epoch, welcome.source) == (2, "snapshot")
            np.testing.assert_array_equal(again.pull(), 2)


def test_what_callbacks_write_lands_on_the_shards_that_hold_it() -> None:
    config = config_of(make_rule("downpour"), 1)
    changes = VariableChanges({1: np.arange(7, dtype=np.float32)}, offsets={1: 20})
    with InprocShards(config, np.zeros(BIG.size, np.float32), 4) as server:
        server.write(changes)
        expected = np.zeros(BIG.size, np.float32)
        expected[20:27] = np.arange(7)
        np.testing.assert_array_equal(server.center, expected)


def test_a_slow_worker_pulls_while_others_commit() -> None:
    config = config_of(make_rule("downpour"), 3)
    with InprocShards(config, np.zeros(BIG.size, np.float32), 2) as server:
        barrier = threading.Barrier(3)

        def work(rank: int) -> None:
            with server.client(rank) as client:
                client.join(rows=4, batches_per_epoch=20)
                barrier.wait(10)
                client.pull()
                for step in range(20):
                    client.buffer[...] = 1
                    client.push_pull(at(step))
                client.pull(last=True)
                np.testing.assert_array_equal(client.buffer[: BIG.trained_size], 60)
                client.finish()

        together(*(lambda r=r: work(r) for r in range(3)))


def test_ranges_cover_the_buffer_and_there_are_not_more_than_values() -> None:
    for count in (1, 2, 5, BIG.size, BIG.size + 3):
        ranges = ranges_of(BIG, count)
        assert [i for r in ranges for i in range(BIG.size)[r.place]] == list(range(BIG.size))
        assert sum(r.layout.trained_size for r in ranges) == BIG.trained_size
    config = ServerConfig(LAYOUT, make_rule("downpour"), 1)
    with pytest.raises(ConfigError, match="more servers than weights"):
        shards_of(config, 9)
    rows = TableSpec("ads", RowStore(2, "sgd", "zeros", name="ads").settings)
    assert len(shards_of(config, 9, TablesOfRun((rows,), ""))) == 9


def test_a_decision_of_another_shape_is_refused() -> None:
    from sparkdl.ps.kinds import Decision

    for value in (None, [1], [1, [0, 0], [[1, 2]]], ["x", [0, 0], []], [1, [0], []], {}):
        with pytest.raises(ProtocolError, match="malformed"):
            Decision.from_wire(value)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("large", [False, True])
def test_rows_of_gradients_are_joined_as_by_one_server(
    count: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids that two ranks have stay apart, in the order of the ranks; one rank has no batch."""
    config = config_of(make_rule("bsp", payload="gradient"), 3)
    dense = BIG.without([0])

    def run(server: Any) -> dict[int, tuple[list[Any], FloatArray]]:
        found: dict[int, tuple[list[Any], FloatArray]] = {}
        clients = [server.client(rank) for rank in range(3)]

        def work(client: Client) -> None:
            rank = client.session.rank
            client.join(rows=8, batches_per_epoch=2)
            for step in range(2):
                if rank == 2:
                    client.buffer[...] = 0
                    client.push_pull(at(step, rows=0))
                else:
                    indices = np.array([rank, 3], np.int32)
                    rows = sent(rank, step)[:8].reshape(2, 4)
                    client.sliced_buffer(dense.size, 1)[...] = sent(rank, step)[20:]
                    client.push_pull_slices(
                        at(step, 2 + rank), dense.size, [Slices(0, indices, rows)]
                    )
            slices = [(s.place, s.indices.tolist(), s.rows.tolist()) for s in client.round_slices]
            found[rank] = slices, client.sliced_buffer(dense.size, 1).copy()

        try:
            together(*(lambda c=c: work(c) for c in clients))
        finally:
            for client in clients:
                client.close()
        return found

    with InprocParameterServer(config, center_of(BIG)) as server:
        expected = run(server)
    if large:
        monkeypatch.setattr(
            FrameLimits, "buffer_bytes", property(lambda self: 64 + self.dense_bytes)
        )
        monkeypatch.setattr(FrameLimits, "chunk_bytes", property(lambda self: 48))
    with InprocShards(config, center_of(BIG), count) as server:
        found = run(server)
    for rank in range(3):
        assert found[rank][0] == expected[rank][0]
        assert [place for place, *_ in found[rank][0]] == [0]
        np.testing.assert_array_equal(found[rank][1], expected[rank][1])


def test_a_reply_that_says_slices_and_has_none_is_no_reply_without_slices() -> None:
    """Else the gradients of embeddings would be lost without a word."""
    config = ServerConfig(BIG, BSP(), 1)
    with InprocParameterServer(config, center_of(BIG)) as server, server.client(0) as client:
        with pytest.raises(ProtocolError, match="slices"):
            client._answered(Message(StoreKind.PUSH, flags=Flag.SLICED))
        client._answered(Message(StoreKind.PUSH))
        assert client.round_slices == ()
