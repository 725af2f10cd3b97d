"""Window and gradient synchronizers over an in-process server, with learners of a few lines."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ps_learner import LAYOUT, Learner, clients, stack_of, together

from sparkdl.config import EPOCH_WINDOW, LoopSettings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.errors import ConfigError, TransportError
from sparkdl.files.run_state import RunState
from sparkdl.ps.client import Progress
from sparkdl.ps.round_synchronizer import RoundSynchronizer
from sparkdl.ps.strategy import ServerSynchronizer
from sparkdl.ps.synchronizer import ServerGradientSynchronizer, WindowSynchronizer
from sparkdl.rules import AEASGD, BSP, Averaging, Downpour, Rule
from sparkdl.training.finite import FiniteCheck
from sparkdl.training.learning import MAX_STACK
from sparkdl.training.reports import Report
from sparkdl.weights import NotFiniteError
from sparkdl.worker import train

STEP = Progress(epoch=0, batch=1, batches=1, rows=1)


def test_windows_exchange_by_the_rule() -> None:
    with clients(Downpour(), 2) as (made, _):
        learners = [Learner(), Learner()]
        syncs = [WindowSynchronizer(Downpour(), c, LAYOUT) for c in made]
        for client, sync, learner in zip(made, syncs, learners, strict=True):
            client.join()
            sync.start(learner)
        learners[0].weights += 1
        syncs[0].after_window(learners[0], STEP)
        learners[1].weights += 2
        syncs[1].after_window(learners[1], STEP)
        syncs[0].after_window(learners[0], STEP)
        for learner in learners:
            np.testing.assert_allclose(learner.weights, [3] * 6 + [1.5] * 2)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_sent_is_damped_but_not_the_statistics(overlap: bool) -> None:
    with clients(Downpour(), 2) as (made, _):
        for client in made:
            client.join()
        learner = Learner()
        sync = WindowSynchronizer(Downpour(), made[0], LAYOUT, overlap=overlap)
        sync.start(learner)
        assert sync._damping is not None
        sync._damping.factor = 0.5
        learner.weights += 2
        sync.after_window(learner, STEP)
        sync.drain(learner)
        # the trained half of 2, and the share of one of two workers in the statistics
        np.testing.assert_allclose(made[1].pull(), [1] * LAYOUT.trained_size + [1, 1])
        np.testing.assert_allclose(learner.weights, 1)
        assert sync.counted == 0.5


class Counting(Learner):
    """Adds its batch's number to every weight; a batch of NaN makes weights NaN."""

    def train_exchanging(self, stack: Any, window: int, exchanger: Any) -> None:
        batches = stack.y["label"]
        for first in range(0, len(batches), window):
            for batch in batches[first : first + window]:
                self.weights += batch[0]
            self.read_weights(exchanger.buffer)
            exchanger.exchange()
            self.write_weights(exchanger.buffer)


def test_several_windows_of_a_stack_are_an_exchange_each() -> None:
    sent: list[Progress] = []
    with clients(Downpour(), 2) as (made, _):
        for client in made:
            client.join()
        learner = Counting()
        sync = WindowSynchronizer(Downpour(damping=False), made[0], LAYOUT, overlap=False)
        assert sync.cuts_stacks
        sync.start(learner)
        push_pull = made[0].push_pull

        def note(progress: Progress) -> Any:
            sent.append(progress)
            made[1].buffer[...] = 10  # another worker comes between
            made[1].push_pull(progress)
            return push_pull(progress)

        made[0].push_pull = note  # type: ignore[method-assign]
        stack = stack_of(*([float(n)] * 4 for n in range(1, 6)))
        sync.train(learner, stack, 2, Progress(epoch=3, batch=25, batches=5, rows=20))
        assert [(p.epoch, p.batch, p.batches, p.rows) for p in sent] == [
            (3, 22, 2, 8),
            (3, 24, 2, 8),
            (3, 25, 1, 4),
        ]
        trained = slice(0, LAYOUT.trained_size)
        np.testing.assert_allclose(learner.weights[trained], 1 + 2 + 3 + 4 + 5 + 30)
        np.testing.assert_allclose(made[0].pull(), learner.weights)


