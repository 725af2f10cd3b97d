"""The synchronous rules against NumPy, ranks as threads."""

from __future__ import annotations

import doctest
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkdl.collective import local
from sparkdl.collective.communicator import SoloCommunicator
from sparkdl.collective.threads import connect_threads
from sparkdl.errors import ConfigError
from sparkdl.weights import Layout


def on_ranks(size: int, work: Callable[[Any], Any]) -> list[Any]:
    communicators = connect_threads(size)
    results: list[Any] = [None] * size
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(communicators[rank])
        except Exception as error:
            errors.append(error)
            communicators[rank].close()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for communicator in communicators:
        communicator.close()
    if errors:
        raise errors[0]
    return results


def vector(rank: int, size: int = 6) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=size).astype(np.float32)


def test_examples_in_docstrings():
    assert doctest.testmod(local).failed == 0


def test_local_sgd_with_one_step_is_synchronous_sgd():
    start = vector(99)

    def work(c: Any) -> tuple[np.ndarray, np.ndarray]:
        snapshot, x = start.copy(), start - 0.1 * vector(c.rank)
        local.average_locals(c, snapshot, x)
        return snapshot, x

    want = start - 0.1 * np.mean([vector(r) for r in range(3)], axis=0)
    for snapshot, x in on_ranks(3, work):
        np.testing.assert_allclose(x, want, atol=1e-6)
        np.testing.assert_array_equal(snapshot, x)


def test_local_sgd_leaves_out_who_trained_nothing():
    def work(c: Any) -> np.ndarray:
        snapshot, x = np.zeros(6, np.float32), vector(c.rank)
        local.average_locals(c, snapshot, x, weight=float(c.rank == 1))
        return x

    for x in on_ranks(2, work):
        np.testing.assert_allclose(x, vector(1), atol=1e-6)


def test_adaptive_window():
    assert local.adaptive_window(1.0, 1.0, 0.1, 0.1, 1) == 1
    assert local.adaptive_window(1.0, 1.0, 0.01, 0.1, 4) == 7  # sqrt(40) = 6.3
    assert local.adaptive_window(9.0, 1.0, 1e-6, 0.1, 4) == 16
    assert local.adaptive_window(0.0, 1.0, 0.1, 0.1) == 1
    assert local.adaptive_window(np.nan, 1.0, 0.1, 0.1, 4) == 1


def test_elastic_averaging_conserves_and_equals_numpy():
    center = vector(50)

    def work(c: Any) -> tuple[np.ndarray, np.ndarray]:
        x, own_center = vector(c.rank), center.copy()
        local.elastic_average(c, x, own_center)
        return x, own_center

    xs = np.array([vector(r) for r in range(4)])
    results = on_ranks(4, work)
    for rank, (x, own_center) in enumerate(results):
        np.testing.assert_allclose(x, xs[rank] - (xs[rank] - center) / 4, atol=1e-6)
        np.testing.assert_allclose(own_center, center + (xs - center).sum(0) / 4, atol=1e-6)
    total = sum(x for x, _ in results) + results[0][1]
    np.testing.assert_allclose(total, xs.sum(0) + center, atol=1e-5)


@pytest.mark.parametrize("mean", [True, False])
def test_downpour_equals_numpy(mean):
    def work(c: Any) -> tuple[np.ndarray, ...]:
        accumulated, center, x = vector(c.rank), vector(7), np.zeros(6, np.float32)
        local.exchange_accumulated(c, accumulated, center, x, mean=mean)
        return accumulated, center, x

    want = vector(7) + (vector(0) + vector(1)) / (2 if mean else 1)
    for accumulated, center, x in on_ranks(2, work):
        np.testing.assert_allclose(center, want, atol=1e-6)
        np.testing.assert_array_equal(center, x)
        assert not accumulated.any()


