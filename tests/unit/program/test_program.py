"""Programs on threads and on processes: the same nodes, the same results, the same ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sparkdl.errors import ConfigError, WaitTimeoutError, WorkerError
from sparkdl.program import (
    CacherNode,
    CourierNode,
    Program,
    PyClassNode,
    PyNode,
    launch,
    stop,
    stop_event,
    wait_for_stop,
)

pytestmark = pytest.mark.processes


@pytest.fixture(params=["threads", "processes"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value, self.pid = start, os.getpid()

    def add(self, number: int) -> int:
        self.value += number
        return self.value

    def end(self) -> None:
        stop()


def count(counter: Any, path: str, times: int) -> None:
    for _ in range(times):
        value = counter.add(1)
    Path(path, f"{value}-{os.getpid()}").touch()
    if value >= 5 * times:
        counter.end()


def test_nodes_call_each_other_and_any_of_them_stops_the_program(kind: Any, tmp_path: Path) -> None:
    program = Program("count")
    with program.group("counter"):
        counter = program.add_node(CourierNode(Counter, start=10))
    with program.group("worker"):
        for times in (5, 5):
            program.add_node(PyNode(count, counter, str(tmp_path), times=times))
        program.add_node(PyNode(_end_at, counter, 20))
    with launch(program, kind) as launched:
        launched.wait(60)
    assert max(int(p.name.split("-")[0]) for p in tmp_path.iterdir()) == 20


def _end_at(counter: Any, value: int) -> None:
    while counter.add(0) < value:
        time.sleep(0.01)
    counter.end()


class Player:
    """Calls another player, who calls back."""

    def __init__(self, other: Any, first: bool, path: str) -> None:
        self._other, self._first, self._path = other, first, path

    def hit(self, number: int) -> int:
        return number if number >= 10 else int(self._other.hit(number + 1))

    def run(self) -> None:
        if self._first:
            Path(self._path).write_text(str(self._other.hit(0)))
            stop()
        wait_for_stop()


def test_nodes_that_hold_each_other(kind: Any, tmp_path: Path) -> None:
    program = Program("ping-pong")
    path = str(tmp_path / "result")
    one, two = CourierNode(Player), CourierNode(Player)
    first = program.add_node(one, label="one")
    second = program.add_node(two, label="two")
    one.configure(second, True, path)
    two.configure(first, False, path)
    with launch(program, kind) as launched:
        launched.wait(60)
    assert Path(path).read_text() == "10"


def fail() -> None:
    raise ValueError("no way on")


class Loop:
    def run(self) -> None:
        stop_event().wait()


def test_a_node_that_raises_ends_the_program_with_its_traceback(kind: Any) -> None:
    program = Program("failing")
    with program.group("loop"):
        program.add_node(PyClassNode(Loop))
    with program.group("bad"):
        program.add_node(PyNode(fail))
    begun = time.monotonic()
    with pytest.raises(WorkerError, match="node bad/0 failed: ValueError: no way on") as caught:
        launch(program, kind).wait(60)
    assert "in fail" in str(caught.value)
    assert time.monotonic() - begun < 20


def call_badly(counter: Any) -> None:
    counter.add("one")


def test_an_error_in_a_called_method_is_the_callers(kind: Any) -> None:
    program = Program("calls")
    counter = program.add_node(CourierNode(Counter), label="counter")
    program.add_node(PyNode(call_badly, [counter][0]), label="caller")
    with pytest.raises(WorkerError, match="node caller/0 failed: TypeError"):
        launch(program, kind).wait(60)


def test_the_launcher_stops_it(kind: Any) -> None:
    program = Program("idle")
    program.add_node(CourierNode(Counter), label="counter")
    launched = launch(program, kind)
    with pytest.raises(WaitTimeoutError, match="'idle' still runs"):
        launched.wait(0.1)
    launched.stop()
    launched.wait(1)


def test_a_node_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkdl.program.launching._END_S", 0.5)
    program = Program("stubborn")
    program.add_node(PyNode(time.sleep, 1000), label="sleeper")
    begun = time.monotonic()
    launch(program, "processes").stop()
    assert time.monotonic() - begun < 20


def test_a_process_that_dies_ends_the_program() -> None:
    program = Program("dying")
    program.add_node(PyClassNode(Loop), label="loop")
    program.add_node(PyNode(os._exit, 3), label="dead")
    begun = time.monotonic()
    with pytest.raises(Exception, match=r"rank 1|dead/0"):
        launch(program, "processes").wait(60)
    assert time.monotonic() - begun < 15


class Victim:
    def greet(self) -> int:
        return 1

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def greet_and_kill(victim: Any) -> None:
    victim.greet()
    victim.die()


def test_the_node_that_was_killed_is_named_and_not_its_caller() -> None:
    program = Program("kill")
    victim = program.add_node(CourierNode(Victim), label="victim")
    program.add_node(PyNode(greet_and_kill, victim), label="caller")
    begun = time.monotonic()
    with pytest.raises(WorkerError, match="node victim/0 failed: its process was ended by SIGKILL"):
        launch(program, "processes").wait(60)
    assert time.monotonic() - begun < 15


class Clock:
    def __init__(self) -> None:
        self.calls = 0

    def now(self, zone: str) -> int:
        self.calls += 1
        if zone == "bad":
            raise ValueError("no such zone")
        return self.calls


def ask_often(clock: Any, cached: Any) -> None:
    assert {cached.now("a") for _ in range(50)} == {1}
    with pytest.raises(ValueError, match="no such zone"):
        cached.now("bad")
    assert clock.now("a") == 3
    time.sleep(1.1)
    assert cached.now("a") == 4
    stop()


def test_a_cacher_calls_its_node_now_and_then() -> None:
    program = Program("cache")
    clock = program.add_node(CourierNode(Clock), label="clock")
    cached = program.add_node(CacherNode(clock, 1000), label="cacher")
    program.add_node(PyNode(ask_often, clock, cached), label="asker")
    with launch(program, "threads") as launched:
        launched.wait(60)


def test_many_nodes() -> None:
    program = Program("many")
    counter = program.add_node(CourierNode(Counter), label="counter")
    with program.group("adder"):
        for _ in range(28):
            program.add_node(PyNode(_add_once, counter))
    program.add_node(PyNode(_end_at, counter, 28), label="end")
    with launch(program, "threads") as launched:
        launched.wait(60)


def _add_once(counter: Any) -> None:
    counter.add(1)


def test_what_is_refused_while_a_program_is_put_together() -> None:
    program = Program("wrong")
    with pytest.raises(ConfigError, match="one group"):
        program.add_node(PyNode(fail))
    with program.group("a"):
        handle = program.add_node(CourierNode(Counter))
        with pytest.raises(ConfigError, match="cannot begin"), program.group("b"):
            pass
        with pytest.raises(ConfigError, match="one group"):
            program.add_node(PyNode(fail), label="c")
    with pytest.raises(ConfigError, match="cannot begin"), program.group("a"):
        pass
    with pytest.raises(ConfigError, match="cannot be called here"):
        handle.add(1)
    with pytest.raises(ConfigError, match="no function"):
        PyNode(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no nodes"):
        launch(Program("empty"))
    with pytest.raises(ConfigError, match="no program runs here"):
        stop()
