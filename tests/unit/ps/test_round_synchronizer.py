"""Rounds inside compiled calls: orders are followed at the same round by all ranks, errors pass."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import numpy as np
import pytest
from ps_learner import LAYOUT, Learner, clients, stack_of, together

from sparkdl.config import LoopSettings
from sparkdl.data import Batches, rows_from_numpy
from sparkdl.errors import TransportError
from sparkdl.files.run_state import RunState
from sparkdl.ps.client import Progress
from sparkdl.ps.round_synchronizer import RoundSynchronizer
from sparkdl.ps.strategy import ServerSynchronizer
from sparkdl.rules import BSP
from sparkdl.training.changes import VariableChanges
from sparkdl.training.finite import FiniteCheck
from sparkdl.training.learning import MAX_STACK
from sparkdl.training.reports import Report
from sparkdl.weights import NotFiniteError
from sparkdl.worker import train


class Rank(Learner):
    """The small learner, as the loop calls it; may do something at one of its steps."""

    def __init__(self, at: int = -1, action: Any = None) -> None:
        super().__init__()
        self.rounds = 0
        self.rate_changes: list[int] = []
        self.changed: list[tuple[int, float]] = []
        self._at, self._action = at, action

    def apply_gradients(self, flat: Any) -> None:
        self.rounds += 1
        if self.rounds == self._at:
            self._action()
        super().apply_gradients(flat)

    def set_learning_rate(self, value: float) -> None:
        self.rate, self.learning_rate = value, value
        self.rate_changes.append(self.rounds)

    def take_changes(self, changes: VariableChanges) -> None:
        self.changed.append((self.rounds, float(changes.model[5])))


def run(parts: list[int], order: dict[str, Any], at: int, epochs: int = 1) -> list[Rank]:
    """Two ranks with so many batches of 4 rows; the driver's order comes amid rank 0's stack."""
    with clients(BSP(), 2) as (made, server), server.driver() as driver:
        learners = [Rank(at, lambda: driver.control(**order)), Rank()]
        for learner, count in zip(learners, parts, strict=True):
            learner.carried = b"counted %d" % count

        def work(rank: int) -> None:
            count = 4 * parts[rank]
            x = np.linspace(rank, rank + 1, max(count, 1), dtype=np.float32)[:count, None]
            rows = rows_from_numpy(x, x[:, 0])
            synchronizer = ServerSynchronizer(BSP(), made[rank], LAYOUT, False)
            settings = LoopSettings(epochs=epochs, batch_size=4)
            train(
                learners[rank], synchronizer, Batches(rows, 4, shuffle=False, prefetch=0),
                settings, num_rows=count, num_workers=2,
            )  # fmt: skip

        together(lambda: work(0), lambda: work(1))
        np.testing.assert_array_equal(server.center, learners[0].weights)  # what the fit returns
    np.testing.assert_array_equal(learners[0].weights, learners[1].weights)
    return learners


@pytest.mark.parametrize("parts", [[40, 40], [40, 23], [40, 5], [40, 0]])
def test_all_ranks_stop_after_the_same_round(parts: list[int]) -> None:
    learners = run(parts, {"stop": True}, at=MAX_STACK + 3)
    assert [learner.rounds for learner in learners] == [2 * MAX_STACK] * 2


@pytest.mark.parametrize("parts", [[40, 40], [40, 23]])
def test_all_ranks_change_the_rate_after_the_same_round(parts: list[int]) -> None:
    learners = run(parts, {"learning_rate": 0.25}, at=3)
    assert [learner.rate_changes for learner in learners] == [[MAX_STACK]] * 2
    assert [learner.rounds for learner in learners] == [40, 40]


@pytest.mark.parametrize("parts", [[40, 40], [40, 23]])
def test_all_ranks_take_what_callbacks_wrote_after_the_same_round(parts: list[int]) -> None:
    learners = run(parts, {"changes": VariableChanges({5: np.array(0.5)})}, at=3)
    assert [learner.changed for learner in learners] == [[(MAX_STACK, 0.5)]] * 2
    assert [learner.rounds for learner in learners] == [40, 40]


@pytest.mark.parametrize("parts", [[40, 23], [23, 40], [40, 0]])
def test_a_rank_with_fewer_batches_ends_its_epoch_with_the_counters_of_the_other(
    parts: list[int],
) -> None:
    learners = run(parts, {}, at=3)
    assert [learner.carried for learner in learners] == [b"counted 40"] * 2


@pytest.mark.parametrize("stop", [{"stop": True}, {"stop": True, "release": 0}])
def test_a_stop_in_a_later_epoch_leaves_the_weights_of_the_last_step(stop: Any) -> None:
    """A release tells the stop at once, as after an order amid an epoch."""
    learners = run([40, 40], stop, at=2 * MAX_STACK + 3, epochs=2)
    assert [learner.rounds for learner in learners] == [40] * 2
    learners = run([40, 40], stop, at=40 + 3, epochs=2)
    assert [learner.rounds for learner in learners] == [40 + MAX_STACK] * 2


def test_the_death_of_a_worker_after_the_last_round_loses_nothing() -> None:
    """Rank 0 is killed while it evaluates: rank 1 has heard of no death when it ends its epoch."""
    with clients(BSP(), 2) as (made, server):
        learners = [Rank(), Rank()]
        syncs = [ServerSynchronizer(BSP(), client, LAYOUT, False) for client in made]

        def rounds(rank: int) -> None:
            syncs[rank].start(learners[rank], 2, 2, 2)
            report = Report(0, 2, 2, batches=2, rows=2, learning_rate=0.5)
            syncs[rank].train(learners[rank], stack_of([1.0], [2.0]), report)

        together(lambda: rounds(0), lambda: rounds(1))
        made[0].close()
        syncs[1].keep_state(learners[1], 1)
        syncs[1].end_epoch(learners[1], 0, np.zeros(2), None, wait=False)
        syncs[1].finish(learners[1], 2)
        assert learners[1].weights.any()
        np.testing.assert_array_equal(server.center, learners[1].weights)
        with server.driver() as driver:
            assert RunState.from_bytes(driver.kept()).epoch == 2  # the optimizer state, at its end
        assert syncs[1].outcome(learners[1], 2).state is None


def test_every_batch_of_a_stack_is_a_commit_of_its_own() -> None:
    with clients(BSP(), 1) as ([client], server):
        client.join(batches_per_epoch=5)
        learner, sync = Rank(), RoundSynchronizer(client, LAYOUT)
        sync.start(learner)
        sync.train(learner, stack_of([1.0], [2.0, 3.0], [4.0]), Progress(0, 3, 3, 4))
        [worker] = server.coordinator.group.workers.values()
        assert (worker.epoch, worker.batch, worker.applied) == (0, 3, 3)


class Noting(BSP):
    """A rule of a user's own, which looks at the rate of each round."""

    rates: ClassVar[list[float]] = []

    def update(self, center: Any, delta: Any, state: Any, commit: Any, out: Any) -> None:
        self.rates.append(round(commit.learning_rate, 6))
        super().update(center, delta, state, commit, out)


