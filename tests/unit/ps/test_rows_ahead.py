"""Rows that are pulled ahead, and rows that are exchanged in windows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from inproc_shards import InprocShards
from ps_learner import LAYOUT

from sparkdl.coordinator.settings import Settings
from sparkdl.ps.server import ServerConfig
from sparkdl.ps.server.config import TablesOfRun
from sparkdl.ps.shards.row_link import Fetched, RowLink
from sparkdl.ps.shards.rows import RowsOfWorker, ServedRows, WindowRows, _Coming
from sparkdl.rules import make_rule
from sparkdl.tables.service import TableSpec
from sparkdl.tables.store import RowStore

DIM = 4


def spec(rule: str = "sgd", start: str = "zeros") -> TableSpec:
    return TableSpec("ads", RowStore(DIM, rule, start, name="ads").settings, learning_rate=None)


def served(count: int, tables: TableSpec) -> InprocShards:
    config = ServerConfig(
        LAYOUT, make_rule("downpour"), 2, settings=Settings(2, grace_s=0.2, round_timeout_s=20)
    )
    center = np.zeros(LAYOUT.size, np.float32)
    return InprocShards(config, center, count, TablesOfRun((tables,), ""))


@pytest.fixture(params=[1, 3])
def server(request: Any) -> Iterator[InprocShards]:
    with served(request.param, spec()) as made:
        yield made


def batches(count: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids, of which neighbours share half, and gradients."""
    rng = np.random.default_rng(seed)
    return [
        (np.unique(rng.integers(-50, 50, 60)), rng.normal(size=(60, DIM)).astype(np.float32))
        for _ in range(count)
    ]


def train(rows: RowsOfWorker, work: list[tuple[np.ndarray, np.ndarray]], *, ahead: bool) -> None:
    for number, (ids, gradients) in enumerate(work):
        following = work[number + 1][0] if ahead and number + 1 < len(work) else None
        rows.begin_batch(None if following is None else lambda f=following: [("ads", f)])
        _, pulled = rows.pull("ads", ids, training=True)
        rows.push(pulled, gradients[: len(ids)], np.ones(len(ids), np.int64))
        rows.end_step(0, number + 1, 0.1)


def begin_twice(rows: RowsOfWorker, wanted: Any) -> None:
    for _ in range(2):
        rows.begin_batch(wanted)


