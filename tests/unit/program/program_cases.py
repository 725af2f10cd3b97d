"""Programs for the tests of every way to launch them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from sparkdl.errors import TransportError
from sparkdl.program import (
    CourierNode,
    Program,
    PyClassNode,
    PyNode,
    stop,
    stop_event,
    wait_for_stop,
)


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


def end_at(counter: Any, value: int) -> None:
    while counter.add(0) < value:
        time.sleep(0.01)
    counter.end()


def counting(path: Path) -> Program:
    """Four nodes: a counter from 10, two that add 5 each, and one that ends the program at 20."""
    program = Program("count")
    with program.group("counter"):
        counter = program.add_node(CourierNode(Counter, start=10))
    with program.group("worker"):
        for times in (5, 5):
            program.add_node(PyNode(count, counter, str(path), times=times))
        program.add_node(PyNode(end_at, counter, 20))
    return program


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


def ping_pong(path: Path) -> Program:
    """Two nodes that hold each other; the first writes 10 and stops the program."""
    program = Program("ping-pong")
    one, two = CourierNode(Player), CourierNode(Player)
    first = program.add_node(one, label="one")
    second = program.add_node(two, label="two")
    one.configure(second, True, str(path))
    two.configure(first, False, str(path))
    return program


def fail() -> None:
    raise ValueError("no way on")


class Loop:
    def run(self) -> None:
        stop_event().wait()


def failing() -> Program:
    """A node that waits for the stop, and one that raises."""
    program = Program("failing")
    with program.group("loop"):
        program.add_node(PyClassNode(Loop))
    with program.group("bad"):
        program.add_node(PyNode(fail))
    return program


def call_badly(counter: Any) -> None:
    counter.add("one")


def calling_badly() -> Program:
    """A node that calls another with an argument on which its method fails."""
    program = Program("calls")
    counter = program.add_node(CourierNode(Counter), label="counter")
    program.add_node(PyNode(call_badly, [counter][0]), label="caller")
    return program


def dying() -> Program:
    """A node that waits for the stop, and one whose process ends."""
    program = Program("dying")
    program.add_node(PyClassNode(Loop), label="loop")
    program.add_node(PyNode(os._exit, 3), label="dead")
    return program


class Victim:
    def greet(self) -> int:
        return 1

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def greet_and_kill(victim: Any) -> None:
    victim.greet()
    victim.die()


def killing() -> Program:
    """A node that is killed with signal 9, and the one that called it."""
    program = Program("kill")
    victim = program.add_node(CourierNode(Victim), label="victim")
    program.add_node(PyNode(greet_and_kill, victim), label="caller")
    return program


class Mortal:
    """Counts its calls, and dies when it is told to."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def pid(self) -> int:
        return os.getpid()


def survive(mortal: Any) -> list[Any]:
    """Kills the node it calls, and what it saw before and after."""
    seen: list[Any] = [mortal.count(), mortal.count()]
    pid = mortal.pid()
    pending = mortal.futures.die()
    try:
        pending.result(15)
    except TransportError as error:
        seen.append("cannot be called" in str(error))
    seen += [mortal.count(), mortal.pid() != pid]
    stop()
    return seen


def dying_and_coming_back(restarts: int) -> Program:
    """A node that its caller kills; it may come back."""
    program = Program("mortal")
    with program.group("mortal", restarts=restarts):
        mortal = program.add_node(CourierNode(Mortal))
    program.add_node(PyNode(survive, mortal), label="caller")
    return program


def fail_until(path: str, times: int) -> int:
    """Raises so often, in all attempts together."""
    file = Path(path)
    before = len(file.read_text()) if file.exists() else 0
    file.write_text("x" * (before + 1))
    if before < times:
        raise ValueError(f"attempt {before}")
    return before


def failing_for_a_while(path: Path, times: int, restarts: int) -> Program:
    """One node that raises ``times`` times."""
    program = Program("flaky")
    with program.group("flaky", restarts=restarts):
        program.add_node(PyNode(fail_until, str(path), times))
    return program


class Link:
    """One of a ring: adds its number and hands on."""

    def __init__(self, number: int, following: Any, last: bool) -> None:
        self._number, self._following, self._last = number, following, last

    def add(self, total: int) -> int:
        total += self._number
        return total if self._last else int(self._following.add(total))

    def run(self) -> int | None:
        total = None
        if self._number == 1:
            total = self.add(0)
            stop()
        wait_for_stop()
        return total


def ring(count: int) -> Program:
    """Nodes of which each calls the next; the first returns 1 + 2 + ... + count."""
    program = Program("ring")
    nodes = [CourierNode(Link) for _ in range(count)]
    with program.group("link"):
        handles = [program.add_node(node) for node in nodes]
    for number, node in enumerate(nodes):
        last = number == count - 1
        node.configure(number + 1, handles[(number + 1) % count], last)
    return program
