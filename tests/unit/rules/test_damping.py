"""Which part of a worker's changes counts: answers known from the mathematics of two workers."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.rules.damping import LONG_WINDOW, LOOK_EVERY, MOST_VALUES, Damping
from sparkdl.weights import FloatArray

SIZE = 400


def train(
    workers: int,
    keeps: FloatArray,
    rounds: int,
    *,
    damped: bool = True,
    drift: float = 0.0,
    batches: int = LOOK_EVERY,
) -> tuple[list[float], FloatArray]:
    """Workers that commit in turn, each from the center of its last commit.

    A window brings each coordinate to ``keeps`` times its value, plus a draw of its own and
    ``drift``. Returns the factors at the end and the centers of the last half of the rounds.
    """
    rng = np.random.default_rng(0)
    center = np.full(keeps.size, 1.0, np.float32)
    bases = [center.copy() for _ in range(workers)]
    made = [Damping(workers, keeps.size) for _ in range(workers)]
    seen = []
    for number in range(rounds * workers):
        base, damping = bases[number % workers], made[number % workers]
        draw = 0.1 * rng.standard_normal(keeps.size).astype(np.float32)
        change = keeps * base + draw + np.float32(drift) - base
        if damped:
            damping.apply(change, base, batches)
        center += change
        base[...] = center
        seen.append(center.copy())
    return [d.factor for d in made], np.stack(seen[len(seen) // 2 :])


def test_one_worker_trains_as_if_alone() -> None:
    keeps = np.linspace(0, 1, SIZE, dtype=np.float32)
    factors, damped = train(1, keeps, 60)
    assert factors == [1.0]
    np.testing.assert_array_equal(damped, train(1, keeps, 60, damped=False)[1])


@pytest.mark.parametrize("workers", [2, 4])
def test_changes_that_go_the_whole_way_swing_and_are_damped(workers: int) -> None:
    keeps = np.zeros(SIZE, np.float32)
    factors, damped = train(workers, keeps, 40)
    assert max(factors) < 0.75
    assert min(factors) >= 1 / workers
    _, swinging = train(workers, keeps, 40, damped=False)
    assert np.var(damped) < np.var(swinging) / 4


def test_short_windows_are_looked_at_now_and_then() -> None:
    keeps = np.zeros(SIZE, np.float32)
    factors, _ = train(2, keeps, 40 * LOOK_EVERY, batches=1)
    assert max(factors) < 0.75
    looks = 0
    damping = Damping(2, SIZE)
    rng = np.random.default_rng(0)
    for _ in range(10 * LOOK_EVERY):
        before = damping._mean
        change = rng.standard_normal(SIZE).astype(np.float32)
        damping.apply(change, np.zeros(SIZE, np.float32), 1)
        looks += damping._mean != before
    assert looks == 10  # each compares two changes


def test_changes_in_one_direction_count_in_full() -> None:
    keeps = np.ones(SIZE, np.float32)  # a slope: each window goes on by the drift
    factors, centers = train(2, keeps, 100, drift=0.05)
    assert min(factors) > 0.9
    _, plain = train(2, keeps, 100, drift=0.05, damped=False)
    assert centers[-1].mean() > 0.95 * plain[-1].mean()


@pytest.mark.parametrize(
    ("workers", "batches"), [(2, 1), (2, LONG_WINDOW - 1), *((p, LOOK_EVERY) for p in (3, 4, 8))]
)
def test_momentum_alone_is_not_damped(workers: int, batches: int) -> None:
    """A flat loss: each worker goes on with most of its own last change, and nothing is too much.

    Such a worker's next change has a cosine of 0.8 with its own last one, and of 0.8 / sqrt(p) with
    what all p moved.
    """
    rng = np.random.default_rng(0)
    center = np.zeros(SIZE, np.float32)
    bases = [center.copy() for _ in range(workers)]
    velocities = [np.zeros(SIZE, np.float32) for _ in range(workers)]
    made = [Damping(workers, SIZE) for _ in range(workers)]
    for number in range(100 * workers):
        rank = number % workers
        velocities[rank] *= 0.8
        velocities[rank] += rng.standard_normal(SIZE).astype(np.float32)
        change = velocities[rank].copy()
        made[rank].apply(change, bases[rank], batches)
        center += change
        bases[rank][...] = center
    assert min(d.counted for d in made) > 0.8


def test_statistics_are_not_scaled() -> None:
    damping = Damping(2, 3)
    damping.factor = 0.5
    change, base = np.float32([2, 4, 4, 8, 10]), np.float32([0, 0, 2, 0, 0])
    damping.apply(change, base, LOOK_EVERY)
    np.testing.assert_array_equal(change, [1, 2, 2, 8, 10])
    np.testing.assert_array_equal(base, [0, 0, 2, 0, 0])


def test_a_worker_that_trained_nothing_changes_nothing() -> None:
    damping = Damping(2, 3)
    for _ in range(5):
        damping.apply(np.zeros(3, np.float32), np.zeros(3, np.float32), 16)
    assert damping.factor == 1.0


def test_a_large_model_is_looked_at_in_places() -> None:
    size = 3 * MOST_VALUES + 1
    damping = Damping(2, size)
    rng = np.random.default_rng(0)
    base = np.zeros(size, np.float32)
    for _ in range(3):
        damping.apply(rng.standard_normal(size).astype(np.float32), base, LOOK_EVERY)
    kept = damping._change
    assert kept is not None
    assert kept.size <= MOST_VALUES


@pytest.mark.parametrize(
    ("batches", "difference"), [(LONG_WINDOW, 0.5 * (1 / np.sqrt(2) - 1)), (LONG_WINDOW - 1, 0.0)]
)
def test_two_workers_with_momentum_keep_half_of_the_difference_in_longer_windows(
    batches: int, difference: float
) -> None:
    """mine = next = (1, 0), moved = (1, 1): the cosines are 1 and 1 / sqrt(2).

    The difference counts by half, ``1/√2 - 1``, in longer windows; with shorter ones what momentum
    carries over is taken out, ``1/√2 - 1 · 1/√2 = 0``.
    """
    damping = Damping(2, 2)
    damping._unseen = LOOK_EVERY  # a look is due, however short the windows
    damping.apply(np.float32([1, 0]), np.zeros(2, np.float32), batches)
    damping.apply(np.float32([1, 0]), np.ones(2, np.float32), batches)
    assert damping.factor == pytest.approx(1 + 10 * 0.1 * difference, abs=1e-6)
