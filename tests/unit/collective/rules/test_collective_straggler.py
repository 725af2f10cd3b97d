"""Steps that go on without a late rank."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from rank_threads import on_ranks, part, vector

from sparkdl.collective.rules import StragglerDrop
from sparkdl.errors import ConfigError, TransportError
from sparkdl.weights import FloatArray, Layout

LAYOUT = Layout.of([("a", (5,), "float32")], [("m", (2,), "float32")])
N = LAYOUT.size


def values(step: int, rank: int) -> FloatArray:
    return vector(100 * step + rank, N)


def run(
    rule: StragglerDrop, ranks: int, steps: int, seconds: Any, rows: Any = lambda step, rank: 2
) -> list[tuple[list[FloatArray], int, float]]:
    """Each rank's applied buffers, dropped batches and wall time; ``seconds`` a batch takes."""

    def work(c: Any) -> tuple[list[FloatArray], int, float]:
        exchange = rule.open(c, LAYOUT)
        applied: list[FloatArray] = []
        c.barrier()
        began = time.monotonic()
        for step in range(steps):

            def compute(out: FloatArray, step: int = step) -> None:
                time.sleep(seconds(step, c.rank))
                out[:] = values(step, c.rank)

            n = rows(step, c.rank)
            exchange.take_step([(compute, n)] if n else [], lambda f: applied.append(f.copy()))
        took = time.monotonic() - began
        c.barrier()
        exchange.close()
        return applied, exchange.dropped, took

    return on_ranks(ranks, work)


def test_nobody_is_dropped_where_all_are_alike():
    results = run(StragglerDrop(patience=0.0, grace_s=5.0), 3, 5, lambda step, rank: 0.01)
    for applied, dropped, _ in results:
        assert dropped == 0
        for step, got in enumerate(applied):
            want = np.mean([values(step, r) for r in range(3)], axis=0)
            np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_slow_rank_is_left_out_and_the_divisor_is_right():
    others_done = threading.Event()

    def seconds(step: int, rank: int) -> float:
        if (step, rank) == (2, 0):  # the last step has begun without rank 1
            others_done.set()
        if (step, rank) == (1, 1):
            assert others_done.wait(60.0), "the others wait for this rank"
        return 0.05

    results = run(
        StragglerDrop(patience=1.0, grace_s=0.5), 3, 3, seconds, lambda step, rank: [2, 5, 4][rank]
    )
    for applied, _, _ in results:
        assert len(applied) == 3
        want = (2 * values(1, 0) + 4 * values(1, 2)) / 6
        np.testing.assert_allclose(applied[1], want, atol=1e-6)
    assert [d for _, d, _ in results][::2] == [0, 0]
    assert 1 <= results[1][1] <= 2  # the third batch too, if the third step was over by then
    for step in range(3):
        assert len({applied[step].tobytes() for applied, _, _ in results}) == 1


def test_a_rank_that_is_always_slow_does_not_slow_the_others():
    results = run(
        StragglerDrop(patience=0.5, grace_s=0.0), 3, 24, lambda s, rank: 0.1 if rank == 2 else 0.01
    )
    assert results[2][1] >= 12  # at half of the steps at least the others did not wait
    assert len({np.concatenate(applied).tobytes() for applied, _, _ in results}) == 1


def test_the_others_wait_once_the_backlog_is_full():
    results = run(
        StragglerDrop(patience=0.0, grace_s=0.0, backlog=1),
        2,
        8,
        lambda s, rank: 0.2 if rank else 0.001,
    )
    assert results[0][2] > 0.5
    assert len(results[1][0]) == 8


def test_at_least_a_share_is_waited_for():
    """With least=1 nobody is dropped, however late."""
    results = run(
        StragglerDrop(least=1.0, patience=0.0, grace_s=0.0), 2, 3, lambda s, rank: 0.08 * rank
    )
    assert [d for _, d, _ in results] == [0, 0]
    np.testing.assert_allclose(results[0][0][2], (values(2, 0) + values(2, 1)) / 2, atol=1e-6)


def test_a_rank_without_rows_blocks_nobody_and_counts_for_nothing():
    results = run(
        StragglerDrop(least=1.0), 2, 4, lambda s, r: 0.005,
        lambda step, rank: 3 if step < 2 + rank else 0,
    )  # fmt: skip
    for applied, dropped, _ in results:
        assert len(applied) == 3  # in the fourth step nobody had rows
        assert dropped == 0
        np.testing.assert_array_equal(applied[2], values(2, 1))


def test_the_world_of_one_and_reduce():
    def work(c: Any) -> FloatArray:
        exchange = StragglerDrop().open(c, LAYOUT)
        exchange.buffer[:] = values(0, 0)
        assert exchange.reduce(exchange.fill([part(values(0, 0), 3)]))
        got = exchange.buffer.copy()
        assert not exchange.reduce(0)
        exchange.close()
        return got

    np.testing.assert_array_equal(on_ranks(1, work)[0], values(0, 0))


def test_an_error_in_a_batch_ends_all_ranks_and_leaves_no_thread():
    def work(c: Any) -> None:
        exchange = StragglerDrop(least=1.0).open(c, LAYOUT)

        def fail(out: FloatArray) -> None:
            raise ZeroDivisionError("mine")

        try:
            exchange.take_step(
                [(fail, 1)] if c.rank else [part(values(0, 0), 1)], lambda flat: None
            )
        finally:
            exchange.close()

    began = time.monotonic()
    with pytest.raises((ZeroDivisionError, ConnectionError)):
        on_ranks(2, work)
    assert time.monotonic() - began < 5
    assert not [t for t in threading.enumerate() if t.name.startswith("sparkdl-straggler")]


def test_a_rank_that_hangs_is_named():
    released = threading.Event()

    def work(c: Any) -> str:
        exchange = StragglerDrop(least=1.0, timeout_s=0.3).open(c, LAYOUT)

        def hang(out: FloatArray) -> None:
            released.wait(10)

        try:
            exchange.take_step(
                [(hang, 1)] if c.rank else [part(values(0, 0), 1)], lambda flat: None
            )
        except TransportError as error:
            return str(error)
        finally:
            released.set()
            exchange.close()
        return ""

    message = on_ranks(2, work)[0]
    assert "missing rank 1" in message
    assert "0.3 s" in message


def test_a_batch_without_rows_is_refused():
    def work(c: Any) -> None:
        exchange = StragglerDrop().open(c, LAYOUT)
        try:
            exchange.take_step([part(values(0, 0), 0)], lambda flat: None)
        finally:
            exchange.close()

    with pytest.raises(ConfigError, match="without rows"):
        on_ranks(1, work)
