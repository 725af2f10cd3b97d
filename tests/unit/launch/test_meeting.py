"""How the ranks of a stage without a server of weights find each other."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from sparkdl.collective.strategy import AllReduceStrategy, EarlyGathering
from sparkdl.coordinator.machine import Coordinator
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import TransportError, WaitTimeoutError
from sparkdl.failures import Failure, RankFailure, failure_in, is_secondary
from sparkdl.files.run_state import RunState
from sparkdl.launch.task import RankContext, join_batches
from sparkdl.spark.executor.stage import BarrierGathering
from sparkdl.spark.executor.trainer import TrainedRank
from sparkdl.testing.inproc import InprocServer
from sparkdl.training.reports import EpochReport
from sparkdl.weights import Layout

LAYOUT = Layout.of([("nothing", (1,), "float32")])
TOKEN = b"t" * 16


def in_threads(*actions: Any) -> list[Any]:
    """What each gives, or the exception that it raises."""
    results: list[Any] = [None] * len(actions)

    def work(i: int) -> None:
        try:
            results[i] = actions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    return results


def test_the_coordinator_tells_every_rank_what_all_said() -> None:
    with (
        InprocServer(Coordinator(Settings(3))) as server,
        server.session(0) as a, server.session(1) as b, server.session(2) as c,
    ):  # fmt: skip
        meetings = (a, b, c)
        said = [lambda m=m: m.all_gather(f"I am {m.rank}") for m in meetings]
        assert in_threads(*said) == [["I am 0", "I am 1", "I am 2"]] * 3
        for session in (a, b, c):  # what the same rank tells later waits for nobody
            session.join(rows=10 * session.rank, batches_per_epoch=session.rank)


def test_the_coordinator_names_who_is_missing() -> None:
    with (
        InprocServer(Coordinator(Settings(3, start_timeout_s=0.3))) as server,
        server.session(0) as a, server.session(2) as c,
    ):  # fmt: skip
        answers = in_threads(*(lambda s=s: s.all_gather("") for s in (a, c)))
    for error in answers:
        assert isinstance(error, WaitTimeoutError)
        assert "1" in error.received, error.received


class Files:
    """The launcher's exchange among threads."""

    attempt = 0

    def __init__(self, rank: int, texts: list[str | None], delay_s: float = 0.0) -> None:
        self.rank, self._texts, self._delay_s = rank, texts, delay_s

    def all_gather(self, text: str) -> list[str]:
        time.sleep(self._delay_s)
        self._texts[self.rank] = text
        while None in self._texts:
            time.sleep(0.01)
        return [t for t in self._texts if t is not None]


def test_what_was_begun_early_is_there_when_it_is_needed() -> None:
    strategy = AllReduceStrategy(TOKEN, LAYOUT, "builtin", {"advertised_host": "127.0.0.1"})
    texts: list[str | None] = [None, None]

    def rank(number: int) -> Any:
        early = EarlyGathering(Files(number, texts, 0.2), strategy.connector(number))
        try:
            with strategy.connect(early) as communicator:
                return float(communicator.all_reduce(np.ones(1))[0])
        finally:
            early.close()

    assert in_threads(lambda: rank(0), lambda: rank(1)) == [2.0, 2.0]


def test_an_early_exchange_that_fails_raises_where_it_is_needed() -> None:
    class Broken:
        def all_gather(self, text: str, timeout_s: float) -> list[str]:
            raise WaitTimeoutError("nobody came")

    strategy = AllReduceStrategy(TOKEN, LAYOUT, "builtin")
    early = EarlyGathering(RankContext(0, gathering=Broken()), strategy.connector(0))
    with pytest.raises(WaitTimeoutError, match="nobody came"), strategy.connect(early):
        pass


def test_a_barrier_has_a_limit() -> None:
    class Context:
        def partitionId(self) -> int:
            return 1

        def allGather(self, text: str) -> list[str]:
            if text == "wait":
                time.sleep(1.0)
            if text == "fail":
                raise RuntimeError("the stage is over")
            return ["", text]

    gathering = BarrierGathering(Context())
    assert gathering.all_gather("a", 5.0) == ["", "a"]
    with pytest.raises(RuntimeError, match="over"):
        gathering.all_gather("fail", 5.0)
    with pytest.raises(WaitTimeoutError, match="rank 1 waited"):
        gathering.all_gather("wait", 0.1)


def test_a_failure_that_another_rank_caused_is_known() -> None:
    gone = TransportError("rank 1 is gone; rank 0 cannot go on")
    assert is_secondary(gone)
    assert not is_secondary(WaitTimeoutError("missing rank 1"))
    assert not is_secondary(ValueError("bad row"))
    wrapped = RuntimeError(f"Graph execution error: {RankFailure(Failure.of(0, gone))} [Op:run]")
    assert is_secondary(wrapped)


def test_a_rank_failure_survives_pickling() -> None:
    import pickle

    failure = RankFailure(Failure.of(3, ValueError("bad row")))
    again = pickle.loads(pickle.dumps(failure))
    assert str(again) == str(failure)
    assert failure_in(again) == failure.failure
    assert failure.failure.rank == 3


def test_what_a_rank_could_not_report_comes_with_its_result() -> None:
    report = EpochReport(
        3, 64, np.array([1.5, 2.0]), ended=True, val_metrics=np.array([0.25]), batches_done=8
    )
    state = RunState(4, np.ones(2, np.float32), b"momentum")
    rank = TrainedRank(1, 64, "builtin", 0.5, 0.1, (), 42, {3: report}, state)
    again = TrainedRank.all_of(join_batches(rank.batches()))[1]
    assert again.state is not None
    assert (again.state.epoch, again.state.optimizer) == (4, b"momentum")
    received = again.unreported[3]
    assert (received.rows, received.ended, received.batches_done) == (64, True, 8)
    assert received.metrics.tolist() == [1.5, 2.0]
    assert received.val_metrics.tolist() == [0.25]
