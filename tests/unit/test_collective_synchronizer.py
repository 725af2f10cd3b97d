"""Gradient all-reduce equals one process on the global batch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from sparkdl.collective.communicator import SoloCommunicator
from sparkdl.collective.strategy import AllReduceStrategy, AllReduceSynchronizer
from sparkdl.collective.synchronizer import GradientSynchronizer
from sparkdl.collective.threads import connect_threads
from sparkdl.errors import ConfigError, TransportError
from sparkdl.weights import Layout
from sparkdl.worker import Report

LAYOUT = Layout.of([("w", (3,), "float32")], [("mean", (3,), "float32")])


class Linear:
    """Least squares with momentum, and a running mean of the inputs."""

    def __init__(self, seed: int = 0) -> None:
        self.w = np.random.default_rng(seed).normal(size=3)
        self.mean = np.zeros(3)
        self.velocity = np.zeros(3)

    def read_weights(self, out: np.ndarray) -> None:
        out[:] = [*self.w, *self.mean]

    def write_weights(self, flat: np.ndarray) -> None:
        self.w, self.mean = flat[:3].astype(float), flat[3:].astype(float)

    def optimizer_state(self) -> bytes:
        return self.velocity.tobytes()

    def load_optimizer_state(self, state: bytes) -> None:
        self.velocity = np.frombuffer(state).copy()

    def gradients(self, batch: tuple[np.ndarray, np.ndarray], out: np.ndarray) -> None:
        x, y = batch
        out[:3] = 2 * x.T @ (x @ self.w - y) / len(y)
        out[3:] = 0.9 * self.mean + 0.1 * x.mean(0)

    def apply_gradients(self, flat: np.ndarray) -> None:
        self.velocity = 0.9 * self.velocity - 0.05 * flat[:3]
        self.w = self.w + self.velocity
        self.mean = flat[3:].astype(float)


def in_threads(size: int, work: Any) -> list[Any]:
    communicators = connect_threads(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(communicators[rank])
        except Exception as error:
            results[rank] = error
            communicators[rank].close()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for communicator in communicators:
        communicator.close()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("rows", [[8], [8, 8], [5, 3, 9], [4, 0, 7, 1]])
def test_ranks_equal_one_process_on_the_global_batch(rows):
    random = np.random.default_rng(3)
    batches = []
    for _ in range(50):
        batches.append([(random.normal(size=(n, 3)), random.normal(size=n)) for n in rows])

    def work(communicator: Any) -> Linear:
        learner = Linear(seed=communicator.rank)
        synchronizer = GradientSynchronizer(communicator, LAYOUT)
        synchronizer.start(learner)
        for parts in batches:
            x, y = parts[communicator.rank]
            batch = (x, y) if len(y) else None
            assert synchronizer.step(learner, batch, len(y))
        return learner

    learners = [work(SoloCommunicator())] if len(rows) == 1 else in_threads(len(rows), work)
    alone = Linear()
    flat = np.zeros(6, np.float32)
    alone.read_weights(flat)
    alone.write_weights(flat)
    for parts in batches:
        whole = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
        gradient = np.zeros(6)
        alone.gradients(whole, gradient)
        alone.apply_gradients(gradient)
    for learner in learners:
        np.testing.assert_allclose(learner.w, alone.w, atol=1e-5)
        np.testing.assert_allclose(learner.mean, alone.mean, atol=1e-5)
        assert learner.w.tobytes() == learners[0].w.tobytes()


def test_a_step_of_nobody_changes_nothing():
    learner = Linear()
    synchronizer = GradientSynchronizer(SoloCommunicator(), LAYOUT)
    before = learner.w.copy()
    assert not synchronizer.step(learner, None, 0)
    assert (learner.w == before).all()
    with pytest.raises(ConfigError, match="without rows"):
        synchronizer.step(learner, None, 3)


def report(rows: int) -> Report:
    metrics = np.zeros(2) if rows else None
    return Report(0, 1, 1, int(rows > 0), rows, 0.1, metrics)


class Line:
    """A scripted line to the driver."""

    def __init__(self, stopped: bool, learning_rate: float | None) -> None:
        self.stopped, self.learning_rate = stopped, learning_rate
        self.sent: list[tuple[dict[str, Any], bool]] = []

    def report(self, meta: dict[str, Any], wait: bool) -> None:
        self.sent.append((meta, wait))


def test_ranks_agree_on_windows_stop_and_rate():
    def work(communicator: Any) -> Any:
        rank = communicator.rank
        line = Line(stopped=rank == 1, learning_rate=0.5 if rank == 1 else None)
        synchronizer = AllReduceSynchronizer(communicator, LAYOUT, line, position=(2, 1))
        learner = Linear(seed=rank)
        start = synchronizer.start(learner, rows=10 * rank, batches=rank, windows=rank)
        batch = (np.ones((4, 3)), np.ones(4)) if rank == 1 else None
        synchronizer.train(learner, batch, report(4 if rank == 1 else 0))
        assert not synchronizer.stopped
        synchronizer.end_epoch(learner, 0, np.zeros(2), np.ones(2), wait=True)
        synchronizer.finish(learner)
        return start, synchronizer.stopped, synchronizer.learning_rate, line.sent

    for rank, (start, stopped, rate, sent) in enumerate(in_threads(2, work)):
        assert (start.epoch, start.position, start.windows_per_epoch) == (2, 1, 1)
        assert (stopped, rate, start.done) == (True, 0.5, False)
        ended, waited = sent[-1]
        assert waited
        assert ended["rows"] == (4 if rank else 0)
        assert ended["val_metrics"] == [1.0, 1.0]


def test_no_rows_anywhere_is_done_at_once():
    synchronizer = AllReduceSynchronizer(SoloCommunicator(), LAYOUT)
    assert synchronizer.start(Linear(), 0, 0, 0).done


class Barrier:
    """What the launcher gives to a strategy."""

    rank = 0

    def all_gather(self, text: str) -> list[str]:
        return [text]


@pytest.mark.parametrize("name", ["solo", "builtin"])
def test_the_strategy_connects_and_checks_the_layout(name):
    strategy = AllReduceStrategy(b"t" * 16, LAYOUT, name)
    with strategy.open(Barrier(), LAYOUT) as synchronizer:
        assert not synchronizer.start(Linear(), 5, 1, 1).done
    with (
        pytest.raises(TransportError, match="model"),
        strategy.open(Barrier(), Layout.of([("w", (4,), "float32")])),
    ):
        pass
