"""Rules inside the training loop: ranks as threads, a linear model in NumPy as the learner."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plain_learner import InOne
from rank_threads import on_ranks

from sparkdl.collective.rule_synchronizer import OptimizerSteps, RuleSynchronizer
from sparkdl.collective.rules import (
    EASGD,
    AdaptiveLocalSGD,
    DiLoCoExchangeRule,
    ExchangeRule,
    OneBitAdam,
    StragglerDrop,
    StreamingDiLoCo,
    make_rule,
    rule_names,
)
from sparkdl.collective.synchronizer import AllReduceSynchronizer, NoControl
from sparkdl.config import EPOCH_WINDOW, LoopSettings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.errors import ConfigError, ModelError
from sparkdl.files.run_state import Blob, RunState
from sparkdl.optimizers.flat import FlatAdam, FlatOptimizer, FlatSGD
from sparkdl.training.reports import EpochReport
from sparkdl.weights import Layout
from sparkdl.worker import train

LAYOUT = Layout.of([("w", (3, 2), "float32"), ("b", (2,), "float32")], [("m", (3,), "float32")])
TRUE = np.random.default_rng(1).normal(size=(3, 2))
BATCH = 4


class Linear(InOne):
    """Least squares of two outputs, a running mean of the inputs, any flat optimizer."""

    layout = LAYOUT
    has_schedule = scales_loss = False
    learning_rate = 0.05

    def __init__(self, optimizer: FlatOptimizer | None = None) -> None:
        self.flat = np.random.default_rng(5).normal(size=LAYOUT.size).astype(np.float32)
        self.steps = optimizer or FlatSGD(momentum=0.5)
        self.state = self.steps.init(self.flat[:8])
        self.step = 0
        self.sums = np.zeros(2)

    def read_weights(self, out: np.ndarray) -> None:
        out[:] = self.flat

    def write_weights(self, flat: np.ndarray) -> None:
        self.flat = flat.copy()

    def weights_within(self, place: slice) -> Any:
        yield place, self.flat[place].copy()

    def _batches(self, window: Any) -> Any:
        for i in range(window.num_batches):
            yield window.x["x"][i], window.y["y"][i]

    def _gradient(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        error = x @ self.flat[:6].reshape(3, 2) + self.flat[6:8] - y
        self.sums += [float((error**2).mean() * len(x)), len(x)]
        statistics = 0.9 * self.flat[8:] + 0.1 * x.mean(0)
        parts = [(x.T @ error).ravel() / len(x), error.mean(0), statistics]
        return np.concatenate(parts).astype(np.float32)

    def gradients(self, window: Any, out: np.ndarray) -> None:
        ((x, y),) = self._batches(window)
        out[:] = self._gradient(x, y)

    def apply_gradients(self, flat: np.ndarray) -> None:
        x = self.flat[:8]
        self.steps.step(x, flat[:8], self.state, self.learning_rate, x)
        self.flat[8:] = flat[8:]
        self.step += 1

    def train(self, window: Any) -> None:
        for x, y in self._batches(window):
            self.apply_gradients(self._gradient(x, y))

    def know_gradients(self, agree: Callable[[list[bool]], list[bool]]) -> None:
        assert agree([True, True]) == [True, True]

    def metric_state(self) -> np.ndarray:
        return self.sums.copy()

    def reset_metrics(self) -> None:
        self.sums = np.zeros(2)

    def evaluate(self, windows: Any) -> np.ndarray:
        return self.flat.astype(float)

    def set_step(self, step: int) -> None:
        """No schedule."""

    def optimizer_state(self) -> bytes:
        return b"%d" % self.step

    def carried_state(self) -> bytes:
        return b""

    def mark_draws(self, *place: int) -> None: ...

    def fill_draws(self, steps: int, steps_of_all: int) -> None: ...

    def skip_draws(self, steps: int) -> None: ...

    def load_optimizer_state(self, state: bytes) -> None:
        self.step = int(state)

    def optimizer_slots(self, names: list[str]) -> dict[str, np.ndarray] | None:
        slots = self.steps.keras_slots()
        if set(names) != {slot for slot, _ in slots.values()}:
            return None
        return {s: self.state[n] * np.float32(f) for n, (s, f) in slots.items()}

    def load_optimizer_slots(self, slots: dict[str, np.ndarray], step: int) -> None:
        for name, (slot, factor) in self.steps.keras_slots().items():
            if slot in slots:
                self.state[name] = slots[slot] / np.float32(factor)
        if "steps" in self.state:
            self.state["steps"] = step
        self.step = step


def rows_of(rank: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(100 + rank).normal(size=(count, 3))
    return x, x @ TRUE + 1.0


class Kept(NoControl):
    """A line that keeps what a checkpoint would, and stops after some reports."""

    def __init__(self, stop_after: int = 10**9) -> None:
        super().__init__()
        self.states: list[bytes] = []
        self.stop_after, self.reports = stop_after, 0

    def report(self, report: EpochReport, *, wait: bool = False) -> None:
        self.reports += 1
        super().report(report, wait=wait)

    def keep(self, state: Blob, epoch: int) -> None:
        self.states.append(b"".join(map(bytes, state)))

    @property
    def stopped(self) -> bool:  # type: ignore[override]
        return self.reports >= self.stop_after


def fit(
    rule: ExchangeRule, counts: list[int], *, window: int = 1, epochs: int = 1,
    learners: list[Linear] | None = None, optimizer: FlatOptimizer | None = None,
    lines: list[Kept] | None = None, wire: str | None = None, state: bytes = b"",
    report_interval_s: float = 1e9, first_epoch: int = 0,
) -> tuple[list[Linear], list[AllReduceSynchronizer]]:  # fmt: skip
    """Every rank through the real loop; rank ``i`` has ``counts[i]`` rows."""
    chosen = learners or [Linear(optimizer) for _ in counts]
    config = {"class_name": chosen[0].steps.keras_class, "config": {}}
    if config["class_name"] == "SGD":
        config["config"] = {"momentum": chosen[0].steps.momentum}  # type: ignore[attr-defined]
    bound = rule.bind(len(counts), config)
    settings = LoopSettings(
        epochs=epochs, first_epoch=first_epoch, batch_size=BATCH, window=window, shuffle=False,
        keep_state=lines is not None, report_interval_s=report_interval_s,
    )  # fmt: skip

    def work(communicator: Any) -> AllReduceSynchronizer:
        rank = communicator.rank
        x, y = rows_of(rank, counts[rank])
        source = Batches(rows_from_numpy({"x": x}, {"y": y}), BATCH, shuffle=False)
        steps = RuleSynchronizer(communicator, LAYOUT, bound, window, wire=wire, state=state)
        line = None if lines is None else lines[rank]
        synchronizer = AllReduceSynchronizer(communicator, LAYOUT, line, steps=steps)
        held_out = Batches(rows_from_numpy({"x": x}, {"y": y}), BATCH, shuffle=False)
        train(
            chosen[rank], synchronizer, source, settings, validation=held_out,
            num_rows=len(x), num_workers=len(counts),
        )  # fmt: skip
        steps.close()
        return synchronizer

    return chosen, on_ranks(len(counts), work)


def loss_of(learner: Linear) -> float:
    x, y = rows_of(77, 200)
    return float(((x @ learner.flat[:6].reshape(3, 2) + learner.flat[6:8] - y) ** 2).mean())


FAST = {
    "straggler_drop": StragglerDrop(patience=20.0, grace_s=2.0),
    "onebit_adam": OneBitAdam(FlatAdam(), freeze_step=40),
    "streaming_diloco": StreamingDiLoCo(fragments=2, period=1, delay=1),
}


@pytest.mark.parametrize("name", rule_names())
@pytest.mark.parametrize("counts", [[37, 37], [61, 8], [0, 50], [33, 10, 0, 21]], ids=str)
def test_every_rule_learns_and_leaves_the_ranks_equal(name: str, counts: list[int]) -> None:
    rule = FAST.get(name, make_rule(name))
    window = 1 if name == "adaptive_local_sgd" or rule.exchanges != "weights" else 3
    optimizer = FlatAdam() if name == "onebit_adam" else None
    learners, _ = fit(rule, counts, window=window, epochs=16, optimizer=optimizer)
    assert loss_of(learners[0]) < 0.25 * loss_of(Linear())
    assert len({learner.flat.tobytes() for learner in learners}) == 1


@pytest.mark.parametrize("name", ["mean", "sliced"])
@pytest.mark.parametrize("window", [1, 3])
def test_accumulated_batches_are_one_large_batch(name: str, window: int) -> None:
    counts = [44, 26]  # 11 and 7 batches; the last of the second has 2 rows
    learners, _ = fit(make_rule(name), counts, window=window, epochs=2)
    alone = Linear()
    data = [rows_of(rank, count) for rank, count in enumerate(counts)]
    for _ in range(2):
        for first in range(0, 44, BATCH * window):
            parts = [slice(first, first + BATCH * window)] * 2
            x = np.concatenate([d[0][p] for d, p in zip(data, parts, strict=True)])
            y = np.concatenate([d[1][p] for d, p in zip(data, parts, strict=True)])
            alone.apply_gradients(alone._gradient(x, y))
    for learner in learners:
        np.testing.assert_allclose(learner.flat[:8], alone.flat[:8], atol=1e-5)
        assert learner.step == alone.step == 2 * -(-11 // window)


@pytest.mark.parametrize("window", [1, 2, 5, EPOCH_WINDOW])
def test_local_sgd_is_the_mean_at_each_exchange(window: int) -> None:
    counts = [40, 24]
    learners, (first, second) = fit(make_rule("local_sgd"), counts, window=window, epochs=2)
    epochs = [
        s.outcome(n, 2).unreported[1].rows for s, n in zip((first, second), learners, strict=True)
    ]
    assert epochs == counts
    alone = [Linear(), Linear()]
    every = window or 10
    for _ in range(2):
        for first in range(0, 10, every):
            rows = []
            for rank, learner in enumerate(alone):
                x, y = rows_of(rank, counts[rank])
                done = 0
                for i in range(first, min(first + every, 10)):
                    part = slice(i * BATCH, (i + 1) * BATCH)
                    if len(x[part]):
                        learner.apply_gradients(learner._gradient(x[part], y[part]))
                        done += len(x[part])
                rows.append(done)
            mean = sum(n * a.flat for n, a in zip(rows, alone, strict=True)) / sum(rows)
            for learner in alone:
                learner.flat = mean.astype(np.float32)
    for learner, known in zip(learners, alone, strict=True):
        np.testing.assert_allclose(learner.flat, known.flat, atol=1e-5)


def test_halves_on_the_wire_are_near_and_half_as_many() -> None:
    for name, window in (("mean", 2), ("local_sgd", 3)):
        whole, (plain, _) = fit(make_rule(name), [40, 24], window=window, epochs=2)
        halves, (sent, _) = fit(make_rule(name), [40, 24], window=window, epochs=2, wire="float16")
        np.testing.assert_allclose(halves[0].flat, whole[0].flat, atol=5e-3)
        assert halves[0].flat.tobytes() == halves[1].flat.tobytes()
        bytes_of = [s._steps._exchange.sent_bytes for s in (sent, plain)]  # type: ignore[union-attr]
        assert bytes_of[0] < bytes_of[1]


@pytest.mark.parametrize("name", ["mean", "sliced", "local_sgd", "easgd", "streaming_diloco"])
def test_all_stop_together_in_the_middle_of_an_epoch(name: str) -> None:
    lines = [Kept(), Kept(stop_after=1), Kept()]
    learners, synchronizers = fit(
        make_rule(name), [4000, 3000, 20], window=5, epochs=3, lines=lines, report_interval_s=0.0
    )
    assert all(s.orders.stopped for s in synchronizers)
    assert len({learner.flat.tobytes() for learner in learners}) == 1
    assert learners[0].step < 200  # of 1000 in an epoch
    assert not any(line.unreported for line in lines)


def test_adaptive_windows_are_the_same_on_all_ranks() -> None:
    rule = AdaptiveLocalSGD(first_window=9, limit=6)
    learners, (first, second) = fit(rule, [120, 60], epochs=3)
    sent = [s._steps._exchange.sent_bytes for s in (first, second)]  # type: ignore[union-attr]
    exchanges = sent[0] / ((LAYOUT.size + 3) * 4)
    assert sent[0] == sent[1]
    assert 15 < exchanges < 90  # between every sixth batch and every batch
    assert loss_of(learners[0]) < 0.5 * loss_of(Linear())


def test_the_center_is_what_is_evaluated_and_kept() -> None:
    lines = [Kept(), Kept()]
    learners, _ = fit(EASGD(), [40, 24], window=4, epochs=3, lines=lines)
    for epoch in range(3):
        seen = [line.unreported[epoch].val_metrics.tolist() for line in lines]
        assert seen[0] == seen[1]  # the local weights differ
        kept = RunState.from_bytes(lines[0].states[epoch])
        assert kept.epoch == epoch + 1
        np.testing.assert_array_equal(kept.weights, np.float32(seen[0]))
    assert seen[0] == learners[0].flat.tolist()  # the last one is the run's model
    assert lines[1].states == []


@pytest.mark.parametrize("optimizer", [FlatSGD(momentum=0.5, nesterov=True), FlatAdam()], ids=repr)
def test_the_optimizer_keeps_the_slices_between_runs(optimizer: FlatOptimizer) -> None:
    sliced = make_rule("sliced", optimizer=optimizer)
    at_once, _ = fit(sliced, [40, 24], epochs=4, optimizer=optimizer)
    learners, synchronizers = fit(sliced, [40, 24], epochs=2, optimizer=optimizer)
    assert [s.rule_state for s in synchronizers] == [b"", b""]  # the root's optimizer has it all
    learners[1].state = copy.deepcopy(learners[0].state)
    fit(sliced, [40, 24], epochs=2, learners=learners, optimizer=optimizer)
    np.testing.assert_allclose(learners[0].flat, at_once[0].flat, atol=1e-6)
    alone, _ = fit(make_rule("mean"), [40, 24], epochs=4, optimizer=optimizer)
    for name, value in alone[0].state.items():
        np.testing.assert_allclose(learners[0].state[name], value, atol=1e-5)


def test_outer_momentum_goes_on_in_a_second_run() -> None:
    plain = FlatSGD()  # the inner optimizer keeps nothing, so that runs can be told apart
    at_once, _ = fit(DiLoCoExchangeRule(), [40, 24], window=5, epochs=4, optimizer=plain)
    learners, (first, second) = fit(
        DiLoCoExchangeRule(), [40, 24], window=5, epochs=2, optimizer=plain
    )
    assert first.rule_state
    result = first.outcome(learners[0], 2).state
    assert result is not None
    assert (result.epoch, result.rule) == (2, first.rule_state)
    np.testing.assert_array_equal(result.weights, learners[0].flat)
    assert second.outcome(learners[1], 2).state is None  # one rank returns the run's state
    anew = [Linear(plain), Linear(plain)]
    for mine, other in zip(anew, learners, strict=True):
        mine.flat = other.flat.copy()
    state = first.rule_state
    fit(DiLoCoExchangeRule(), [40, 24], window=5, epochs=2, learners=learners, state=state)
    np.testing.assert_allclose(learners[0].flat, at_once[0].flat, atol=1e-6)
    fit(DiLoCoExchangeRule(), [40, 24], window=5, epochs=2, learners=anew)
    assert np.abs(anew[0].flat - at_once[0].flat).max() > 1e-3


def test_a_state_that_would_fill_the_memory_is_not_unpacked() -> None:
    """It may come from the file of a stranger. Before, each rank unpacked all of it."""
    state = io.BytesIO()
    np.savez_compressed(state, momentum=np.zeros(32 << 20, np.float32))
    assert len(state.getvalue()) < 200_000
    with pytest.raises(ModelError, match="the state that a rule kept cannot be read"):
        fit(DiLoCoExchangeRule(), [8], window=2, state=state.getvalue())


def test_another_optimizer_than_the_models_keeps_its_state_apart() -> None:
    rule = make_rule("sliced", optimizer=FlatAdam())
    learners, synchronizers = fit(rule, [40, 24], epochs=2)  # compiled with FlatSGD
    assert [bool(s.rule_state) for s in synchronizers] == [True, False]  # of the root alone
    fit(rule, [40, 24], epochs=2, learners=learners, state=bytes(synchronizers[0].rule_state))
    at_once, _ = fit(rule, [40, 24], epochs=4)
    np.testing.assert_allclose(learners[0].flat, at_once[0].flat, atol=1e-6)


def test_states_of_learner_and_rule_are_told_apart() -> None:
    for optimizer, rule in ((b"abc", b""), (b"", b"xyz"), (b"abc", b"xyz" * 100)):
        state = RunState(3, np.ones(2, np.float32), optimizer, rule)
        read = RunState.from_bytes(state.to_bytes())
        assert (read.epoch, read.optimizer, read.rule) == (3, optimizer, rule)
        assert read.weights.tolist() == [1.0, 1.0]


def test_what_is_no_exchange_is_refused() -> None:
    class Broken(ExchangeRule):
        def open(self, communicator: Any, layout: Layout) -> Any:
            from sparkdl.collective.rules import Exchange

            return Exchange(communicator, layout)

    with pytest.raises(ConfigError, match="no exchange"):
        fit(Broken(), [8])


@pytest.mark.parametrize("overflows", [None, 0, 1])
def test_an_overflow_on_one_rank_is_one_on_all(overflows: int | None) -> None:
    """A scaled loss: no rank takes a step that another one leaves out."""

    def work(communicator: Any) -> tuple[bool, float, list[bool]]:
        gradient = np.full(3, np.inf if communicator.rank == overflows else 8.0, np.float32)
        told: list[bool] = []

        def end_scaled_step(finite: bool) -> float:
            told.append(finite)
            return 8.0

        way = SimpleNamespace(
            _exchange=SimpleNamespace(communicator=communicator, trained=gradient)
        )
        optimizer = SimpleNamespace(end_scaled_step=end_scaled_step)
        learner: Any = SimpleNamespace(optimizer=optimizer)
        return OptimizerSteps._unscaled(way, learner, 4), float(gradient[0]), told

    for taken, value, told in on_ranks(2, work):
        assert taken == told[0] == (overflows is None)
        assert not taken or value == 1.0