class Scheduled(Rank):
    """Its rate is .1 after one step, .2 after two."""

    has_schedule = True

    @property
    def learning_rate(self) -> float:  # type: ignore[override]
        return self.rounds / 10

    @learning_rate.setter
    def learning_rate(self, value: float) -> None: ...


@pytest.mark.parametrize("parts", [[5, 5], [5, 2], [5, 0], [0, 5]])
def test_every_round_has_the_rate_of_its_step(parts: list[int]) -> None:
    """Also where a stack holds several, and for a rank without a batch."""
    Noting.rates.clear()
    rule = Noting()
    with clients(rule, 2) as (made, _):
        learners = [Scheduled(), Scheduled()]

        def work(rank: int) -> None:
            x = np.ones((max(4 * parts[rank], 1), 1), np.float32)[: 4 * parts[rank]]
            batches = Batches(rows_from_numpy(x, x[:, 0]), 4, shuffle=False, prefetch=0)
            sync = ServerSynchronizer(rule, made[rank], LAYOUT, False)
            settings = LoopSettings(epochs=2, batch_size=4, follow_schedule=False)
            train(learners[rank], sync, batches, settings, num_rows=len(x), num_workers=2)

        together(lambda: work(0), lambda: work(1))
    assert Noting.rates == [i / 10 for i in range(10)]


