"""Gradient all-reduce equals one process on the global batch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from plain_learner import PlainLearner

from sparkdl.collective import gradient_synchronizer
from sparkdl.collective.current import SoloCommunicator
from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
from sparkdl.collective.strategy import AllReduceStrategy
from sparkdl.collective.synchronizer import AllReduceSynchronizer
from sparkdl.errors import ModelError
from sparkdl.files.run_state import Blob
from sparkdl.testing.inproc import connect_threads
from sparkdl.training.changes import VariableChanges
from sparkdl.training.finite import FiniteCheck
from sparkdl.training.reports import EpochReport, Report
from sparkdl.training.slices import Slices
from sparkdl.weights import Layout

LAYOUT = Layout.of([("w", (3,), "float32")], [("mean", (3,), "float32")])


class Linear(PlainLearner):
    """Least squares with momentum, and a running mean of the inputs."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(LAYOUT)
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

    def batches_of(self, stack: Any) -> Any:
        return stack

    def rows_of(self, batch: Any) -> int:
        return len(batch[1])

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
        synchronizer = AllReduceGradientSynchronizer(communicator, LAYOUT)
        synchronizer.start(learner)
        for parts in batches:
            x, y = parts[communicator.rank]
            if len(y):
                synchronizer.train(learner, Batches([(x, y)]))
            else:
                synchronizer.skip(learner)
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
    synchronizer = AllReduceGradientSynchronizer(SoloCommunicator(), LAYOUT)
    before = learner.w.copy()
    synchronizer.skip(learner)
    assert (learner.w == before).all()
    assert not learner.velocity.any()


@pytest.mark.parametrize("wire", [None, "float16"])
def test_a_gradient_that_is_left_out_is_left_out_of_every_part(wire):
    layout = Layout.of([("first", (4,), "float32"), ("last", (4,), "float32")], [])

    def work(communicator: Any) -> tuple[np.ndarray, bool, int]:
        check = FiniteCheck("skip", layout.trained_size)
        steps = AllReduceGradientSynchronizer(
            communicator, layout, wire=wire, part_bytes=16, check=check
        )
        assert len(steps.parts) >= 2
        steps.rows = 8
        steps.buffer[...] = 1 + communicator.rank
        if communicator.rank == 0:
            steps.buffer[0] = np.nan  # in the part that is sent last
        for part in range(len(steps.parts)):
            steps.begin(part)
        assert steps.finish()
        return steps.buffer.copy(), steps.refused, check.refused

    for rank, (joined, refused, count) in enumerate(in_threads(2, work)):
        np.testing.assert_array_equal(joined, 2)
        assert (refused, count) == ((True, 1) if rank == 0 else (False, 0))


def report(rows: int) -> Report:
    metrics = np.zeros(2) if rows else None
    return Report(0, 1, 1, int(rows > 0), rows, 0.1, metrics)


class Line:
    """A scripted line to the driver, which asks to stop after some reports."""

    def __init__(self, stop_after: int, learning_rate: float | None, changes: int = 0) -> None:
        self.learning_rate = learning_rate
        self.changes = changes
        self.stop_after = stop_after
        self.joined: tuple[int, int] | None = None
        self.sent: list[tuple[EpochReport, bool]] = []
        self.kept: list[tuple[bytes, int]] = []
        self.finished = False

    @property
    def stopped(self) -> bool:
        return len(self.sent) >= self.stop_after

    def join(self, *, rows: int, batches_per_epoch: int) -> None:
        self.joined = rows, batches_per_epoch

    def report(self, report: EpochReport, *, wait: bool = False) -> None:
        self.sent.append((report, wait))

    def keep(self, state: Blob, epoch: int) -> None:
        self.kept.append((b"".join(map(bytes, state)), epoch))

    def take_changes(self, count: int) -> list[VariableChanges]:
        return [VariableChanges({0: np.array(v, np.float32)}) for v in range(1, count + 1)]

    def finish(self) -> None:
        self.finished = True


