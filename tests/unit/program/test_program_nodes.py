"""Programs on threads and on processes: the same nodes, the same results, the same ends."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import program_cases
import pytest
from program_cases import Counter, end_at, fail

from sparkdl.errors import (
    ConfigError,
    DataError,
    UnknownNameError,
    UnpicklableError,
    WaitTimeoutError,
    WorkerError,
)
from sparkdl.program import (
    CacherNode,
    CourierNode,
    Program,
    PyNode,
    launch,
    list_methods,
    stop,
    stop_event,
)
from sparkdl.settings.network import Network

pytestmark = pytest.mark.processes


@pytest.fixture(params=["threads", "processes"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_nodes_call_each_other_and_any_of_them_stops_the_program(kind: Any, tmp_path: Path) -> None:
    with launch(program_cases.counting(tmp_path), kind) as launched:
        launched.wait(60)
    assert max(int(p.name.split("-")[0]) for p in tmp_path.iterdir()) == 20


def test_nodes_that_hold_each_other(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "result"
    with launch(program_cases.ping_pong(path), kind) as launched:
        launched.wait(60)
    assert path.read_text() == "10"


def test_a_node_that_raises_ends_the_program_with_its_traceback(kind: Any) -> None:
    begun = time.monotonic()
    with pytest.raises(WorkerError, match="node bad/0 failed: ValueError: no way on") as caught:
        launch(program_cases.failing(), kind).wait(60)
    assert "in fail" in str(caught.value)
    assert time.monotonic() - begun < 20


def test_an_error_in_a_called_method_is_the_callers(kind: Any) -> None:
    with pytest.raises(WorkerError, match="node caller/0 failed: TypeError"):
        launch(program_cases.calling_badly(), kind).wait(60)


def test_what_nodes_return_comes_back(kind: Any) -> None:
    program = Program("results")
    program.add_node(CourierNode(Counter), label="counter")
    with program.group("power"):
        for number in range(3):
            program.add_node(PyNode(pow, 2, number))
    program.add_node(PyNode(threading.Lock), label="lock")
    program.add_node(PyNode(stop), label="end")
    with launch(program, kind) as launched:
        assert launched.results("power", 60) == [1, 2, 4]
        assert launched.results("counter") == [None]
        with pytest.raises(DataError, match="what node lock/0 returned"):
            launched.results("lock")
        with pytest.raises(UnknownNameError, match="power"):
            launched.results("powers")


def test_the_launcher_stops_it(kind: Any) -> None:
    program = Program("idle")
    program.add_node(CourierNode(Counter), label="counter")
    launched = launch(program, kind)
    with pytest.raises(WaitTimeoutError, match="'idle' still runs"):
        launched.wait(0.1)
    launched.stop()
    launched.wait(1)


def stop_and_return(value: int) -> int:
    stop()
    return value


def test_a_node_that_does_not_end_is_killed_and_other_results_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparkdl.program.launching._END_S", 3.0)
    program = Program("stubborn")
    program.add_node(PyNode(time.sleep, 1000), label="sleeper")
    program.add_node(PyNode(stop_and_return, 3), label="quick")
    begun = time.monotonic()
    launched = launch(program, "processes")
    launched.wait(60)
    assert time.monotonic() - begun < 60
    assert launched.results("quick") == [3]
    assert launched.results("sleeper") == [None]


def test_a_process_that_dies_ends_the_program() -> None:
    begun = time.monotonic()
    with pytest.raises(Exception, match=r"rank 1|dead/0"):
        launch(program_cases.dying(), "processes").wait(60)
    assert time.monotonic() - begun < 15


def test_the_node_that_was_killed_is_named_and_not_its_caller() -> None:
    begun = time.monotonic()
    with pytest.raises(WorkerError, match="node victim/0 failed: its process was ended by SIGKILL"):
        launch(program_cases.killing(), "processes").wait(60)
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


class Source:
    """What a cacher stands before; its first call never ends."""

    def __init__(self) -> None:
        self.calls = 0

    def apply(self, function: Any) -> int:
        self.calls += 1
        return int(function(self.calls))

    def hang(self) -> str:
        self.calls += 1
        if self.calls == 1:
            stop_event().wait(60)
        return "answers"


def pass_functions(source: Any, cached: Any) -> None:
    ten = 10
    assert source.apply(lambda x: x + ten) == 11
    assert {cached.apply(lambda x: x + ten) for _ in range(5)} == {12}
    assert "apply" in list_methods(cached)
    stop()


def ask_one_that_hangs(source: Any, cached: Any) -> None:
    waiting = [cached.futures.hang() for _ in range(3)]
    for future in waiting:
        assert isinstance(future.exception(60), WaitTimeoutError)
    assert cached.hang() == "answers"
    stop()


@pytest.mark.parametrize("ask", [pass_functions, ask_one_that_hangs])
def test_a_cacher_passes_functions_on_and_outlives_a_hung_call(ask: Any) -> None:
    program = Program("cache")
    source = program.add_node(CourierNode(Source), label="source")
    cacher = CacherNode(source, 60_000, source_timeout_s=1.0)
    cached = program.add_node(cacher, label="cacher")
    program.add_node(PyNode(ask, source, cached), label="asker")
    with launch(program, "threads") as launched:
        launched.wait(120)


def test_many_nodes() -> None:
    program = Program("many")
    counter = program.add_node(CourierNode(Counter), label="counter")
    with program.group("adder"):
        for _ in range(28):
            program.add_node(PyNode(_add_once, counter))
    program.add_node(PyNode(end_at, counter, 28), label="end")
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
    with pytest.raises(ConfigError, match="launch_type='spark'"):
        launch(program, "threads", network=Network())
    with pytest.raises(ConfigError, match="no program runs here"):
        stop()


def test_a_node_that_cannot_be_pickled_is_named() -> None:
    program = Program("locked")
    with program.group("actor"):
        program.add_node(PyNode(print))
        program.add_node(PyNode(print, threading.Lock()))
    with pytest.raises(UnpicklableError, match=r"(?s)node 'actor/1' .*'_thread.lock'.*hint: make"):
        launch(program, "threads")


@pytest.mark.parametrize("value", [0, -1.0, "60", True])
def test_the_limit_of_a_call_is_a_time(value: Any) -> None:
    with pytest.raises(ConfigError, match="client_timeout_s must be a time above 0"):
        CourierNode(Counter, client_timeout_s=value)


@pytest.mark.parametrize("label", ["", "  ", 3])
def test_a_group_has_a_name(label: Any) -> None:
    with (
        pytest.raises(ConfigError, match="a group of nodes needs a name"),
        Program("p").group(label),
    ):
        pass
    with pytest.raises(ConfigError, match="a group of nodes needs a name"):
        Program("p").add_node(PyNode(print), label=label)