def test_weights_that_are_not_finite_within_a_stack_name_their_window() -> None:
    with clients(Downpour(), 1) as ([client], _):
        client.join()
        check = FiniteCheck("raise", LAYOUT.trained_size)
        learner, sync = Counting(), WindowSynchronizer(
            Downpour(), client, LAYOUT, overlap=False, check=check
        )  # fmt: skip
        sync.start(learner)
        stack = stack_of([1.0], [1.0], [1.0], [float("nan")], [1.0])
        with pytest.raises(NotFiniteError) as caught:
            sync.train(learner, stack, 2, Progress(epoch=0, batch=5, batches=5, rows=5))
        assert caught.value.among == (2, 4)
        np.testing.assert_allclose(client.pull(), 2)  # only the first window was sent


@pytest.mark.parametrize(
    ("rule", "overlap", "on_nan"),
    [
        (Downpour(), None, "raise"),
        (Downpour(), True, "raise"),
        (Downpour(), False, "skip"),
        (BSP(payload="delta"), False, "raise"),
    ],
)
def test_exchanges_stay_out_of_a_call_that_could_not_do_all_they_need(
    rule: Rule, overlap: bool | None, on_nan: str
) -> None:
    check = FiniteCheck(on_nan, LAYOUT.trained_size)
    sync = WindowSynchronizer(rule, None, LAYOUT, overlap=overlap, check=check)  # type: ignore[arg-type]
    assert not sync.cuts_stacks


def test_an_elastic_exchange_conserves() -> None:
    rule = AEASGD().bind(1)
    with clients(rule, 1) as ([client], _):
        client.join()
        learner, sync = Learner(), WindowSynchronizer(rule, client, LAYOUT)
        sync.start(learner)
        learner.weights += 1
        sync.after_window(learner, STEP)
        center = client.pull()
        assert 0 < center[0] < 1
        np.testing.assert_allclose(learner.weights + center, 1, rtol=1e-6)


def test_overlap_keeps_what_was_trained_meanwhile() -> None:
    with clients(Downpour(), 1) as ([client], _):
        client.join()
        learner, sync = Learner(), WindowSynchronizer(Downpour(), client, LAYOUT, overlap=True)
        sync.start(learner)
        for window in range(1, 6):
            learner.weights += 1
            sync.after_window(learner, replace(STEP, batch=window))
        sync.drain(learner)
        np.testing.assert_allclose(learner.weights, 5)
        np.testing.assert_allclose(client.pull(), 5)


def test_overlap_with_others_gets_their_part() -> None:
    with clients(Downpour(), 2) as (made, _):
        learners = [Learner(), Learner()]
        syncs = [WindowSynchronizer(Downpour(), c, LAYOUT, overlap=True) for c in made]
        for client, sync, learner in zip(made, syncs, learners, strict=True):
            client.join()
            sync.start(learner)
        for _ in range(4):
            for sync, learner, change in zip(syncs, learners, (1, 10), strict=True):
                learner.weights += change
                sync.after_window(learner, STEP)
        for sync, learner in zip(syncs, learners, strict=True):
            sync.drain(learner)
        trained = slice(0, LAYOUT.trained_size)
        np.testing.assert_allclose(made[0].pull()[trained], 44)
        np.testing.assert_allclose(learners[1].weights[trained], 44)


@pytest.mark.parametrize(
    ("train_s", "exchange_s", "begins"), [(0.02, 0.03, True), (0.1, 0.0, False)]
)
def test_overlap_begins_where_exchanges_take_long(
    train_s: float, exchange_s: float, begins: bool
) -> None:
    with clients(Downpour(), 1) as ([client], _):
        client.join()
        learner, sync = Learner(), WindowSynchronizer(Downpour(), client, LAYOUT)
        sync.start(learner)
        quick = client.push_pull

        def push_pull(progress: Any) -> Any:
            time.sleep(exchange_s)
            return quick(progress)

        client.push_pull = push_pull
        for window in range(1, 13):
            time.sleep(train_s)
            learner.weights += 1
            sync.after_window(learner, replace(STEP, batch=window))
        sync.drain(learner)
        assert sync.overlaps == begins
        np.testing.assert_allclose(learner.weights, 12)
        np.testing.assert_allclose(client.pull(), 12)


