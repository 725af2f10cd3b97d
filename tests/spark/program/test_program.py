"""Programs as the tasks of a barrier stage: the same nodes, results and ends as on processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import actor_learner
import call_situations
import numpy as np
import program_cases
import psutil
import pytest
from processes import ends
from scripted import run_script

from sparkdl.errors import ConfigError, ResourceError, WaitTimeoutError, WorkerError
from sparkdl.program import (
    CacherNode,
    CourierNode,
    Program,
    PyNode,
    ReplayNode,
    launch,
    stop,
    wait_for_stop,
)
from sparkdl.settings.network import Network


def jobs(spark: Any) -> int:
    """Jobs that run."""
    return len(spark.sparkContext.statusTracker().getActiveJobsIds())


def test_nodes_call_each_other_and_any_of_them_stops_the_program(
    spark: Any, tmp_path: Path
) -> None:
    with launch(program_cases.counting(tmp_path), "spark") as launched:
        launched.wait(60)
    found = [p.name.split("-") for p in tmp_path.iterdir()]
    assert max(int(value) for value, _ in found) == 20
    assert len({pid for _, pid in found}) == 2, "each node has a process"
    assert jobs(spark) == 0


def test_nodes_that_hold_each_other(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "result"
    with launch(program_cases.ping_pong(path), "spark", spark=spark) as launched:
        launched.wait(60)
    assert path.read_text() == "10"


def test_a_node_that_raises_ends_the_program_with_its_traceback(spark: Any) -> None:
    begun = time.monotonic()
    with pytest.raises(WorkerError, match="node bad/0 failed: ValueError: no way on") as caught:
        launch(program_cases.failing(), "spark").wait(60)
    assert "in fail" in str(caught.value)
    assert time.monotonic() - begun < 15
    assert jobs(spark) == 0


def test_an_error_in_a_called_method_is_the_callers(spark: Any) -> None:
    with pytest.raises(WorkerError, match="node caller/0 failed: TypeError"):
        launch(program_cases.calling_badly(), "spark").wait(60)


def test_the_launcher_stops_it(spark: Any) -> None:
    program = Program("idle")
    program.add_node(CourierNode(program_cases.Counter), label="counter")
    launched = launch(program, "spark")
    with pytest.raises(WaitTimeoutError, match="'idle' still runs"):
        launched.wait(0.1)
    launched.stop()
    launched.wait(1)
    assert jobs(spark) == 0


def sleep_for_ever(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(1000)


def await_file(path: Path) -> int:
    """The number in a file, when it is there."""
    deadline = time.monotonic() + 30
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)
    return int(path.read_text())


def test_a_node_that_does_not_end_is_killed(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkdl.program.launching._END_S", 0.5)
    program = Program("stubborn")
    program.add_node(PyNode(sleep_for_ever, str(tmp_path / "pid")), label="sleeper")
    launched = launch(program, "spark")
    pid = await_file(tmp_path / "pid")
    begun = time.monotonic()
    launched.stop()
    assert time.monotonic() - begun < 15
    assert ends(pid, within_s=10)


def test_the_node_that_was_killed_is_named_and_nothing_is_left(spark: Any, tmp_path: Path) -> None:
    program = program_cases.killing()
    program.add_node(PyNode(sleep_for_ever, str(tmp_path / "pid")), label="sleeper")
    launched = launch(program, "spark")
    pid = await_file(tmp_path / "pid")
    begun = time.monotonic()
    with pytest.raises(WorkerError, match="node victim/0 failed: Spark gave the barrier stage up"):
        launched.wait(60)
    assert time.monotonic() - begun < 15
    assert ends(pid, within_s=10)
    assert jobs(spark) == 0


def test_a_killed_node_comes_back_on_its_executor(
    spark: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with launch(program_cases.dying_and_coming_back(restarts=1), "spark") as launched:
        seen = launched.results("caller", 60)[0]
    assert seen == [1, 2, True, 1, True], "two calls, an error, a new node that counts from one"
    told = "[rank 0] is started again (1 of 1) after: its process was ended by SIGKILL"
    assert told in capfd.readouterr().out
    assert jobs(spark) == 0


@pytest.mark.parametrize(("times", "restarts"), [(2, 3), (5, 2)])
def test_restarts_are_counted(spark: Any, tmp_path: Path, times: int, restarts: int) -> None:
    program = program_cases.failing_for_a_while(tmp_path / "calls", times, restarts)
    launched = launch(program, "spark")
    if times <= restarts:
        assert launched.results("flaky", 60) == [times]
        return
    with pytest.raises(WorkerError, match="node flaky/0 failed: ValueError: attempt 2"):
        launched.wait(60)


@pytest.mark.parametrize("role", ["node", "task"])
def test_a_kill_that_no_restart_mends_is_one_error_and_nothing_is_left(
    spark: Any, tmp_path: Path, role: str
) -> None:
    program = Program("guarded")
    with program.group("victim", restarts=0 if role == "node" else 5):
        program.add_node(PyNode(sleep_for_ever, str(tmp_path / "victim")))
    with program.group("bystander", restarts=5):
        program.add_node(PyNode(sleep_for_ever, str(tmp_path / "bystander")))
    launched = launch(program, "spark")
    pids = [await_file(tmp_path / name) for name in ("victim", "bystander")]
    tasks = [psutil.Process(pids[1]).ppid()]
    if role == "task":  # the process of Spark's that watches over the node
        tasks.append(psutil.Process(pids[0]).ppid())
    begun = time.monotonic()
    os.kill(pids[0] if role == "node" else tasks[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="node victim/0 failed: Spark gave the barrier stage up"):
        launched.wait(60)
    assert time.monotonic() - begun < 15
    assert all(ends(pid, within_s=10) for pid in pids + tasks)
    assert jobs(spark) == 0


@pytest.mark.parametrize("role", ["replay", "cacher"])
def test_a_killed_replay_or_cacher_node_is_named_and_nothing_is_left(
    spark: Any, tmp_path: Path, role: str
) -> None:
    program = Program("roles")
    counter = program.add_node(CourierNode(program_cases.Counter), label="server")
    handles = {
        "replay": program.add_node(ReplayNode(10), label="replay"),
        "cacher": program.add_node(CacherNode(counter, 100), label="cacher"),
    }
    killer = PyNode(kill_when_told, handles[role], str(tmp_path / "pid"))
    program.add_node(killer, label="killer")
    launched = launch(program, "spark")
    pid = await_file(tmp_path / "pid")
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=f"node {role}/0 failed: Spark gave the barrier stage up"):
        launched.wait(60)
    assert time.monotonic() - begun < 15
    assert ends(pid, within_s=10)
    assert jobs(spark) == 0


def kill_when_told(node: Any, path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    call_situations.throw(node)


@pytest.mark.slow
def test_thirty_nodes_and_an_actor_learner_of_four_actors() -> None:
    script = Path(__file__).parents[1] / "scripts" / "many_nodes.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["ring"] == [sum(range(31)), *[None] * 29]
    assert told["return"] >= actor_learner.TARGET
    assert told["learner_s"] < 120


def test_nodes_see_the_gpus_of_their_group() -> None:
    assert "GPU-PROGRAM-OK" in run_script("gpu_program.py")


def say(what: str) -> None:
    print(what)


def test_what_nodes_print_and_return_comes_to_the_driver(
    spark: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    program = Program("words")
    with program.group("speaker"):
        for word in ("one", "two"):
            program.add_node(PyNode(say, word))
    program.add_node(PyNode(np.arange, 3), label="array")
    launched = launch(program, "spark")
    np.testing.assert_array_equal(launched.results("array", 60)[0], [0, 1, 2])
    lines = capfd.readouterr().out.splitlines()
    assert {"[rank 0] one", "[rank 1] two"} <= set(lines)


def exchange(counter: Any) -> tuple[int, bool]:
    value = counter.add(5)
    encrypted = counter._address.local_port != 0
    stop()
    wait_for_stop()
    return value, encrypted


def test_an_encrypted_program(spark: Any) -> None:
    program = Program("sealed")
    counter = program.add_node(CourierNode(program_cases.Counter), label="counter")
    program.add_node(PyNode(exchange, counter), label="caller")
    network = Network("18500-18519", worker_port="18520-18549", encrypt=True)
    launched = launch(program, "spark", network=network)
    assert launched.results("caller", 60) == [(5, True)]


def test_every_situation_of_a_call(spark: Any) -> None:
    with launch(call_situations.examination(), "spark") as launched:
        told = launched.results("examiner", 120)[0]
    assert {name: error for name, error in told.items() if error} == {}
    assert list(told) == list(call_situations.SITUATIONS)


def test_too_few_slots(spark: Any) -> None:
    program = Program("large")
    with program.group("many"):
        for _ in range(5):
            program.add_node(PyNode(say, "never"))
    with pytest.raises(ResourceError, match="5 workers must run at the same time"):
        launch(program, "spark")
    with pytest.raises(ConfigError, match="launch_type='spark'"):
        launch(program, "threads", spark=spark)


def test_the_actor_learner_reaches_its_target(spark: Any) -> None:
    begun = time.monotonic()
    launched = launch(actor_learner.build(num_actors=2), "spark")
    curve = launched.results("learner", 120)[0]
    assert curve[-1].mean_return >= actor_learner.TARGET
    assert time.monotonic() - begun < 120