def test_a_straggler_is_left_out_and_the_divisor_is_right():
    results = on_ranks(3, lambda c: local.drop_stragglers(c, vector(c.rank), c.rank != 1))
    for result in results:
        np.testing.assert_allclose(result, (vector(0) + vector(2)) / 2, atol=1e-6)
    for result in on_ranks(2, lambda c: local.drop_stragglers(c, vector(c.rank), False)):
        assert not result.any()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sliced_steps_equal_whole_steps_with_a_share_of_the_state(ranks):
    size = 11

    def work(c: Any) -> tuple[np.ndarray, int]:
        weights = vector(5, size)
        state: dict[str, np.ndarray] = {}

        def step(part: np.ndarray, gradient: np.ndarray) -> None:
            velocity = state.setdefault("v", np.zeros_like(part))
            velocity *= 0.9
            velocity -= 0.1 * gradient
            part += velocity

        for i in range(5):
            local.step_slices(c, vector(10 * i + c.rank, size), weights, step, weight=c.rank + 1.0)
        return weights, state["v"].size

    weights, velocity = vector(5, size).astype(float), np.zeros(size)
    for i in range(5):
        shares = [vector(10 * i + r, size) * (r + 1) for r in range(ranks)]
        velocity = 0.9 * velocity - 0.1 * sum(shares) / sum(range(1, ranks + 1))
        weights += velocity
    results = [work(SoloCommunicator())] if ranks == 1 else on_ranks(ranks, work)
    assert sum(s for _, s in results) == size
    for got, _ in results:
        np.testing.assert_allclose(got, weights, atol=1e-5)


LAYOUT = Layout.of([("a", (2, 2), "float32"), ("b", (2,), "float32")], [("m", (1,), "float32")])


def adasum(buffers: list[list[float]]) -> list[np.ndarray]:
    def work(c: Any) -> np.ndarray:
        buffer = np.array(buffers[c.rank], np.float32)
        rule = local.Adasum(c, LAYOUT)
        rule.reduce(buffer)
        rule.close()
        return buffer

    return on_ranks(len(buffers), work)


def test_adasum_sums_orthogonal_and_averages_parallel_per_variable():
    for got in adasum([[1, 0, 0, 0, 2, 4, 1], [0, 3, 0, 0, 2, 4, 3]]):
        np.testing.assert_allclose(got, [1, 3, 0, 0, 2, 4, 2], atol=1e-6)
    for got in adasum([[0] * 7, [1, 2, 3, 4, 5, 6, 7]]):
        np.testing.assert_allclose(got, [1, 2, 3, 4, 5, 6, 3.5], atol=1e-6)


def test_adasum_of_four_is_a_tree_of_pairs():
    buffers = [vector(r, 7).tolist() for r in range(4)]

    def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        dot = a @ b
        return (1 - dot / (2 * a @ a)) * a + (1 - dot / (2 * b @ b)) * b

    results = adasum(buffers)
    x = np.array(buffers)
    for place in (slice(0, 4), slice(4, 6)):
        want = pair(pair(x[0][place], x[1][place]), pair(x[2][place], x[3][place]))
        np.testing.assert_allclose(results[0][place], want, atol=1e-5)
    assert len({r.tobytes() for r in results}) == 1


def test_adasum_refuses_three_ranks():
    with pytest.raises(ConfigError, match="power of two"):
        on_ranks(3, lambda c: local.Adasum(c, LAYOUT))


WIDE = Layout.of(
    [("w", (5, 3), "float32"), ("b", (4,), "float32"), ("k", (2, 3, 4), "float32")],
    [("m", (2,), "float32")],
)


def test_power_sgd_of_full_rank_is_dense():
    def work(c: Any) -> np.ndarray:
        buffer = vector(c.rank, WIDE.size)
        local.PowerSGD(c, WIDE, rank=6).reduce(buffer)
        return buffer

    want = np.mean([vector(r, WIDE.size) for r in range(2)], axis=0)
    results = on_ranks(2, work)
    np.testing.assert_allclose(results[0], want, atol=1e-5)
    assert results[0].tobytes() == results[1].tobytes()


def test_power_sgd_feeds_its_error_back():
    big = Layout.of([("w", (20, 30), "float32")])
    gradient = vector(0, 600)

    def work(c: Any) -> tuple[float, float, int]:
        rule = local.PowerSGD(c, big, rank=2)
        total = np.zeros(600, np.float32)
        first = 0.0
        for i in range(60):
            buffer = gradient.copy()
            rule.reduce(buffer)
            total += buffer
            if i == 0:
                first = float(np.linalg.norm(buffer - gradient) / np.linalg.norm(gradient))
        last = float(np.linalg.norm(total / 60 - gradient) / np.linalg.norm(gradient))
        return first, last, rule.sent_elements

    for first, last, sent in on_ranks(2, work):
        assert last < 0.3 * first
        assert sent == 2 * (20 + 30)
    with pytest.raises(ConfigError, match="at least 1"):
        local.PowerSGD(SoloCommunicator(), big, rank=0)