def test_state_is_kept_whole_beside_an_exchange_under_way() -> None:
    class Stateful(Learner):
        def optimizer_state(self) -> bytes:
            return bytes(range(100))  # several times the buffer

        def train(self, stack: Any) -> None:
            self.weights += 1

    with clients(Downpour(), 1) as ([client], server):
        learner = Stateful()
        sync = ServerSynchronizer(Downpour(), client, LAYOUT, overlap=True)
        sync.start(learner, 1, 1, 1)
        quick = client.push_pull

        def push_pull(progress: Any) -> Any:
            time.sleep(0.05)
            return quick(progress)

        client.push_pull = push_pull
        for batch in range(1, 5):
            sync.train(learner, object(), Report(0, batch, batch, 1, 1, 0.1))
            sync.keep_state(learner, batch)
        with server.driver() as driver:
            for epoch in (4, 9):
                kept = RunState.from_bytes(driver.kept())
                assert (kept.epoch, kept.optimizer) == (epoch, bytes(range(100)))
                if epoch == 4:
                    sync.finish(learner, 9)
        np.testing.assert_allclose(learner.weights, 4)
        assert sync.outcome(learner, 9).state is None  # the server has it


def test_overlap_raises_in_the_training_thread() -> None:
    with clients(Downpour(), 1) as ([client], _):
        client.join()
        learner, sync = Learner(), WindowSynchronizer(Downpour(), client, LAYOUT, overlap=True)
        sync.start(learner)
        push_pull = client.push_pull

        def close_amid(progress: Progress) -> Any:
            client.close()
            return push_pull(progress)

        client.push_pull = close_amid  # type: ignore[method-assign]
        sync.after_window(learner, STEP)  # the exchange is in flight
        with pytest.raises(TransportError, match="closed"):
            sync.drain(learner)
        with pytest.raises(TransportError, match="closed"):
            sync.after_window(learner, STEP)


def test_gradients_without_waiting_train_on_from_the_center() -> None:
    class Descent(Rule):
        payload = "gradient"

        def update(self, center: Any, delta: Any, state: Any, commit: Any, out: Any) -> None:
            out[...] = center - np.float32(0.5) * delta

    with clients(Descent(), 1) as ([client], _):
        client.join()
        learner, alone = Learner(), Learner()
        sync = ServerGradientSynchronizer(client, LAYOUT)
        sync.start(learner)
        flat = np.zeros(LAYOUT.size, np.float32)
        for batch in ([1.0, 2.0], [3.0]):
            sync.step(learner, batch, replace(STEP, rows=len(batch)))  # type: ignore[arg-type]
            alone.gradients(batch, flat)
            alone.apply_gradients(flat)
        np.testing.assert_allclose(learner.weights, alone.weights)


def test_a_pull_is_told_to_the_rule() -> None:
    told: list[tuple[int, float]] = []

    class Told(Downpour):
        def pulled(self, center: Any, state: Any, worker: int) -> None:
            told.append((worker, float(center[0])))

    with clients(Told(), 2) as (made, _):
        for client in made:
            client.join()
            client.pull()
            client.buffer[...] = 1
            client.push_pull(STEP)
        assert told == [(0, 0.0), (1, 1.0)]


@pytest.mark.parametrize("rule", [AEASGD(), BSP(payload="delta")])
def test_overlap_is_for_plain_deltas(rule: Rule) -> None:
    with pytest.raises(ConfigError, match="overlap"):
        WindowSynchronizer(rule, None, LAYOUT, overlap=True)  # type: ignore[arg-type]


