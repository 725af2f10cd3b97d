"""Rows of tables in rounds: put aside, decided, and stepped once by the mean of all members."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.errors import ProtocolError, SparkDLError
from sparkdl.ps.kinds import DECISION, Decision, StoreKind
from sparkdl.ps.shards.pushes import RowPush, pack_push
from sparkdl.ps.shards.tables import TableService
from sparkdl.tables.service import TableSpec
from sparkdl.tables.store import RowStore
from sparkdl.transport.frames import Message

DIM = 2
START = Decision()


def service(rule: str = "sgd") -> TableService:
    store = RowStore(DIM, rule, "zeros", name="ads")
    return TableService([TableSpec("ads", store.settings)])


def stage(
    shard: TableService, rank: int, ids: Any, values: Any, *, rows: int, sequence: int = 1,
    batch: int = 1, attempt: int = 0, piece: tuple[int, int] = (0, 1),
    decision: Decision = START,
) -> None:  # fmt: skip
    gradients = np.broadcast_to(np.float32(values), (len(ids), DIM)).copy()
    told, body = pack_push(
        [RowPush("ads", np.asarray(ids, np.int64), gradients)] if len(ids) else []
    )
    message = Message(
        StoreKind.ROWS_STAGE, rank=rank, attempt=attempt, sequence=sequence, batch=batch, rows=rows,
        learning_rate=1.0, meta={"parts": told, "piece": list(piece), DECISION: decision.to_wire()},
        body=body,
    )  # fmt: skip
    shard.answer(message)
    body[:] = 255  # as a connection's buffer, which the next frame overwrites


def rows(shard: TableService, ids: Any, decision: Decision, rank: int = 0) -> list[float]:
    body = np.asarray(ids, np.int64).view(np.uint8)
    message = Message(
        StoreKind.ROWS_PULL, rank=rank, body=body, total=body.size,
        meta={"table": "ads", "training": True, DECISION: decision.to_wire()},
    )  # fmt: skip
    found = shard.answer(message).body
    assert found is not None
    return list(found.view(np.float32).reshape(-1, DIM)[:, 0])


def test_a_round_is_the_mean_by_rows_of_its_members_alone() -> None:
    shard = service()
    stage(shard, 0, [1, 2], -1.0, rows=3)
    stage(shard, 1, [2, 3], -5.0, rows=1)
    stage(shard, 2, [3], -100.0, rows=4)  # is not named: it died before it told the coordinator
    assert rows(shard, [1, 2, 3], Decision()) == [0.0, 0.0, 0.0]
    decided = Decision(1, [(0, 0, 1), (1, 0, 1)])
    assert rows(shard, [1, 2, 3], decided) == [0.75, 0.75 + 1.25, 1.25]
    assert rows(shard, [1, 2, 3], decided, rank=1) == [0.75, 2.0, 1.25]  # once
    assert shard.stores["ads"].clock == 1
    stage(shard, 0, [1], -1.0, rows=1, sequence=2, batch=2, decision=decided)
    stage(shard, 1, [], 0.0, rows=0, sequence=2, batch=2, decision=decided)
    assert rows(shard, [1], Decision(2, [(0, 0, 2), (1, 0, 2)])) == [1.75]


def test_a_shard_that_nobody_asks_hears_of_the_round_with_the_next_part() -> None:
    shard = service()
    stage(shard, 0, [1], -1.0, rows=1)
    decided = Decision(1, [(0, 0, 1)])
    stage(shard, 0, [1], -1.0, rows=1, sequence=2, batch=2, decision=decided)
    assert rows(shard, [1], decided) == [1.0]


def test_pieces_make_one_step_and_one_that_is_sent_again_counts_once() -> None:
    shard = service("adagrad")
    for piece in (0, 1, 1, 0):
        stage(shard, 0, [piece], -1.0, rows=1, piece=(piece, 2))
    first, second = rows(shard, [0, 1], Decision(1, [(0, 0, 1)]))
    alone = service("adagrad")
    stage(alone, 0, [0], -1.0, rows=1)
    assert [first, second] == rows(alone, [0], Decision(1, [(0, 0, 1)])) * 2


def test_parts_that_are_not_here_and_rounds_that_are_not_next_are_refused() -> None:
    shard = service()
    stage(shard, 0, [1], -1.0, rows=1, piece=(0, 2))
    for decision in (Decision(1, [(0, 0, 1)]), Decision(1, [(1, 0, 1)])):
        with pytest.raises(ProtocolError, match="of a round are not on this shard"):
            rows(shard, [1], decision)
    with pytest.raises(ProtocolError, match="not the next one"):
        rows(shard, [1], Decision(2, []))
    with pytest.raises(ProtocolError, match="malformed"):
        stage(shard, 0, [1], -1.0, rows=1, piece=(0,))  # type: ignore[arg-type]
    assert len(shard.stores["ads"]) == 0


def test_another_attempt_takes_the_place_of_the_one_that_died() -> None:
    shard = service()
    stage(shard, 0, [1], -1.0, rows=1)
    stage(shard, 0, [1], -7.0, rows=1, attempt=1)
    with pytest.raises(SparkDLError, match="superseded"):
        stage(shard, 0, [1], -1.0, rows=1)
    assert rows(shard, [1], Decision(1, [(0, 1, 1)])) == [7.0]


def test_weights_that_go_back_behind_the_rows_are_refused() -> None:
    shard = service()
    stage(shard, 0, [1], -1.0, rows=1, batch=5)
    decided = Decision(1, [(0, 0, 1)])
    assert rows(shard, [1], decided) == [1.0]
    with pytest.raises(ProtocolError, match="rows of tables are ahead of the weights"):
        stage(shard, 0, [1], -1.0, rows=1, sequence=2, batch=1, attempt=1, decision=decided)
    assert rows(shard, [1], Decision(0), rank=-1) == [1.0]  # a driver that asked earlier