def test_a_round_without_rows_of_any_rank_changes_nothing() -> None:
    with clients(BSP(), 1) as ([client], _):
        client.join(batches_per_epoch=3)
        learner, sync = Rank(), RoundSynchronizer(client, LAYOUT)
        sync.start(learner)
        sync.train(learner, stack_of([1.0, 2.0]), Progress(0, 1, 1, 2))
        before = learner.weights.copy()
        sync.train(learner, None, Progress(0, 2, 1, 0))
        np.testing.assert_array_equal(learner.weights, before)


@pytest.mark.parametrize("on_nan", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_is_left_out_of_its_round(on_nan: str) -> None:
    with clients(BSP(), 1) as ([client], _):
        client.join(batches_per_epoch=3)
        check = FiniteCheck(on_nan, LAYOUT.trained_size)
        learner, sync = Rank(), RoundSynchronizer(client, LAYOUT, check)
        sync.start(learner)
        stack = stack_of([1.0], [float("nan")], [1.0])
        if on_nan == "raise":
            with pytest.raises(NotFiniteError) as caught:
                sync.train(learner, stack, Progress(0, 3, 3, 3))
            assert caught.value.among == (1, 2)
        else:
            sync.train(learner, stack, Progress(0, 3, 3, 3))
            assert check.refused == 1
        assert np.isfinite(learner.weights).all()


def test_after_a_gradient_that_was_left_out_the_rows_of_the_next_ones_count() -> None:
    class OneSize(Rank):
        """Tells the rows once per stack, as a learner of equal batches may."""

        def train_reducing(self, batches: Any, reducer: Any) -> None:
            reducer.rows = 1
            for batch in batches.y["label"]:
                self.gradients(batch, reducer.buffer)
                reducer.begin(0)
                if reducer.finish():
                    self.apply_gradients(reducer.buffer)

    with clients(BSP(), 1) as ([client], _):
        client.join(batches_per_epoch=4)
        learner = OneSize()
        sync = RoundSynchronizer(client, LAYOUT, FiniteCheck("skip", LAYOUT.trained_size))
        sync.start(learner)
        sent: list[tuple[int, int]] = []
        push_pull = client.push_pull

        def noting(progress: Progress) -> Any:
            sent.append((progress.rows, progress.batches))
            return push_pull(progress)

        client.push_pull = noting  # type: ignore[method-assign]
        sync.train(learner, stack_of([1.0], [float("nan")], [1.0], [1.0]), Progress(0, 4, 4, 4))
        assert sent == [(1, 1), (0, 0), (1, 1), (1, 1)]
        assert learner.rounds == 3


def test_a_lost_server_raises_the_library_s_error_from_inside_the_call() -> None:
    class Wrapping(Rank):
        """As frameworks do with what a compiled call raises."""

        def train_reducing(self, batches: Any, reducer: Any) -> None:
            try:
                super().train_reducing(batches, reducer)
            except Exception as error:
                raise RuntimeError("in the graph") from error

    with clients(BSP(), 2) as (made, _):
        together(*[c.join for c in made])
        learner, sync = Wrapping(), RoundSynchronizer(made[0], LAYOUT)
        sync.start(learner)
        ended = threading.Timer(0.2, made[0].close)
        ended.start()
        with pytest.raises(TransportError):
            sync.train(learner, stack_of([1.0]), Progress(0, 1, 1, 1))
        ended.join()