def test_gradient_steps_equal_one_process_on_the_global_batch() -> None:
    batches = {0: [[1.0, 2.0, 3.0], [4.0]], 1: [[5.0], None]}
    alone = Learner()
    flat = np.zeros(LAYOUT.size, np.float32)
    for whole in ([1.0, 2.0, 3.0, 5.0], [4.0]):
        alone.gradients(whole, flat)
        alone.apply_gradients(flat)
    with clients(BSP(), 2) as (made, server):
        learners = [Learner(), Learner()]

        def work(rank: int) -> None:
            client, learner = made[rank], learners[rank]
            client.join(batches_per_epoch=len(batches[rank]))
            sync = RoundSynchronizer(client, LAYOUT)
            sync.start(learner)
            for i, batch in enumerate(batches[rank]):
                stack = None if batch is None else stack_of(batch)
                sync.train(learner, stack, Progress(0, i + 1, 1, 0 if batch is None else 1))
                assert client.round_rows == (4, 1)[i]
            sync.snapshot(learner, epoch=1)
            client.session.finish()

        together(lambda: work(0), lambda: work(1))
        for learner in learners:
            np.testing.assert_allclose(learner.weights, alone.weights, rtol=1e-6)
        np.testing.assert_array_equal(server.center, learners[0].weights)


def test_a_retried_rank_joins_with_the_state_of_a_live_one() -> None:
    with clients(BSP(), 2) as (made, server):
        learners = [Learner(), Learner(), Learner(rate=7.0)]
        syncs = [RoundSynchronizer(c, LAYOUT) for c in made]
        together(*[c.join for c in made])
        for sync, learner in zip(syncs, learners, strict=False):
            sync.start(learner)

        def step(sync: Any, learner: Learner, number: int) -> None:
            sync.train(learner, stack_of([float(number)]), Progress(0, number, 1, 1))

        together(*[lambda i=i: step(syncs[i], learners[i], 1) for i in (0, 1)])
        made[1].close()
        late = server.client(1, attempt=1)
        fresh = RoundSynchronizer(late, LAYOUT)

        def join() -> None:
            welcome = late.join()
            assert welcome.source == "state"
            fresh.start(learners[2])
            for number in range(welcome.batch + 1, 6):
                step(fresh, learners[2], number)

        def stay() -> None:
            for number in range(2, 6):
                step(syncs[0], learners[0], number)
                if number == 2:
                    while not late.session.welcome:  # so that it certainly joins before the end
                        threading.Event().wait(0.01)

        joining = threading.Thread(target=lambda: together(join), daemon=True)
        joining.start()
        while "join" not in {w.reason for w in list(server.coordinator.group.waits.values())}:
            threading.Event().wait(0.01)
        together(stay)
        joining.join(10)
        assert learners[2].loaded == 1
        assert learners[2].rate == learners[0].rate
        np.testing.assert_array_equal(learners[0].weights, learners[2].weights)
        late.close()


@pytest.mark.parametrize("rule", [Downpour(), AEASGD().bind(2)], ids=["downpour", "elastic"])
@pytest.mark.parametrize("overlap", [False, None])
def test_the_center_is_evaluated_and_training_goes_on(rule: Rule, overlap: bool | None) -> None:
    with clients(rule, 2) as (made, _):
        learners = [Learner(), Learner()]
        syncs = [WindowSynchronizer(rule, c, LAYOUT, overlap=overlap) for c in made]
        for client, sync, learner in zip(made, syncs, learners, strict=True):
            client.join()
            sync.start(learner)
        for sync, learner in zip(syncs, learners, strict=True):
            learner.weights += 8
            sync.after_window(learner, STEP)
        own = learners[0].weights.copy()
        center = made[1].pull().copy()
        with syncs[0].center_loaded(learners[0], last=False):
            np.testing.assert_array_equal(learners[0].weights, center)
            assert not np.array_equal(own, center)
        if isinstance(rule, Downpour):  # it goes on from what it has now
            np.testing.assert_array_equal(learners[0].weights, center)
        else:  # elastic workers have weights of their own
            np.testing.assert_array_equal(learners[0].weights, own)
        learners[0].weights += 1
        syncs[0].after_window(learners[0], STEP)
        if isinstance(rule, Downpour):  # nothing is lost and nothing counts twice
            trained = slice(0, LAYOUT.trained_size)
            np.testing.assert_allclose(made[1].pull()[trained], 17)


