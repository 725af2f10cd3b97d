"""The exchange of rows between ranks: what travels, who serves, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rank_threads import on_ranks

from sparkdl.collective.table_exchange import TableExchange
from sparkdl.errors import ModelError, ProtocolError
from sparkdl.tables.classes import ClassSpec, Margin
from sparkdl.tables.index import owner
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


IDS = np.random.default_rng(0).integers(0, 500, (2, 4, 2, 90))
"""By rank, step and call."""


def steps_of_two_tables(communicator: Any, tells: str) -> Any:
    """Rows after four steps, what came beside in the last, and the exchanges of each step.

    Args:
        tells: Whether ranks tell their next ids: ``'nothing'``; ``'right'``; ``'wrong'``, rank 1
            tells others in its second step.
    """
    rank, exchanges, sent = communicator.rank, [], [0]
    all_to_all = communicator.all_to_all

    def count(parts: Any) -> Any:
        sent[-1] += 1
        return all_to_all(parts)

    communicator.all_to_all = count
    exchange = TableExchange(communicator, [spec("a"), spec("b")])
    own = [[np.unique(ids) for ids in step] for step in IDS[rank]]
    for number, step in enumerate(own):
        sent.append(0)
        if rank == 1 and number == 3:
            beside = exchange.serve_step(1.0)
            break
        following = [] if number == 3 or tells == "nothing" else own[number + 1]
        if tells == "wrong" and rank == 1 and number == 1:
            following = [following[0], following[1] + 1]
        if rank == 1 and number == 2:  # its last batch
            following = []
        for name, ids in zip("ab", step, strict=True):
            rows, pulled = exchange.pull(name, ids, training=True)
            exchange.push(pulled, rows + ids[:, None] % 7, np.ones(len(ids), int))
        beside = exchange.end_step(
            10 + 20 * rank, 0.1, following=list(zip("ab", following, strict=False)),
            beside=np.full(3 + rank, number, np.uint8),
        )  # fmt: skip
    exchanges = sent[1:]
    rows = {name: store.export() for name, store in exchange.stores.items()}
    return rows, [part.tolist() for part in beside], exchanges


@pytest.mark.parametrize("tells", ["right", "wrong"])
def test_ids_that_are_told_before_give_the_same_rows_in_fewer_exchanges(tells: str) -> None:
    usual = on_ranks(2, lambda c: steps_of_two_tables(c, "nothing"))
    found = on_ranks(2, lambda c: steps_of_two_tables(c, tells))
    for (rows, beside, exchanges), (wanted, _, before) in zip(found, usual, strict=True):
        for name in "ab":
            np.testing.assert_array_equal(rows[name].ids, wanted[name].ids)
            np.testing.assert_array_equal(rows[name].values, wanted[name].values)
        assert beside == [[3, 3, 3], []]
        assert before == [5, 5, 5, 5]
        assert exchanges == ([5, 3, 3, 3] if tells == "right" else [5, 3, 4, 3])


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_a_scaled_loss_divides_gradients_and_not_how_often_an_id_was_seen(scale: float) -> None:
    def work(communicator: Any) -> Any:
        exchange = TableExchange(communicator, [spec(tracks=True)])
        ids = np.arange(20)
        _, number = exchange.pull("ads", ids, training=True)
        exchange.push(number, np.full((20, DIM), scale, np.float32), np.full(20, 16))
        exchange.end_step(10, 1.0, scale)
        return exchange.stores["ads"].export()

    for found in on_ranks(2, work):
        assert (found.values == -1).all()
        assert (found.counts == 32).all()


def test_ranks_that_do_different_things_are_told() -> None:
    def work(communicator: Any) -> None:
        rank = communicator.rank
        exchange = TableExchange(communicator, [spec("a"), spec("b")])
        exchange.pull("ab"[rank], np.arange(3), training=True)

    with pytest.raises(ProtocolError, match="disagree about their tables"):
        on_ranks(2, work)


CLASSES = 200
FEATURES = np.random.default_rng(1).normal(size=(60, DIM)).astype(np.float32)
LABELS = np.random.default_rng(2).integers(0, CLASSES, 60)


def classes_spec() -> TableSpec:
    store = RowStore(DIM, "sgd", "uniform", name="faces", seed=3)
    return TableSpec("faces", store.settings, None, ClassSpec(CLASSES, Margin(scale=8.0), chunk=32))


def step_of_classes(communicator: Any, edges: Any) -> Any:
    """Losses, gradient by the features (of the mean over all rows) and centers of a rank."""
    first, end = edges[communicator.rank : communicator.rank + 2]
    exchange = TableExchange(communicator, [classes_spec()])
    losses, gradient = np.zeros(0), np.zeros((0, DIM))
    if first == end:
        exchange.serve_step(0.5)
    else:
        rows = end - first
        exchange.begin_step(rows, 0.5)
        softmax, number = exchange.measure(
            "faces", classes_spec().classes, FEATURES[first:end], LABELS[first:end], training=True
        )  # fmt: skip
        upstream = np.full(rows, 1 / rows, np.float32)
        tried = exchange.learn(number, upstream, trying=True)
        _, number = exchange.measure(
            "faces", classes_spec().classes, FEATURES[first:end], LABELS[first:end], training=True
        )  # fmt: skip
        taken = exchange.learn(number, upstream, trying=False)
        np.testing.assert_array_equal(tried, taken)
        exchange.end_step(rows, 0.5)
        losses, gradient = softmax.losses, taken * rows / 60
    return losses, gradient, exchange.stores["faces"].export(), exchange.sent_bytes


@pytest.mark.parametrize("edges", [(0, 30, 60), (0, 0, 60), (0, 7, 7, 60)])
def test_ranks_with_classes_are_one_softmax(edges: Any) -> None:
    [(losses, gradient, centers, _)] = on_ranks(1, lambda c: step_of_classes(c, (0, 60)))
    found = on_ranks(len(edges) - 1, lambda c: step_of_classes(c, edges))
    np.testing.assert_allclose(np.concatenate([f[0] for f in found]), losses, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([f[1] for f in found]), gradient, atol=1e-7)
    ids = np.concatenate([f[2].ids for f in found])
    values = np.concatenate([f[2].values for f in found])
    np.testing.assert_array_equal(np.sort(ids), np.arange(CLASSES))
    np.testing.assert_allclose(values[np.argsort(ids)], centers.values[np.argsort(centers.ids)],
                               atol=1e-6)  # fmt: skip


def test_a_step_of_classes_sends_features_and_their_gradients() -> None:
    """Of a step that is tried, and one that is taken: 8 bytes a number, 32 a row and other rank."""
    found = on_ranks(2, lambda c: step_of_classes(c, (0, 30, 60)))
    sent = sum(f[3] for f in found)
    of_rows = 4 * 60 * DIM * 2 + (8 + 16 + 16 + 8) * 60
    assert 2 * of_rows <= sent <= 2 * of_rows + 2000


def test_centers_have_one_step_in_a_step_of_the_model() -> None:
    def work(communicator: Any) -> None:
        exchange = TableExchange(communicator, [classes_spec()])
        exchange.begin_step(30, 0.5)
        for _ in range(2):
            _, number = exchange.measure(
                "faces", classes_spec().classes, FEATURES[:30], LABELS[:30], training=True
            )  # fmt: skip
            exchange.learn(number, np.ones(30, np.float32), trying=False)

    with pytest.raises(ModelError, match="trained twice"):
        on_ranks(2, work)