class Batches(list[tuple[np.ndarray, np.ndarray]]):
    """A stack of batches."""

    @property
    def num_batches(self) -> int:
        return len(self)


def test_ranks_agree_on_steps_stop_and_rate():
    def work(communicator: Any) -> Any:
        rank = communicator.rank
        line = Line(stop_after=2 if rank == 1 else 99, learning_rate=0.5 if rank == 1 else None)
        synchronizer = AllReduceSynchronizer(communicator, LAYOUT, line)
        learner = Linear(seed=rank)
        start = synchronizer.start(learner, rows=10 * rank, batches=rank, windows=rank)
        assert line.joined == (10 * rank, rank)
        window = Batches([(np.ones((4, 3)), np.ones(4))]) if rank == 1 else None
        synchronizer.train(learner, window, report(4 if rank == 1 else 0))
        assert not synchronizer.orders.stopped
        synchronizer.end_epoch(learner, 0, np.zeros(2), np.ones(2), wait=True)
        synchronizer.keep_state(learner, 1)
        synchronizer.finish(learner, 1)
        assert line.finished
        assert [epoch for _, epoch in line.kept] == ([1] if rank == 1 else [])  # it has rows
        return start, synchronizer.orders.stopped, synchronizer.orders.learning_rate, line.sent

    for rank, (start, stopped, rate, sent) in enumerate(in_threads(2, work)):
        assert (start.epoch, start.position, start.windows_per_epoch) == (0, 0, 1)
        assert (stopped, rate, start.done) == (True, 0.5, False)
        ended, waited = sent[-1]
        assert waited
        assert ended.rows == (4 if rank else 0)
        assert ended.val_metrics.tolist() == [1.0, 1.0]


def test_all_ranks_stop_at_the_same_step():
    """The wish of one rank, told to it in the middle of an epoch, ends all at a common step."""

    def work(communicator: Any) -> int:
        rank = communicator.rank
        line = Line(stop_after=1 if rank == 1 else 99, learning_rate=None)
        synchronizer = AllReduceSynchronizer(communicator, LAYOUT, line)
        learner = Linear(seed=rank)
        synchronizer.start(learner, rows=400, batches=100, windows=100)
        steps = 0
        while steps < 100 and not synchronizer.orders.stopped:
            size = 16 if rank == 1 or steps >= 16 else None  # rank 0 has no batches at first
            window = None
            if size is not None:
                window = Batches([(np.ones((4, 3)), np.ones(4))] * size)
            synchronizer.train(learner, window, report(4 if size else 0))
            steps += size or 1
        return steps

    first, second = in_threads(2, work)
    assert first == second == 32


def test_all_ranks_take_what_callbacks_wrote_at_the_same_step():
    """Told to one rank only, in the middle of an epoch; the training does not stop."""

    def work(communicator: Any) -> list[tuple[int, int]]:
        steps = [0]
        found: list[tuple[int, int]] = []

        class Noting(Linear):
            def take_changes(self, changes: VariableChanges) -> None:
                found.append((steps[0], int(changes.model[0])))

        rank = communicator.rank
        line = Line(99, None, changes=2 if rank == 1 else 0)
        synchronizer = AllReduceSynchronizer(communicator, LAYOUT, line)
        learner = Noting(seed=rank)
        synchronizer.start(learner, rows=400, batches=100, windows=100)
        while steps[0] < 64:
            synchronizer.train(learner, Batches([(np.ones((4, 3)), np.ones(4))] * 16), report(4))
            steps[0] += 16
            synchronizer.take_changes(learner)
            assert not synchronizer.orders.stopped
        return found

    first, second = in_threads(2, work)
    assert first == second == [(32, 1), (32, 2)]


