"""Ranks that a strategy connects, and their connection to the coordinator in the driver."""

from __future__ import annotations

import contextlib
import pickle
import threading
from typing import ClassVar

import cloudpickle
import numpy as np
import pytest
from plain_learner import PlainLearner

from sparkdl.collective import communicator
from sparkdl.collective.builtin import BuiltinConnector
from sparkdl.collective.communicator import maker_of, register
from sparkdl.collective.strategy import AllReduceStrategy
from sparkdl.config import COMMUNICATORS, FitConfig
from sparkdl.coordinator.driver_client import CoordinatorHost
from sparkdl.coordinator.session import open_session
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.files.run_state import RunState
from sparkdl.training.learning import BatchStack
from sparkdl.training.reports import Report
from sparkdl.transport.address import ListenOptions
from sparkdl.weights import FloatArray, Layout

LAYOUT = Layout.of([("w", (3,), "float32")], [])


class Slope(PlainLearner):
    """A learner of three weights, whose gradient is the rank's own number."""

    def __init__(self, rank: int) -> None:
        super().__init__(LAYOUT)
        self.rank = rank
        self.weights[:] = rank

    def optimizer_state(self) -> bytes:
        return b"state of rank %d" % self.rank

    def load_optimizer_state(self, state: bytes) -> None:
        assert state == b"state of rank 1"  # the rank with the most rows

    def batches_of(self, stack: BatchStack) -> list[BatchStack]:
        return [stack]

    def rows_of(self, batch: BatchStack) -> int:
        return batch.num_rows

    def gradients(self, batch: BatchStack, out: FloatArray) -> None:
        out[...] = self.rank

    def apply_gradients(self, flat: FloatArray) -> None:
        self.weights -= np.float32(0.5) * flat


def test_a_run_with_a_coordinator() -> None:
    strategy = AllReduceStrategy(b"t" * 16, LAYOUT, "builtin", {"advertised_host": "127.0.0.1"})
    listen = ListenOptions("socket", 0, "127.0.0.1", None, web=False)
    rows, results = [1, 3], [None, None]

    def work(host: CoordinatorHost, rank: int) -> None:
        with contextlib.ExitStack() as stack:
            session = stack.enter_context(open_session(host.endpoint, rank=rank))
            opened = strategy.open(session, LAYOUT, session)
            synchronizer, learner = stack.enter_context(opened), Slope(rank)
            start = synchronizer.start(learner, rows=rows[rank], batches=1, windows=1)
            assert start.windows_per_epoch == 1
            batch = BatchStack({}, {}, None, 1, rows[rank])
            metrics = np.array([rows[rank], 1.0])
            synchronizer.train(learner, batch, Report(0, 1, 1, 1, rows[rank], 0.5, metrics))
            synchronizer.keep_state(learner, 1)
            synchronizer.end_epoch(learner, 0, metrics, metrics, wait=False)
            synchronizer.finish(learner, 1)
            outcome = synchronizer.outcome(learner, 1)
            assert outcome.unreported == {}
            assert outcome.transport == "builtin"
            results[rank] = outcome.state

    with CoordinatorHost(Settings(2), listen) as host:
        threads = [threading.Thread(target=work, args=(host, rank)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        status, kept = host.driver.status(0), host.driver.kept()
    totals = status.epochs[0]
    assert (totals.rows, totals.ended) == (4, (0, 1))
    assert totals.metrics.tolist() == totals.val_metrics.tolist() == [4.0, 2.0]
    assert all(worker.finished for worker in status.workers.values())
    want = np.full(3, 1.0 - 0.5 * 0.75)  # rank 1's weights, and the row-weighted mean of 0 and 1
    assert results == [None, None]  # the coordinator has it
    state = RunState.from_bytes(kept)
    assert (state.epoch, state.optimizer) == (1, b"state of rank 1")
    np.testing.assert_allclose(state.weights, want)


@pytest.mark.parametrize("name", ["solo", "builtin"])
def test_a_run_without_a_coordinator_keeps_its_reports(name: str) -> None:
    class Alone:
        rank = 0

        def all_gather(self, text: str) -> list[str]:
            return [text]

    with AllReduceStrategy(b"t" * 16, LAYOUT, name).open(Alone(), LAYOUT) as synchronizer:
        learner = Slope(1)
        synchronizer.start(learner, rows=2, batches=1, windows=1)
        report = Report(0, 1, 1, 1, 2, 0.5, np.ones(2))
        synchronizer.train(learner, BatchStack({}, {}, None, 1, 2), report)
        assert synchronizer.outcome(learner, 0).unreported == {}  # the epoch has not ended
        synchronizer.end_epoch(learner, 0, np.array([2.0, 1.0]), None, wait=False)
        synchronizer.finish(learner, 1)
    kept = synchronizer.outcome(learner, 1).unreported[0]
    assert (kept.rows, kept.batches_done, kept.ended) == (2, 1, True)
    assert kept.metrics.tolist() == [2.0, 1.0]
    assert not kept.val_metrics.size


class Counted(BuiltinConnector):
    """A connector of a user's own, which counts the ranks that it connects."""

    name: ClassVar[str] = "counted"


def test_a_communicator_of_ones_own_has_a_name_and_travels_as_its_class() -> None:
    assert register(Counted) is register(Counted)
    try:
        config = FitConfig(mode="allreduce", communicator="counted")
        maker = maker_of(config.communicator)
        sent = cloudpickle.dumps(AllReduceStrategy(b"t" * 16, LAYOUT, maker))
    finally:
        COMMUNICATORS.remove("counted")  # as on an executor, where nobody has registered it
        del communicator._MAKERS["counted"]
    with contextlib.closing(pickle.loads(sent).connector(0)) as connector:
        assert type(connector) is Counted
    with pytest.raises(UnknownNameError, match="counted"):
        FitConfig(mode="allreduce", communicator="counted")
    assert maker_of("builtin") == "builtin"


@pytest.mark.parametrize("name", ["builtin", None])
def test_a_communicator_has_a_name_that_no_other_one_has(name: str | None) -> None:
    with pytest.raises(ConfigError, match="a name that no other one has"):
        register(type("Second", (Counted,), {"name": name}))
    with pytest.raises(ConfigError, match="prepare, connect and close"):
        register(type("Nothing", (), {"name": "nothing"}))
    assert sorted(COMMUNICATORS) == ["auto", "builtin", "horovod"]
