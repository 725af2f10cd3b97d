"""The task of ``run``: its ranks meet, call the function, and send lines and results."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

import numpy as np
import pytest

import sparkdl
from sparkdl.coordinator.driver_client import CoordinatorHost
from sparkdl.coordinator.session import open_session
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import Cause
from sparkdl.failures import RankFailure
from sparkdl.launch.child import ProcessLauncher
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.function import KEPT_BYTES, FunctionTask, LineSender, Returned, dump_call
from sparkdl.launch.task import AloneGathering, RankContext, join_batches, of_kind
from sparkdl.transport.address import Address, Endpoint, ListenOptions
from sparkdl.transport.connection import Timeouts

pytestmark = pytest.mark.processes


def task(function: Any, *args: Any, **options: Any) -> FunctionTask:
    return FunctionTask(
        dump_call(function, args, {}), secrets.token_bytes(32),
        DeviceRequest(None, unscheduled=True), "builtin", **options,
    )  # fmt: skip


def coordinator(ranks: int) -> CoordinatorHost:
    return CoordinatorHost(Settings(ranks), ListenOptions("socket", web=False))


def add_up(scale: float) -> Any:
    communicator = sparkdl.communicator()
    sparkdl.log_to_driver(f"logged {communicator.rank}")
    print(f"printed {communicator.rank}", flush=True)
    total = communicator.all_reduce(np.full(3, scale), "sum")
    return communicator.rank, communicator.size, float(total[0])


@pytest.mark.parametrize("meet", ["launcher", "coordinator"])
def test_ranks_are_connected_and_return_results(
    meet: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with coordinator(3) as host:
        endpoint = host.endpoint if meet == "coordinator" else None
        work = task(add_up, 2.0, capture=False, endpoint=endpoint)
        with ProcessLauncher(3).launch(work) as ranks:
            while not ranks.wait(0.1):
                pass
            returned = Returned.of(ranks.results())
    assert returned.communicator == "builtin"
    assert [returned.load(rank) for rank in range(3)] == [(rank, 3, 6.0) for rank in range(3)]
    out = capsys.readouterr().out
    for rank in range(3):
        assert f"[rank {rank}] logged {rank}" in out
        assert f"[rank {rank}] printed {rank}" in out


def test_lines_go_to_the_coordinator_while_the_rank_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []
    done = threading.Event()

    def function() -> int:
        sparkdl.log_to_driver("in\n\nthree lines")
        assert done.wait(20.0)
        return 5

    with coordinator(1) as host:
        work = task(int, endpoint=host.endpoint, capture=False)
        rank = RankContext(0, gathering=AloneGathering())

        def follow() -> None:
            deadline = time.monotonic() + 20.0
            while len(seen) < 3 and time.monotonic() < deadline:
                seen.extend(host.driver.take_lines())
                time.sleep(0.02)
            done.set()

        thread = threading.Thread(target=follow)
        thread.start()
        monkeypatch.setattr("sparkdl.launch.function._load_call", lambda *_: (function, (), {}))
        results = join_batches(work.run(rank, iter(())))
        thread.join()
    assert [(r, line.strip()) for r, line in seen] == [(0, "in"), (0, ""), (0, "three lines")]
    assert of_kind(results, "log") == {}
    assert Returned.of(results).load(0) == 5


def test_lines_come_with_the_result_where_there_is_no_coordinator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    work = task(sparkdl.log_to_driver, "kept", capture=False)
    rank = RankContext(0, gathering=AloneGathering())
    Returned.of(join_batches(work.run(rank, iter(()))))
    assert "[rank 0] kept" in capsys.readouterr().out


def test_a_rank_that_cannot_reach_the_driver_says_so_before_it_meets_anybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparkdl.launch.function.CONNECT_TIMEOUT_S", 0.2)
    nowhere = Endpoint(Address("", "127.0.0.1", 1, mode="socket"), "none")
    with pytest.raises(RankFailure) as caught:
        list(task(int, endpoint=nowhere).run(RankContext(3), iter(())))
    failure = caught.value.failure
    assert (failure.rank, failure.cause) == (3, Cause.UNREACHED)
    assert "cannot reach the driver" in failure.error
    assert "127.0.0.1:1" in failure.error
    assert not failure.secondary  # it is told at once


def raise_after_a_line() -> None:
    sparkdl.log_to_driver("before")
    raise ValueError("bad row 17")


def test_a_failure_carries_the_lines_that_were_not_sent() -> None:
    rank = RankContext(0, gathering=AloneGathering())
    with pytest.raises(RankFailure) as caught:
        list(task(raise_after_a_line, capture=False).run(rank, iter(())))
    assert caught.value.failure.lines == "before"
    assert caught.value.failure.error == "ValueError: bad row 17"


def test_the_latest_lines_are_kept() -> None:
    sender = LineSender(None)
    for number in range(3000):
        sender.send(f"{number} " + "x" * 1000)
    kept = sender.close()
    assert kept[-1].startswith("2999 ")
    assert sum(map(len, kept)) <= KEPT_BYTES + 100
    assert kept[0] == f"[{3000 - len(kept) + 1} lines dropped: the driver was too slow]"


def test_a_driver_that_is_gone_gets_no_lines_and_stops_nobody() -> None:
    host = coordinator(1)
    with open_session(host.endpoint, rank=0, timeouts=Timeouts(reconnect_s=0.2)) as session:
        host.close()
        sender = LineSender(session)
        sender.send("late")
        assert sender.close(timeout_s=30.0) == ["late"]