@pytest.mark.parametrize("wire", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("part_bytes", [4, 1 << 20])
def test_parts_and_halves_on_the_wire_give_the_mean(part_bytes, wire):
    layout = Layout.of([("a", (5,), "float32"), ("b", (2, 3), "float32")], [("s", (2,), "float32")])
    sent = [np.arange(13, dtype=np.float32) / 8 * (rank + 1) for rank in range(2)]
    sent[1][-2:] = 1e6  # a statistic beyond half precision

    def work(communicator: Any) -> np.ndarray:
        reducer = AllReduceGradientSynchronizer(
            communicator, layout, wire=wire, part_bytes=part_bytes
        )
        assert len(reducer.parts) == (1 + 6 + 5 if part_bytes == 4 else 1 + (wire is not None))
        reducer.rows = 1 + 2 * communicator.rank
        reducer.buffer[...] = sent[communicator.rank]
        for part in range(len(reducer.parts)):
            reducer.begin(part)
        assert reducer.finish()
        return reducer.buffer.copy()

    expected = 0.25 * sent[0] + 0.75 * sent[1]
    for result in in_threads(2, work):
        np.testing.assert_allclose(result, expected, rtol=1e-2 if wire else 1e-6)
        np.testing.assert_allclose(result[-2:], expected[-2:], rtol=1e-6)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("rows", [(3, 1, 0), (0, 0, 0)])
def test_small_dense_gradients_travel_with_the_slices(monkeypatch, together, rows):
    if not together:
        monkeypatch.setattr(gradient_synchronizer, "_BESIDE_SLICES_BYTES", 0)
    layout = Layout.of(
        [("a", (5,), "float32"), ("table", (9, 2), "float32")], [("s", (2,), "float32")]
    )

    def work(communicator: Any) -> Any:
        calls: list[str] = []
        for name in ("all_reduce", "all_gather"):
            inner = getattr(communicator, name)
            monkeypatch.setattr(
                communicator,
                name,
                lambda *a, n=name, f=inner, **k: (calls.append(n), f(*a, **k))[1],
            )
        rank = communicator.rank
        reducer = AllReduceGradientSynchronizer(communicator, layout)
        reducer.send_as_slices([1])
        reducer.rows, reducer.stop_wanted = rows[rank], rank == 1
        reducer.buffer[...] = np.nan if not rows[rank] else np.arange(7) * (rank + 1)
        reducer.slices = [Slices(1, np.int32([rank, 8]), np.full((2, 2), 4.0, np.float32))]
        reducer.begin(0)
        trained = reducer.finish()
        found = reducer.slices[0]
        return calls, trained, reducer.stop_agreed, reducer.buffer.copy(), found.indices, found.rows

    for calls, trained, stop, buffer, indices, table in in_threads(3, work):
        assert calls == (["all_gather"] if together else ["all_reduce", "all_gather"])
        assert (trained, stop) == (any(rows), any(rows))
        np.testing.assert_allclose(buffer, np.arange(7) * 1.25 if trained else np.zeros(7))
        assert indices.tolist() == ([0, 8, 1, 8] if trained else [])
        assert table[:, 0].tolist() == ([3, 3, 1, 1] if trained else [])


def test_a_gradient_beyond_half_precision_becomes_no_infinity_and_an_infinity_stays():
    layout = Layout.of([("a", (4,), "float32")])

    def work(communicator: Any) -> np.ndarray:
        reducer = AllReduceGradientSynchronizer(communicator, layout, wire="float16")
        reducer.rows = 1
        reducer.buffer[...] = [1e6, -1e6, 2.0, [1.0, -np.inf][communicator.rank]]
        for part in range(len(reducer.parts)):
            reducer.begin(part)
        assert reducer.finish()
        return reducer.buffer.copy()

    for result in in_threads(2, work):
        np.testing.assert_array_equal(result, np.float32([65504, -65504, 2, -np.inf]))


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
        pytest.raises(ModelError, match="model"),
        strategy.open(Barrier(), Layout.of([("w", (4,), "float32")])),
    ):
        pass
