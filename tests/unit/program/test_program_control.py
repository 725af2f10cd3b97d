"""A node hears of the program's stop, and of its launcher's end."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest

from sparkdl.program import running
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


class Network:
    """Forwards connections to a port until it breaks in silence: they stay, and nothing passes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._silent: set[socket.socket] = set()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.lets_new_ones_pass = True
        self._begin(self._accept)

    def _begin(self, work: object, *arguments: socket.socket) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments))  # type: ignore[arg-type]
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._open += [near, far]
                if not self.lets_new_ones_pass:
                    self._silent |= {near, far}
                self._begin(self._forward, near, far)
                self._begin(self._forward, far, near)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if source not in self._silent:
                    target.sendall(data)

    def break_in_silence(self) -> None:
        self._silent |= set(self._open)

    def close(self) -> None:
        for connection in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
        for connection in (self._listener, *self._open):
            connection.close()


@pytest.mark.parametrize("recovers", [True, False])
def test_a_connection_that_breaks_in_silence_is_found(
    control: Control, server: CallServer, recovers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node asks over a new one; only where that is silent, too, the launcher counts as gone."""
    monkeypatch.setattr(running, "_ASK_S", 0.5)
    network = Network(server.address.port)
    address = replace(server.address, port=network.port)
    program = Running(CallClient(address, TOKEN, connect_s=2.0))
    waiting = threading.Thread(target=await_stop, args=(program,))
    waiting.start()
    try:
        assert control.asked.acquire(timeout=30)
        network.lets_new_ones_pass = recovers
        network.break_in_silence()
        while control.asked.acquire(blocking=False):
            pass  # questions from before
        if recovers:
            assert control.asked.acquire(timeout=30)
            assert not program.stopping.is_set()
            control.stop()
        assert program.stopping.wait(30)
    finally:
        program.stopping.set()
        network.close()
        program.control.close()
        waiting.join(30)
    assert not waiting.is_alive()
