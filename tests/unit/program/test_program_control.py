"""A node hears of the program's stop, and of its launcher's end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from sparkdl.program.calls import CallClient
from sparkdl.program.running import ProgramControl, Running, await_stop
from sparkdl.program.serving import CallServer

TOKEN = b"t" * 32


class Control(ProgramControl):
    """Tells of every question."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Semaphore(0)

    def when_stopping(self) -> Future[None]:
        self.asked.release()
        return super().when_stopping()


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
    assert control.asked.acquire(timeout=30)  # over a new connection
    assert not program.stopping.is_set()
    control.stop()
    assert program.stopping.wait(30)


def test_nodes_that_ended_or_wait_hold_no_thread_of_the_launcher(control: Control) -> None:
    with CallServer(control, TOKEN, threads=1) as server:
        clients = [CallClient(server.address, TOKEN) for _ in range(5)]
        programs = [Running(client) for client in clients]
        waiting = [threading.Thread(target=await_stop, args=(program,)) for program in programs]
        for thread in waiting:
            thread.start()
            assert control.asked.acquire(timeout=30)
        assert clients[0].is_stopping() is False  # there is a thread for this question
        for program, client in zip(programs[:3], clients[:3], strict=True):
            program.stopping.set()  # as a node that ends does
            client.close()
        for thread in waiting[:3]:
            thread.join(30)
            assert not thread.is_alive()
        assert not control.asked.acquire(timeout=0.3)  # none of the ended asked again
        control.stop()
        for thread in waiting[3:]:
            thread.join(30)
            assert not thread.is_alive()
        for client in clients:
            client.close()


def test_a_launcher_that_is_gone_is_a_stop(
    control: Control, program: Running, server: CallServer
) -> None:
    assert control.asked.acquire(timeout=30)
    server.close()
    assert program.stopping.wait(30)
