"""The exchange of rows between ranks: what travels, who serves, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rank_threads import on_ranks

from sparkdl.collective.tables.exchange import TableExchange
from sparkdl.errors import ProtocolError
from sparkdl.tables.routing import owner
from sparkdl.tables.service import TableSpec
from sparkdl.tables.store import RowStore

DIM = 16


def spec(name: str = "ads", **settings: Any) -> TableSpec:
    store = RowStore(DIM, "sgd", "zeros", name=name, seed=3, **settings)
    return TableSpec(name, store.settings)


def test_a_step_sends_little_more_than_ids_rows_and_gradients() -> None:
    ids = [np.arange(0, 4000, 2), np.arange(0, 4000, 3)]

    def work(communicator: Any) -> tuple[int, int]:
        rank = communicator.rank
        exchange = TableExchange(communicator, [spec()])
        rows, number = exchange.pull("ads", ids[rank], training=True)
        assert rows.shape == (len(ids[rank]), DIM)
        exchange.push(number, np.ones_like(rows), np.ones(len(rows), np.int64))
        exchange.end_step(10, 1.0)
        remote = int((owner(ids[rank], 2) != rank).sum())
        return exchange.sent_bytes, remote

    found = on_ranks(2, work)
    sent, remote = sum(s for s, _ in found), sum(r for _, r in found)
    assert sent <= 1.05 * remote * (8 + 8 * DIM)


def test_gradients_are_weighed_by_the_rows_of_the_ranks() -> None:
    """Rates of 1: 30 rows with a gradient of 1, 10 rows with one of 5, for id 7; id 8 of one."""

    def work(communicator: Any) -> Any:
        rank = communicator.rank
        exchange = TableExchange(communicator, [spec()])
        ids = np.array([[7, 8], [7, 9]][rank])
        _, number = exchange.pull("ads", ids, training=True)
        exchange.push(number, np.full((2, DIM), [1.0, 5.0][rank], np.float32), np.ones(2, int))
        exchange.end_step([30, 10][rank], 1.0)
        rows, _ = exchange.pull("ads", np.array([7, 8, 9]), training=False)
        exchange.serve_until_done()
        return rows[:, 0]

    for rows in on_ranks(2, work):
        np.testing.assert_allclose(rows, [-2.0, -0.75, -1.25])


def test_a_rank_without_a_batch_serves_the_others() -> None:
    def work(communicator: Any) -> Any:
        rank = communicator.rank
        exchange = TableExchange(communicator, [spec("a"), spec("b")])
        if rank == 1:
            exchange.serve_step(1.0)
        else:
            for name in ("a", "b", "a"):
                _, number = exchange.pull(name, np.arange(100), training=True)
                exchange.push(number, np.ones((100, DIM), np.float32), np.ones(100, int))
            exchange.end_step(5, 1.0)
        return {name: store.export() for name, store in exchange.stores.items()}

    found = on_ranks(2, work)
    for rows in found:
        assert len(rows["b"].ids) == 0  # a pull after a push begins the pass anew
        assert (rows["a"].values == -1).all()
    assert sum(len(rows["a"].ids) for rows in found) == 100


def test_ranks_that_do_different_things_are_told() -> None:
    def work(communicator: Any) -> None:
        rank = communicator.rank
        exchange = TableExchange(communicator, [spec("a"), spec("b")])
        exchange.pull("ab"[rank], np.arange(3), training=True)

    with pytest.raises(ProtocolError, match="disagree about their tables"):
        on_ranks(2, work)
