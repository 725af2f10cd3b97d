"""Ranks as threads and as local processes: results, first causes, deaths, and who did not come."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from launch_tasks import WorkTask
from processes import ends, runs

from sparkdl.errors import ResourceError, TransportError, WaitTimeoutError
from sparkdl.failures import (
    ChildTraceback,
    Failure,
    RankFailure,
    is_secondary,
    root_cause,
)
from sparkdl.launch.child import Child, ProcessLauncher
from sparkdl.launch.devices import DeviceRequest, Placement, Resources
from sparkdl.launch.task import (
    CHUNK_BYTES,
    AloneGathering,
    RankContext,
    Result,
    join_batches,
    of_kind,
)
from sparkdl.launch.threads import ThreadLauncher
from sparkdl.process import payload

pytestmark = pytest.mark.processes

LAUNCHERS = [ThreadLauncher, ProcessLauncher]


def launched(launcher: Any, task: WorkTask) -> list[Result]:
    with launcher.launch(task) as ranks:
        while not ranks.wait(0.05):
            pass
        results: list[Result] = ranks.results()
        return results


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_ranks_meet_and_return_results_of_any_size(
    kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    results = launched(kind(3), WorkTask("well", size=CHUNK_BYTES + 5))
    assert {r: t.text for r, t in of_kind(results, "text").items()} == dict.fromkeys(
        range(3), "I am 0 I am 1 I am 2"
    )
    contents = of_kind(results, "rows")
    assert list(contents) == [0, 1, 2]
    for rank, result in contents.items():
        assert result.content == bytes([rank]) * (CHUNK_BYTES + 5)
        assert result.text == "0"
    assert "[rank 2] logged 2" in capsys.readouterr().out


@pytest.mark.parametrize("kind", LAUNCHERS)
@pytest.mark.parametrize(
    ("how", "text"),
    [("one raises", "ValueError: bad row 17"), ("one exits", "SystemExit: enough")],
)
def test_the_cause_is_raised_while_others_wait_for_the_rank(kind: Any, how: str, text: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        launched(kind(2), WorkTask(how))
    failure = caught.value.failure
    assert (failure.rank, failure.error, failure.secondary) == (1, text, False)
    assert "launch_tasks.py" in failure.traceback
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_a_lost_connection_that_is_told_first_is_not_the_cause(kind: Any) -> None:
    with pytest.raises(RankFailure) as caught:
        launched(kind(2), WorkTask("one loses its connection"))
    assert caught.value.failure.error == "KeyError: 'the cause'"


def test_processes_that_compute_are_ended_with_the_first_failure() -> None:
    with pytest.raises(RankFailure, match="bad row 17"):
        launched(ProcessLauncher(2), WorkTask("others compute"))
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # another test's, which ends just now
            assert "sparkdl.launch.child" not in child.cmdline()


@pytest.mark.parametrize(
    ("how", "text", "output"),
    [
        ("one dies", "its process was ended by SIGKILL", "the end is near"),
        ("one stops", "its process ended with status 3", "status three"),
    ],
)
def test_a_process_that_dies_is_described(how: str, text: str, output: str) -> None:
    with pytest.raises(RankFailure) as caught:
        launched(ProcessLauncher(2), WorkTask(how))
    failure = caught.value.failure
    assert failure.rank == 1
    assert failure.error == text
    assert output in failure.traceback


@pytest.mark.parametrize(("kind", "timeout_s"), [(ThreadLauncher, 1.0), (ProcessLauncher, 8.0)])
def test_ranks_that_do_not_come_are_named(kind: Any, timeout_s: float) -> None:
    with pytest.raises(WaitTimeoutError, match="1 of 3 ranks did not come") as caught:
        launched(kind(3), WorkTask("one is late", timeout_s=timeout_s))
    assert caught.value.received == "nothing from ranks 1"


def test_processes_get_what_they_cannot_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        "class Thing:\n    def scaled(self):\n        return 42\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    task = WorkTask("well", thing=only_here.Thing())
    content = payload.dump(task)
    monkeypatch.undo()  # the child's path is the parent's
    with Child(content, RankContext(0, gathering=AloneGathering()), print) as child:
        results = join_batches(child.results(iter(())))
    assert of_kind(results, "text")[0].text == "42"


def test_a_child_asks_for_its_input_and_may_return_more_than_a_socket_holds() -> None:
    taken: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(4):
            taken.append(number)
            yield pa.RecordBatch.from_arrays(
                [pa.array(np.zeros(1 << 18), pa.float64())], names=["x"]
            )

    rank = RankContext(0, gathering=AloneGathering())
    lines: list[str] = []
    with Child(payload.dump(WorkTask("well", size=9 << 20)), rank, lines.append) as child:
        assert taken == []
        results = join_batches(child.results(batches()))
    assert taken == [0, 1, 2, 3]
    assert of_kind(results, "rows")[0].text == str(4 << 18)
    assert len(of_kind(results, "rows")[0].content) == 9 << 20


def test_an_exception_of_the_input_is_raised_by_the_parent() -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        raise OSError("unreadable")
        yield

    with (
        Child(payload.dump(WorkTask("well")), RankContext(0), print) as child,
        pytest.raises(OSError, match="unreadable"),
    ):
        list(child.results(batches()))


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = """
import os, sys, threading, time
from launch_tasks import WorkTask
from sparkdl.process import payload
from sparkdl.launch.child import Child
from sparkdl.launch.task import RankContext
child = Child(payload.dump(WorkTask("others compute")), RankContext(0), print)
print(child._process.pid, flush=True)
time.sleep(60)
"""
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, *[p or os.getcwd() for p in sys.path]])
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(1.0)
    assert runs(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert ends(pid, within_s=30)


def test_failures_are_described_carried_and_ranked() -> None:
    first = Failure.of(0, ConnectionResetError("a user's own"))
    lost = Failure.of(1, TransportError("rank 0 is gone; rank 1 cannot go on"))
    assert not first.secondary
    assert lost.secondary
    assert root_cause([lost, first]) == first
    assert root_cause([lost]) == lost
    assert root_cause([]) is None
    assert Failure.from_json(first.to_json()) == first
    assert is_secondary(RankFailure(lost))
    in_child = RuntimeError("TransportError: as the child's text has it")
    in_child.__cause__ = ChildTraceback(first)
    assert not is_secondary(in_child)
    assert Failure.of(3, in_child) == first
    ours = Failure.of(2, ResourceError("no GPU", expected="one", hint="buy one"))
    raised = ours.library_error()
    assert isinstance(raised, ResourceError)
    assert raised.what == "no GPU (worker 2)"
    assert raised.hint == "buy one"
    again = Failure.of(5, ours.worker_error())  # told by another rank than the one that failed
    assert (again.rank, again.error) == (2, ours.error)
    long = Failure.of(0, ValueError("x" * 10_000))
    assert len(long.error) <= 2000
    assert len(long.traceback) <= 8100


@pytest.mark.parametrize(
    ("request_", "resources", "gpus"),
    [
        (DeviceRequest("jax"), Resources(("1", "2"), 2), ("1", "2")),
        (DeviceRequest("jax"), Resources(), ()),
        (DeviceRequest("jax", False), Resources(("1",)), ()),
        (DeviceRequest(None, "auto", True), Resources(), None),
        (DeviceRequest(None, "auto", True), Resources(("1",)), ("1",)),
        (DeviceRequest(None, False, True), Resources(("1",)), ()),
    ],
)
def test_a_task_is_placed_on_what_the_scheduler_gave(
    request_: DeviceRequest, resources: Resources, gpus: Any
) -> None:
    placed = request_.place(resources)
    assert placed == Placement(request_.backend, gpus, placed.cores)
    assert placed.cores >= 1


def test_a_gpu_that_was_asked_for_and_not_given_is_an_error() -> None:
    with pytest.raises(ResourceError, match="no GPU"):
        DeviceRequest("tensorflow", True).place(Resources())
