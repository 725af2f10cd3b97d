"""The driver's end of a run: what workers keep and return, as one RunState. No Spark is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from sparkdl import Network
from sparkdl.collective.choice import AllReduceExchange
from sparkdl.collective.rules import make_rule as make_exchange_rule
from sparkdl.collective.strategy import BarrierStrategy
from sparkdl.config import FitConfig, LoopSettings
from sparkdl.coordinator.session import open_session
from sparkdl.errors import TransportError
from sparkdl.files.run_state import RunState
from sparkdl.progress.monitor import Command
from sparkdl.ps.choice import ServerExchange
from sparkdl.ps.kinds import limits_of
from sparkdl.ps.server.config import TablesOfRun
from sparkdl.ps.strategy import ServerStrategy
from sparkdl.rules import make_rule
from sparkdl.spark.executor.trainer import TrainedRank
from sparkdl.spark.fit.training_run import (
    Run,
    ServerRun,
    SilentRun,
    returned_state,
    start_all_reduce,
)
from sparkdl.tables.checkpoints import TableReference
from sparkdl.training.reports import EpochReport
from sparkdl.weights import Layout

LAYOUT = Layout.of([("w", (3,), "float32")])
WEIGHTS = np.arange(3, dtype=np.float32)
HERE = Network(server_bind="127.0.0.1", encrypt=False)
RANKS_HERE = replace(HERE, worker_bind="127.0.0.1")


def planned(config: FitConfig, num_workers: int = 1) -> Any:
    """A plan as far as a run reads it, which the model and its framework are no part of."""
    source, settings = SimpleNamespace(spark=None), LoopSettings(1)
    return SimpleNamespace(
        config=config, num_workers=num_workers, at_once=0, source=source, settings=settings
    )


def returned(rank: int, state: RunState | None, **unreported: EpochReport) -> TrainedRank:
    epochs = {int(name[1:]): report for name, report in unreported.items()}
    return TrainedRank(rank, 4, "shm", 2.0, 0.1, (), 1, epochs, state)


@pytest.mark.processes
def test_a_run_with_a_server_has_the_center_from_the_start() -> None:
    config, exchange = FitConfig(network=HERE), ServerExchange(make_rule("downpour"), 4)
    with ServerRun.start(planned(config, 2), exchange, LAYOUT, WEIGHTS) as starting:
        run: Run = starting.result()
        assert run.kept() is None
        np.testing.assert_array_equal(run.state().weights, WEIGHTS)
        assert run.progress().joined == 0
        run.command(Command(stop=True))
        strategy = run.strategy
        assert isinstance(strategy, ServerStrategy)
        with open_session(strategy.endpoint, rank=1, limits=limits_of(LAYOUT)) as session:
            session.join(rows=4, batches_per_epoch=2)
            session.keep(RunState(3, optimizer=b"momentum").pieces(), 3)
            session.keep(RunState(3, WEIGHTS + 1).pieces(), 3, own=True)
            session.finish()
        assert run.member(0) is None
        np.testing.assert_array_equal(run.member(1).weights, WEIGHTS + 1)  # type: ignore[union-attr]
        result = run.result({0: returned(0, None), 1: returned(1, None)})
        np.testing.assert_array_equal(result.weights, WEIGHTS)
        assert (result.epoch, result.optimizer) == (3, b"momentum")


def test_a_run_without_a_server_has_what_a_rank_kept() -> None:
    config = FitConfig(mode="allreduce", communicator="builtin", network=RANKS_HERE)
    rule = make_exchange_rule("diloco")
    exchange = AllReduceExchange(rule, 4)
    with start_all_reduce(planned(config), exchange, rule, LAYOUT, b"outer") as starting:
        run = starting.result()
        strategy = run.strategy
        assert isinstance(strategy, BarrierStrategy)
        assert (strategy.gradients.rule_state, strategy.independent) == (b"outer", False)
        assert strategy.coordinator is not None
        assert run.kept() is None
        with pytest.raises(TransportError, match="left its weights"):
            run.state()
        with open_session(strategy.coordinator, rank=0) as session:
            session.join(rows=4, batches_per_epoch=2)
            session.keep(RunState(1, WEIGHTS, b"momentum", b"outer 1").pieces(), 1)
            session.report(EpochReport(0, 4, np.ones(2), ended=True))
            state = run.state()
            assert (state.epoch, state.optimizer, state.rule) == (1, b"momentum", b"outer 1")
            np.testing.assert_array_equal(state.weights, WEIGHTS)
            assert run.progress().epochs[0].missing == 0
            session.finish()


def test_the_plain_mean_needs_no_rule() -> None:
    config = FitConfig(mode="allreduce", communicator="builtin", network=RANKS_HERE)
    rule = make_exchange_rule("mean")
    for window, expected in ((1, None), (4, rule)):
        exchange = AllReduceExchange(rule, window, "fp16")
        with start_all_reduce(planned(config), exchange, rule, LAYOUT, b"") as starting:
            strategy = starting.result().strategy
            assert isinstance(strategy, BarrierStrategy)
            assert (strategy.gradients.rule, strategy.gradients.wire) == (expected, "float16")


def test_a_run_that_hears_nothing_has_what_the_stage_returned() -> None:
    run = SilentRun(None)  # type: ignore[arg-type]
    assert run.kept() is None
    assert run.progress().epochs == {}
    epoch = EpochReport(
        2, 4, np.array([1.0, 2.0]), ended=True, val_metrics=np.array([3.0]), batches_done=2
    )
    without_rows = replace(epoch, metrics=np.empty(0))
    ranks = {
        0: returned(0, None, e2=epoch),
        1: returned(1, RunState(3, WEIGHTS, b"momentum", b"outer"), e2=without_rows),
    }
    state = run.result(ranks)
    assert (state.epoch, state.rule) == (3, b"outer")
    kept = run.kept()
    assert kept is not None
    assert kept.optimizer == b"momentum"
    told = run.progress().epochs[2]
    assert (told.missing, told.batches, told.rows, told.seconds) == (0, 4, 8, 2.0)
    np.testing.assert_array_equal(told.metrics, [1.0, 2.0])
    np.testing.assert_array_equal(told.val_metrics, [6.0])


def test_the_state_with_an_optimizer_is_the_one_that_the_run_keeps() -> None:
    members = {
        0: returned(0, RunState(1, WEIGHTS)),
        1: returned(1, RunState(1, WEIGHTS + 1, b"momentum")),
    }
    assert returned_state(members).optimizer == b"momentum"
    assert returned_state({0: members[0]}).weights is WEIGHTS
    assert returned_state({}).epoch == 0


class Center:
    """Servers whose next round closes as soon as the driver has been told of the last one."""

    def __init__(self, driver: SimpleNamespace) -> None:
        self.driver, self.round, self.saved = driver, 0, []  # type: ignore[var-annotated]

    def pull(self, driver: SimpleNamespace) -> np.ndarray:
        self.round = driver.clock
        driver.clock = 4
        return WEIGHTS

    def save_rows(self, reference: TableReference) -> None:
        self.saved.append(self.round)


def test_rows_of_a_round_that_closed_while_rows_were_saved_are_saved(tmp_path: Path) -> None:
    """Of a checkpoint amid the last epoch; on a loaded machine the last step of rows was lost."""
    driver = SimpleNamespace(clock=3)
    driver.status = lambda: SimpleNamespace(clock=driver.clock)
    center = Center(driver)
    run = ServerRun(
        mock.Mock(), mock.Mock(shards=()), 2, shards=mock.Mock(),
        tables=TablesOfRun((), str(tmp_path), b""),
    )  # fmt: skip
    with mock.patch.object(run, "kept", return_value=None):
        run._connected, run._center = driver, center  # type: ignore[assignment]
        amid = run.state()
        last = run.result({})
        assert center.saved == [3, 4]
        assert last.rule != amid.rule
        assert run.state().rule == last.rule  # nothing has changed
