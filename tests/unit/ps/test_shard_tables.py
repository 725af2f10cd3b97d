"""Tables on shards: rows as in one store, and every push once, whatever is sent again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inproc_shards import InprocShards
from ps_learner import LAYOUT, together

from sparkdl.coordinator.settings import Settings
from sparkdl.errors import ConfigError, ModelError, ProtocolError, SparkDLError, TransportError
from sparkdl.ps.kinds import StoreKind
from sparkdl.ps.server import ServerConfig
from sparkdl.ps.server.config import TablesOfRun
from sparkdl.ps.shards.pushes import RowPush, pack_push, unpack_push
from sparkdl.ps.shards.row_link import RowLink
from sparkdl.ps.shards.rows import ServedRows
from sparkdl.ps.shards.tables import TableService
from sparkdl.rules import make_rule
from sparkdl.tables.checkpoints import TableCheckpoints, TableReference
from sparkdl.tables.service import TableSpec
from sparkdl.tables.store import RowStore
from sparkdl.transport.frames import Flag, FrameLimits, Kind, Message

DIM = 3


def spec(name: str = "ads", **more: Any) -> TableSpec:
    settings = RowStore(DIM, "sgd", "zeros", name=name, **more).settings
    return TableSpec(name, settings, learning_rate=None)


def served(count: int, *specs: TableSpec, reference: bytes = b"", folder: str = "") -> InprocShards:
    config = ServerConfig(
        LAYOUT, make_rule("downpour"), 3, settings=Settings(3, grace_s=0.2, round_timeout_s=20)
    )
    tables = TablesOfRun(specs or (spec(),), folder, reference)
    return InprocShards(config, np.zeros(LAYOUT.size, np.float32), count, tables)


@pytest.fixture(params=[1, 3])
def server(request: Any) -> Iterator[InprocShards]:
    with served(request.param) as made:
        yield made


def rows_of(server: InprocShards, rank: int = 0, attempt: int = 0) -> ServedRows:
    return server.client(rank, attempt).open_rows([spec()])


def step(rows: ServedRows, ids: Any, gradients: Any, batch: int, rate: float = 1.0) -> None:
    ids = np.asarray(ids, np.int64)
    _, number = rows.pull("ads", ids, training=True)
    values = np.broadcast_to(np.asarray(gradients, np.float32).reshape(-1, 1), (len(ids), DIM))
    rows.push(number, values, np.ones(len(ids), np.int64))
    rows.end_step(0, batch, rate)


def test_rows_are_those_of_one_store(server: InprocShards) -> None:
    rng = np.random.default_rng(0)
    alone = RowStore(DIM, "sgd", "zeros", name="ads")
    every = rng.integers(-(2**63), 2**63 - 1, 500)
    every[:3] = (-1, 2**63 - 1, -(2**63))
    client = server.client()
    with client.open_rows([spec()]) as rows:
        for batch in range(20):
            ids = rng.choice(every, 60, replace=False)
            found, number = rows.pull("ads", ids, training=True)
            np.testing.assert_array_equal(found, alone.pull(ids))
            gradients = rng.normal(size=(60, DIM)).astype(np.float32)
            rows.push(number, gradients, np.ones(60, np.int64))
            rows.end_step(0, batch + 1, 0.1)
            alone.push(ids, gradients, 0.1)
        found, _ = rows.pull("ads", every, training=False)
        np.testing.assert_array_equal(found, alone.pull(every, create=False))
        assert client.session.bytes_sent > 20 * 60 * DIM * 4


def test_two_calls_of_one_table_are_one_step(server: InprocShards) -> None:
    """Both gradients of an id are added up, as the backward pass of one process would."""
    with rows_of(server) as rows:
        ids = np.array([5, 6], np.int64)
        numbers = [rows.pull("ads", ids, training=True)[1] for _ in range(2)]
        for number in numbers:
            rows.push(number, np.ones((2, DIM), np.float32), np.ones(2, np.int64))
        rows.end_step(0, 1, 0.5)
        np.testing.assert_array_equal(rows.pull("ads", ids, training=False)[0], -1.0)


def test_a_gradient_that_is_computed_again_counts_once(server: InprocShards) -> None:
    with rows_of(server) as rows:
        ids = np.array([5], np.int64)
        for _ in range(2):
            _, number = rows.pull("ads", ids, training=True)
            rows.push(number, np.ones((1, DIM), np.float32), np.ones(1, np.int64))
        rows.end_step(0, 1, 1.0)
        np.testing.assert_array_equal(rows.pull("ads", ids, training=False)[0], -1.0)


def test_a_scaled_loss_is_divided_out_and_an_overflow_takes_no_step(server: InprocShards) -> None:
    with rows_of(server) as rows:
        ids = np.array([5], np.int64)
        for scale, gradient in ((8.0, 8.0), (np.inf, np.inf)):
            _, number = rows.pull("ads", ids, training=True)
            rows.push(number, np.full((1, DIM), gradient, np.float32), np.ones(1, np.int64))
            rows.end_step(0, 1, 1.0, scale)
        np.testing.assert_array_equal(rows.pull("ads", ids, training=False)[0], -1.0)


def test_pushes_of_three_ranks_add_up_exactly(server: InprocShards) -> None:
    """A counter table: gradient -1, rate 1; each push counts once."""
    ids = np.arange(50) * 7919

    def work(rank: int) -> None:
        with rows_of(server, rank) as rows:
            for batch in range(30):
                step(rows, ids, -np.ones(50), batch + 1)

    together(*(lambda r=r: work(r) for r in range(3)))
    with rows_of(server) as rows:
        np.testing.assert_array_equal(rows.pull("ads", ids, training=False)[0], 90.0)


def test_batches_that_are_trained_again_count_once(server: InprocShards) -> None:
    """A worker dies after its pushes of two batches; the next attempt begins at the first."""
    ids = np.arange(20)
    with rows_of(server, attempt=0) as rows:
        step(rows, ids, -np.ones(20), 1)
        step(rows, ids, -np.ones(20), 2)
    with rows_of(server, attempt=1) as rows:
        for batch in (1, 2, 3):
            step(rows, ids, -np.ones(20), batch)
        np.testing.assert_array_equal(rows.pull("ads", ids, training=False)[0], 3.0)
    with rows_of(server, attempt=0) as late, pytest.raises(TransportError, match="superseded"):
        step(late, ids, -np.ones(20), 4)


def test_a_push_that_is_sent_again_counts_once() -> None:
    service = TableService([spec()])
    told, body = pack_push([RowPush("ads", np.array([3]), -np.ones((1, DIM), np.float32))])
    for sequence, flag in ((1, Flag.NONE), (1, Flag.DUPLICATE), (2, Flag.NONE)):
        message = Message(
            StoreKind.ROWS_PUSH, rank=0, sequence=sequence, batch=sequence, learning_rate=1.0,
            meta={"parts": told}, body=body,
        )  # fmt: skip
        assert service.answer(message).flags == flag
    np.testing.assert_array_equal(service.stores["ads"].pull(np.array([3])), 2.0)


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("piece", [0, 1, 2, 5])
def test_a_worker_that_dies_between_two_pieces_of_a_push_loses_no_row(
    server: InprocShards, monkeypatch: Any, piece: int, changes: bool
) -> None:
    """Before, what the dead worker had not sent yet was taken for what it had sent."""
    ids = np.arange(400)
    monkeypatch.setattr(FrameLimits, "chunk_bytes", property(lambda self: 1500))
    sent = 0

    def push(rows: ServedRows, ids: Any, batch: int, die_at: int = -1) -> None:
        whole = RowLink._request

        def request(self: Any, shard: int, message: Message, body: Any) -> Message:
            nonlocal sent
            sent += 1
            if sent == die_at:
                raise ConnectionError("killed")
            return whole(self, shard, message, body)

        values = np.full((len(ids), DIM), 1.0 if changes else -1.0, np.float32)
        push = RowPush("ads", np.asarray(ids), values, None, None, [-1] * rows._link.num_shards)
        with monkeypatch.context() as patched:
            patched.setattr(RowLink, "_request", request)
            rows._link.push([push], 0, batch, 1.0, changes=changes)

    with rows_of(server, attempt=0) as rows:
        push(rows, ids, 1)
        sent = 0
        with pytest.raises(ConnectionError):
            push(rows, ids, 2, die_at=piece + 1)
    sent = 0
    with rows_of(server, attempt=1) as rows, pytest.raises(ConnectionError):
        push(rows, ids[::-1], 2, die_at=piece + 2)  # rows in another order, as a window's may be
    with rows_of(server, attempt=2) as rows:
        for batch in (1, 2, 3):
            push(rows, ids, batch)
        found, _ = rows.pull("ads", ids, training=False)
        np.testing.assert_array_equal(found, 3.0)


def test_large_steps_travel_in_pieces(server: InprocShards, monkeypatch: Any) -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 2**62, 4000)
    with rows_of(server) as rows:
        monkeypatch.setattr(type(rows._link._limits[0]), "chunk_bytes", property(lambda self: 1000))
        step(rows, np.unique(ids), -np.ones(len(np.unique(ids))), 1)
        found, _ = rows.pull("ads", np.unique(ids), training=False)
        np.testing.assert_array_equal(found, 1.0)


def test_tables_are_written_while_others_push_and_any_number_of_shards_loads_them(
    tmp_path: Path,
) -> None:
    ids = np.arange(3000)
    files = TableCheckpoints(str(tmp_path))
    with served(3, spec(tracks=True), folder=str(tmp_path)) as server, server.client(0) as client:
        rows = client.open_rows([spec(tracks=True)])
        step(rows, ids, -np.ones(3000), 1)
        step(rows, ids[:5], -np.ones(5), 2)
        reference = files.after(b"", 7, ("ads",))
        meta = {"reference": reference.to_bytes().decode(), "clocks": {"ads": 2}}
        for shard in server.shards:
            with shard.driver() as driver:
                driver.request(Message(StoreKind.ROWS_SAVE, meta=dict(meta)))
        files.finish(reference, 3)
    with served(2, spec(tracks=True), reference=reference.to_bytes()) as server:
        rows = server.client(0).open_rows([spec(tracks=True)])
        found, _ = rows.pull("ads", ids, training=False)
        np.testing.assert_array_equal(found[:5], 2.0)
        np.testing.assert_array_equal(found[5:], 1.0)
        rows.close()
        assert sum(len(s.dispatcher.service._tables.stores["ads"]) for s in server.shards) == 3000
    assert TableReference.from_bytes(reference.to_bytes()).step == 7


def test_what_does_not_fit_is_refused_and_changes_nothing(server: InprocShards) -> None:
    told, body = pack_push([RowPush("ads", np.array([3]), np.ones((1, DIM), np.float32))])
    shard = server.shards[0].dispatcher.service
    wrong: list[tuple[StoreKind, dict[str, Any], Any]] = [
        (StoreKind.ROWS_PULL, {"table": "other"}, None),
        (StoreKind.ROWS_PULL, {"table": "ads"}, np.zeros(7, np.uint8)),
        (StoreKind.ROWS_PUSH, {"parts": [["ads", -1, False]]}, body),
        (StoreKind.ROWS_PUSH, {"parts": [["ads", 2**40, False]]}, body),
        (StoreKind.ROWS_PUSH, {"parts": [["ads", 1, False]]}, body[:-4]),
        (StoreKind.ROWS_PUSH, {"parts": "ads"}, body),
        (StoreKind.ROWS_PUSH, {}, body),
        (StoreKind.ROWS_PUSH, {"parts": [*told, ["other", 1, False]]}, body),
        (StoreKind.ROWS_SAVE, {"reference": "{}"}, None),
        (StoreKind.ROWS_SAVE, {}, None),
    ]
    for kind, meta, sent in wrong:
        message = Message(kind, rank=0, sequence=1, batch=1, meta=meta, body=sent)
        [(_, reply)] = shard.receive(1, message, 0.0)
        assert reply.kind is Kind.ERROR
    assert not len(shard._tables.stores["ads"])
    with pytest.raises(ProtocolError):
        unpack_push(told, body, {})


def test_a_gradient_that_is_not_finite_is_named(server: InprocShards) -> None:
    with rows_of(server) as rows, pytest.raises(SparkDLError, match="not finite"):
        step(rows, [9], [np.nan], 1)
    with rows_of(server) as rows, pytest.raises(ConfigError, match="ShardedClassifier"):
        rows.learn(1, np.ones(1, np.float32), trying=False)
    assert issubclass(ModelError, SparkDLError)