class Trained(Learner):
    """As the loop calls it; does something at one of its batches."""

    step, learning_rate, has_schedule, scales_loss = 0, 0.5, False, False

    def __init__(self, at: int, action: Any) -> None:
        super().__init__()
        self.batches = 0
        self._at, self._action = at, action

    def train(self, stack: Any) -> None:
        gradient = np.empty_like(self.weights)
        for batch in stack.y["label"]:
            self.batches += 1
            if self.batches == self._at:
                self._action()
            self.gradients(batch, gradient)
            self.apply_gradients(gradient)

    def metric_state(self) -> Any:
        return np.zeros(2)

    def reset_metrics(self) -> None: ...


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("window", "trained"), [(40, 28), (EPOCH_WINDOW, 2 * MAX_STACK)])
def test_a_stop_amid_a_window_commits_what_was_trained(
    window: int, trained: int, overlap: bool
) -> None:
    with clients(Downpour(), 1) as ([client], server), server.driver() as driver:
        learner = Trained(20, lambda: driver.control(stop=True))
        rows = rows_from_numpy(np.ones((320, 1), np.float32), np.linspace(1, 2, 320))
        train(
            learner, ServerSynchronizer(Downpour(), client, LAYOUT, overlap),
            Batches(rows, 4, shuffle=False, prefetch=0),
            LoopSettings(epochs=1, batch_size=4, window=window, report_interval_s=0.0),
            num_rows=320,
        )  # fmt: skip
        assert learner.batches == trained
        assert learner.weights.any()
        np.testing.assert_array_equal(server.center, learner.weights)
        [worker] = server.coordinator.group.workers.values()
        assert (worker.epoch, worker.batch, worker.rows) == (0, trained, 4 * trained)


def test_a_stop_amid_a_window_of_workers_that_wait_commits_what_all_have_trained() -> None:
    with clients(Averaging(), 2) as (made, server), server.driver() as driver:
        stop = {"stop": True, "release": 0}  # as the driver orders it amid an epoch
        both_train = threading.Event()  # who hears of the stop before its first batch has nothing

        def order() -> None:
            assert both_train.wait(20)
            driver.control(**stop)

        learners = [Trained(20, order), Trained(1, both_train.set)]

        def work(rank: int) -> None:
            rows = rows_from_numpy(np.ones((320, 1), np.float32), np.full(320, rank + 1.0))
            train(
                learners[rank], ServerSynchronizer(Averaging(), made[rank], LAYOUT, False),
                Batches(rows, 4, shuffle=False, prefetch=0),
                LoopSettings(1, batch_size=4, window=EPOCH_WINDOW, report_interval_s=0.0),
                num_rows=320, num_workers=2,
            )  # fmt: skip

        together(lambda: work(0), lambda: work(1))
        assert learners[0].batches == 2 * MAX_STACK
        np.testing.assert_array_equal(learners[0].weights, learners[1].weights)
        np.testing.assert_array_equal(server.center, learners[0].weights)
        assert 1 < server.center[0] < 2  # of both


def test_the_last_evaluation_is_of_all_commits() -> None:
    with clients(Downpour(), 2) as (made, _):
        learners = [Learner(), Learner()]
        syncs = [WindowSynchronizer(Downpour(), c, LAYOUT) for c in made]
        for client, sync, learner in zip(made, syncs, learners, strict=True):
            client.join()
            sync.start(learner)
        seen: dict[int, Any] = {}

        def end(rank: int) -> None:
            time.sleep(0.2 * rank)
            learners[rank].weights += 1
            syncs[rank].after_window(learners[rank], STEP)
            with syncs[rank].center_loaded(learners[rank], last=True):
                seen[rank] = learners[rank].weights[0]

        together(lambda: end(0), lambda: end(1))
        assert seen == {0: 2.0, 1: 2.0}
