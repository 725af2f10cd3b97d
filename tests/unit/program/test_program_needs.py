"""Restarts of nodes, their cores and GPUs, reverb where it is not installed."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import program_cases
import pytest

from sparkdl.errors import ConfigError, ResourceError, WorkerError
from sparkdl.launch.threads import ThreadLauncher
from sparkdl.program import (
    Program,
    PyNode,
    ReverbNode,
    launch,
    make_program,
    register_stop_handler,
    stop,
)
from sparkdl.program.calls import CallAddress, CallClient
from sparkdl.program.launching import task_resources
from sparkdl.program.replay import ReverbServing
from sparkdl.program.running import Running, _current

pytestmark = pytest.mark.processes


@pytest.fixture(params=["threads", "processes"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_killed_node_comes_back_under_its_address(capfd: pytest.CaptureFixture[str]) -> None:
    with launch(program_cases.dying_and_coming_back(restarts=1), "processes") as launched:
        seen = launched.results("caller", 60)[0]
    assert seen == [1, 2, True, 1, True], "two calls, an error, a new node that counts from one"
    assert (
        "is started again (1 of 1) after: its process was ended by SIGKILL"
        in capfd.readouterr().out
    )


def test_without_restarts_it_is_one_error() -> None:
    begun = time.monotonic()
    with pytest.raises(WorkerError, match="node mortal/0 failed: its process was ended by SIGKILL"):
        launch(program_cases.dying_and_coming_back(restarts=0), "processes").wait(60)
    assert time.monotonic() - begun < 15


def test_a_node_that_raises_is_called_again(kind: Any, tmp_path: Path) -> None:
    program = program_cases.failing_for_a_while(tmp_path / "calls", times=2, restarts=3)
    assert launch(program, kind).results("flaky", 60) == [2]


def test_restarts_are_counted(kind: Any, tmp_path: Path) -> None:
    program = program_cases.failing_for_a_while(tmp_path / "calls", times=5, restarts=2)
    with pytest.raises(WorkerError, match="node flaky/0 failed: ValueError: attempt 2"):
        launch(program, kind).wait(60)


def test_a_stopped_program_starts_nothing_again(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "calls"
    program = program_cases.failing_for_a_while(path, times=10**6, restarts=10**6)
    launched = launch(program, kind)
    while not path.exists() or len(path.read_text()) < 2:
        time.sleep(0.01)
    launched.stop()
    calls = len(path.read_text())
    time.sleep(0.5)
    assert len(path.read_text()) == calls


def seen_resources() -> tuple[str | None, str | None]:
    return os.environ.get("OMP_NUM_THREADS"), os.environ.get("CUDA_VISIBLE_DEVICES")


def with_gpus() -> Program:
    program = Program("gpus")
    with program.group("learner", gpus=2, cores=3):
        program.add_node(PyNode(seen_resources))
    with program.group("actor", gpus=1):
        program.add_node(PyNode(seen_resources))
    program.add_node(PyNode(seen_resources), label="rest")
    return program


def test_nodes_get_their_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with launch(with_gpus(), "processes") as launched:
        assert launched.results("learner", 60) == [("3", "4,GPU-a")]
        assert launched.results("actor") == [(None, "7")]
        assert launched.results("rest") == [(None, "-1")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ResourceError, match="3 GPUs on this machine"):
        launch(with_gpus(), "processes")
    assert task_resources(with_gpus()) == {"cpus": 3, "gpu": 2}
    assert task_resources(program_cases.failing()) is None


@pytest.mark.parametrize(
    "launch_type", ["threads", pytest.param("processes", marks=pytest.mark.slow)]
)
def test_thirty_nodes(launch_type: Any) -> None:
    launched = launch(program_cases.ring(30), launch_type)
    totals = launched.results("link", 300)
    assert totals == [sum(range(31)), *[None] * 29]


def test_what_is_refused(tmp_path: Path) -> None:
    program = program_cases.failing_for_a_while(tmp_path / "calls", times=1, restarts=1)
    with pytest.raises(ConfigError, match="cannot be started again with a launcher"):
        launch(program, "threads", launcher=ThreadLauncher(1))
    with pytest.raises(ConfigError, match="restarts"), Program("x").group("a", restarts=-1):
        pass
    if importlib.util.find_spec("reverb") is None:
        with pytest.raises(ConfigError, match="ReplayNode"):
            ReverbNode(list)


@pytest.fixture
def reverb(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reverb has no release for the TensorFlow of today: a module of its names stands for it."""
    happened: list[str] = []

    class Server:
        port = 4711

        def __init__(self, tables: list[str], checkpointer: str = "its own") -> None:
            self.tables = tables
            happened.append(f"checkpointer: {checkpointer}")

        def stop(self) -> None:
            happened.extend(self.tables)

    class Client:
        def __init__(self, address: str) -> None:
            self.address = address

        def checkpoint(self) -> None:
            happened.append(f"checkpoint at {self.address}")

    module = types.ModuleType("reverb")
    module.happened = happened  # type: ignore[attr-defined]
    module.Server, module.Client = Server, Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reverb", module)
    return happened


def test_a_server_of_reverb_ends_with_its_program(reverb: list[str], tmp_path: Path) -> None:
    def ask(server: Any) -> None:
        (tmp_path / "told").write_text(server.address())
        stop()

    program = Program("replay")
    server = program.add_node(ReverbNode(lambda: ["table"]), label="replay")
    program.add_node(PyNode(ask, server), label="ask")
    with launch(program, "threads") as launched:
        launched.wait(30)
    assert (tmp_path / "told").read_text() == "127.0.0.1:4711"
    assert reverb == ["checkpointer: its own", "table"]


def test_a_server_of_reverb_writes_checkpoints(reverb: list[str]) -> None:
    def await_two() -> None:
        deadline = time.monotonic() + 30
        while len(sys.modules["reverb"].happened) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        stop()

    program = Program("replay")
    program.add_node(ReverbNode(lambda: ["table"], lambda: "mine", 0.001), label="replay")
    program.add_node(PyNode(await_two), label="wait")
    with launch(program, "threads") as launched:
        launched.wait(60)
    assert reverb[:3] == ["checkpointer: mine", *["checkpoint at localhost:4711"] * 2]


def test_reverb_on_a_cluster_tells_the_address_that_other_hosts_reach(reverb: list[str]) -> None:
    control = CallClient(CallAddress("127.0.0.1", 1), b"t")
    reset = _current.set(Running(control, host="10.1.2.3"))
    try:
        serving = ReverbServing(list, None, None, None)
        named = ReverbServing(list, None, None, "fd00::7")
    finally:
        _current.reset(reset)
    assert serving.address() == "10.1.2.3:4711"
    assert named.address() == "[fd00::7]:4711"


def test_a_stop_handler_ends_what_a_node_waits_for(tmp_path: Path) -> None:
    def wait() -> None:
        waited = threading.Event()
        register_stop_handler(waited.set)
        assert waited.wait(30)
        (tmp_path / "ended").touch()

    with launch(make_program(PyNode(wait), PyNode(stop)), "threads") as launched:
        launched.wait(30)
    assert (tmp_path / "ended").exists()
