"""A node hears of the program's stop, and of its launcher's end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from sparkdl.program.calls import CallClient
from sparkdl.program.running import ProgramControl, Running, await_stop
from sparkdl.program.serving import CallServer

TOKEN = b"t" * 32


class Control(ProgramControl):
    """Answers soon, and tells of every question."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Semaphore(0)

    def wait(self, timeout_s: float | None = None) -> bool:
        self.asked.release()
        return super().wait(0.02)


@pytest.fixture
def control() -> Control:
    return Control()


@pytest.fixture
def server(control: Control) -> Iterator[CallServer]:
    with CallServer(control, TOKEN) as server:
        yield server


@pytest.fixture
def program(server: CallServer) -> Iterator[Running]:
    program = Running(CallClient(server.address, TOKEN, connect_s=0.3))
    waiting = threading.Thread(target=await_stop, args=(program,))
    waiting.start()
    yield program
    server.close()
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_broken_connection_is_no_stop(control: Control, program: Running) -> None:
    for _ in range(3):
        assert control.asked.acquire(timeout=30)
        program.control.close()  # as if the network had cut it
        while control.asked.acquire(blocking=False):
            pass
        for _ in range(3):  # it asks on, over a new connection
            assert control.asked.acquire(timeout=30)
        assert not program.stopping.is_set()
    control.stop()
    assert program.stopping.wait(30)


def test_a_launcher_that_is_gone_is_a_stop(
    control: Control, program: Running, server: CallServer
) -> None:
    assert control.asked.acquire(timeout=30)
    server.close()
    assert program.stopping.wait(30)