def counted(link: RowLink, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables of which rows are pulled over a link, pull by pull."""
    asked: list[str] = []
    fetch = link.fetch

    def note(table: str, ids: Any, *, training: bool) -> Any:
        asked.append(table)
        return fetch(table, ids, training=training)

    monkeypatch.setattr(link, "fetch", note)
    return asked


def everything(server: InprocShards) -> np.ndarray:
    with server.client(1).open_rows([spec()]) as rows:
        return rows.pull("ads", np.arange(-50, 50), training=False)[0]


@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
@pytest.mark.parametrize("count", [1, 3])
def test_one_worker_trains_as_without_rows_ahead(
    count: int, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for ahead in (False, True):
        with served(count, spec(rule, "uniform")) as made:
            with made.client().open_rows([spec(rule, "uniform")]) as rows:
                assert isinstance(rows, ServedRows)
                asked = counted(rows._link, monkeypatch)
                train(rows, batches(30), ahead=ahead)
                assert len(asked) == (1 if ahead else 30)  # ahead: all but the first batch
            results.append(everything(made))
    np.testing.assert_array_equal(results[0], results[1])


def test_rows_that_came_ahead_have_every_change_since() -> None:
    fetched = Fetched(np.zeros((3, DIM), np.float32), [0])
    coming: Future[Fetched] = Future()
    coming.set_result(fetched)
    rows = _Coming("ads", np.arange(3), coming)
    for places, value in (([0, 1], 1.0), ([1, 2], 2.0)):
        rows.newer.append((np.array(places), np.full((2, DIM), value, np.float32)))
    assert rows.taken().rows[:, 0].tolist() == [1, 2, 2]


def test_ids_that_were_not_expected_are_pulled(server: InprocShards) -> None:
    with server.client().open_rows([spec()]) as rows:
        rows.begin_batch(lambda: [("ads", np.array([1, 2]))])
        rows.begin_batch(None)
        found, _ = rows.pull("ads", np.array([2, 3]), training=True)
        assert found.shape == (2, DIM)


def test_a_reader_of_ids_that_fails_is_told_once(server: InprocShards) -> None:
    def broken() -> Any:
        raise ValueError("no such column")

    with server.client().open_rows([spec()]) as rows:
        with pytest.warns(RuntimeWarning, match="not pulled ahead.*no such column"):
            begin_twice(rows, broken)
        train(rows, batches(3), ahead=True)


def test_two_layers_of_one_table_are_pulled_ahead(server: InprocShards) -> None:
    """Both have the values after the push of ids that they share with the batch before."""
    ids = np.array([3, 4]), np.array([4, 5])
    with server.client().open_rows([spec()]) as rows:
        for number in range(3):
            rows.begin_batch(lambda: [("ads", i) for i in ids])
            numbers = []
            for wanted in ids:
                found, pulled = rows.pull("ads", wanted, training=True)
                times = [1.0 if i in (3, 5) else 2.0 for i in wanted]
                np.testing.assert_allclose(found[:, 0], np.array(times) * number)
                numbers.append(pulled)
            for pulled in numbers:
                rows.push(pulled, np.full((2, DIM), -1, np.float32), np.ones(2, np.int64))
            rows.end_step(0, number + 1, 1.0)


def test_staleness_counts_the_pushes_of_others_alone(server: InprocShards) -> None:
    ids = np.arange(40)
    with server.client(0).open_rows([spec()]) as one, server.client(1).open_rows([spec()]) as two:
        ones = np.ones((40, DIM), np.float32), np.ones(40, np.int64)
        for batch in range(3):
            one.begin_batch(lambda: [("ads", ids)])
            _, pulled = one.pull("ads", ids, training=True)
            if batch == 2:  # two pushes of the other worker between pull and push
                train(two, [(ids, ones[0])] * 2, ahead=False)
            one.push(pulled, *ones)
            one.end_step(0, batch + 1, 0.1)
    for shard in server.shards:
        numbers = {m.name: m.value for m in shard.dispatcher.service.metrics()}
        assert numbers["rows_staleness_most"] == 2
        assert numbers["rows_staleness"] == pytest.approx(2 / 5)


def in_windows(
    server: InprocShards, rank: int = 0, attempt: int = 0, tables: TableSpec | None = None,
    workers: int = 2,
) -> WindowRows:  # fmt: skip
    link = server.client(rank, attempt)._open_link([tables or spec()])
    return WindowRows(link, [tables or spec()], workers)


# -- windows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("count", [1, 3])
def test_one_worker_with_windows_is_one_store(count: int, rule: str) -> None:
    tables, work = spec(rule, "uniform"), batches(24)
    alone = tables.store()
    for ids, gradients in work:
        alone.push(ids, gradients[: len(ids)], 0.1)
    with served(count, tables) as made:
        with in_windows(made, tables=tables, workers=1) as rows:
            for first in range(0, len(work), 6):
                train(rows, work[first : first + 6], ahead=False)
                rows.end_window(0, first + 6)
        with made.client(0, 1).open_rows([tables]) as rows:
            found, _ = rows.pull("ads", np.arange(-50, 50), training=False)
    np.testing.assert_allclose(found, alone.pull(np.arange(-50, 50), create=False), atol=1e-6)


def test_two_workers_send_shares_and_take_what_others_changed(server: InprocShards) -> None:
    """Gradient -1, rate 1: a window of three batches is +3, of which half is sent."""
    own, shared = np.arange(100, 140), np.arange(20)
    client = server.client(0)
    first = WindowRows(client._open_link([spec()]), [spec()], 2)
    with first as one, in_windows(server, 1) as two:

        def window(rows: RowsOfWorker, ids: np.ndarray, number: int) -> np.ndarray:
            for batch in range(3):
                rows.begin_batch(None)
                found, pulled = rows.pull("ads", ids, training=True)
                rows.push(pulled, -np.ones((len(ids), DIM), np.float32), np.ones(len(ids), int))
                rows.end_step(0, 3 * number + batch + 1, 1.0)
            rows.end_window(0, 3 * number + 3)
            return found[:, 0]

        np.testing.assert_array_equal(window(one, np.concatenate([shared, own]), 0), 2.0)
        # the other begins from half of the three steps of the first, and sends half of its own
        np.testing.assert_array_equal(window(two, shared, 0), 1.5 + 2)
        before = client.session.bytes_received
        found = window(one, np.concatenate([shared, own]), 1)
        # local 3, then three steps, of which two are done at the last pull: nothing came yet
        np.testing.assert_array_equal(found, 3.0 + 2)
        came = client.session.bytes_received - before
        assert 20 * DIM * 4 <= came < 60 * DIM * 4  # the shared rows alone, and heads
        found = window(one, np.concatenate([shared, own]), 2)
        # 6, and the half of three steps that the other has sent
        np.testing.assert_array_equal(found[:20], 6.0 + 1.5 + 2)
        np.testing.assert_array_equal(found[20:], 6.0 + 2)
    with server.client(0, 1).open_rows([spec()]) as rows:
        found, _ = rows.pull("ads", np.array([0, 100]), training=False)
    # halves of what is not sent yet: of 3; of 6 - 1.5; of 9 - 3.75
    alone = 1.5 + 2.25 + 2.625
    np.testing.assert_array_equal(found[:, 0], [alone + 1.5, alone])


def test_a_row_that_no_window_touched_is_asked_for_again(server: InprocShards) -> None:
    with in_windows(server) as rows:
        train(rows, [(np.array([1, 2]), np.ones((2, DIM), np.float32))], ahead=False)
        rows.end_window(0, 1)
        train(rows, [(np.array([2]), np.ones((1, DIM), np.float32))], ahead=False)
        rows.end_window(0, 2)
        with server.client(1).open_rows([spec()]) as other:
            train(other, [(np.array([1, 2]), -np.ones((2, DIM), np.float32))] * 10, ahead=False)
        found, _ = rows.pull("ads", np.array([1, 2]), training=True)
        np.testing.assert_allclose(
            found[0], 1 - 0.05, atol=1e-6
        )  # as on the shards: half of its own -.1
        np.testing.assert_allclose(found[1], -0.2, atol=1e-6)  # its own, as of the last window


def test_a_window_that_a_former_attempt_has_brought_counts_once(server: InprocShards) -> None:
    work = [(np.arange(10), -np.ones((10, DIM), np.float32))] * 2
    for attempt in range(2):
        with in_windows(server, 0, attempt) as rows:
            train(rows, work, ahead=False)
            rows.end_window(0, 2)
            found, _ = rows.pull("ads", np.arange(10), training=True)
    np.testing.assert_allclose(found, 0.1, atol=1e-6)  # half of two steps of .1, once
    np.testing.assert_allclose(everything(server)[50:60], 0.1, atol=1e-6)
