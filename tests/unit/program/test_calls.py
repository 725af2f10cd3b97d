"""Calls between nodes: results, errors, futures, timeouts, strangers, large arrays."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sparkdl.errors import AuthenticationError, TransportError, UnknownNameError, WaitTimeoutError
from sparkdl.program.calls import CallAddress, CallClient, RemoteTraceback
from sparkdl.program.serving import CallServer

TOKEN = b"t" * 32


class Target:
    """What is served."""

    def __init__(self) -> None:
        self.going = threading.Event()
        self.calls = 0

    def add(self, a: int, b: int = 1, *more: int, **named: int) -> int:
        return a + b + sum(more) + sum(named.values())

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    def fail(self, text: str) -> None:
        raise KeyError(text)

    def fail_locally(self) -> None:
        class OwnError(Exception):
            pass

        raise OwnError("from inside")

    def wait(self) -> bool:
        self.calls += 1
        return self.going.wait(10)

    def echo(self, thing: Any) -> Any:
        return thing

    def time_out(self) -> None:
        raise TimeoutError("my own")

    def _private(self) -> None:
        raise AssertionError

    def __call__(self, text: str) -> str:
        return text.upper()


@pytest.fixture
def served() -> Iterator[tuple[Target, CallClient]]:
    target = Target()
    with CallServer(target, TOKEN, label="node", threads=4) as server:
        client = CallClient(server.address, TOKEN)
        yield target, client
        target.going.set()
        client.close()


def test_methods_keywords_class_methods_and_the_object_itself(served: Any) -> None:
    _, client = served
    assert client.add(1) == 2
    assert client.add(1, 2, 3, x=4) == 10
    assert client.name() == "Target"
    assert client("grüße") == "GRÜSSE"
    assert client.echo(lambda x: x + 1)(1) == 2


def test_what_a_method_raises_is_raised_here_with_its_traceback(served: Any) -> None:
    _, client = served
    with pytest.raises(KeyError, match="missing") as caught:
        client.fail("missing")
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in fail" in str(caught.value.__cause__)
    with pytest.raises(Exception, match="from inside"):
        client.fail_locally()
    with pytest.raises(TimeoutError, match="my own"):
        client.time_out()
    assert client.add(1) == 2  # the connection is as good as before


def test_unknown_and_private_methods_are_refused(served: Any) -> None:
    _, client = served
    with pytest.raises(UnknownNameError, match="'add', 'echo'"):
        client.ad(1)
    with pytest.raises(UnknownNameError):
        client._private()


def test_futures_run_at_the_same_time_and_can_be_cancelled(served: Any) -> None:
    target, client = served
    waiting = [client.futures.wait() for _ in range(4)]
    queued = client.futures.wait()
    assert client.futures.echo(1).done() is False
    while target.calls < 4:
        time.sleep(0.01)
    assert queued.cancel()
    failing = client.futures.fail("later")
    time.sleep(0.3)  # the order to cancel is on its way
    target.going.set()
    assert all(future.result(5) for future in waiting)
    with pytest.raises(KeyError, match="later"):
        failing.result(5)
    assert client.add(1) == 2
    assert target.calls == 4


def test_a_call_that_takes_too_long(served: Any) -> None:
    target, client = served
    short = CallClient(client._address, TOKEN, timeout_s=0.1)
    with pytest.raises(WaitTimeoutError, match="wait of node 'node' takes too long"):
        short.wait()
    target.going.set()
    assert short.add(1) == 2
    short.close()


def test_a_node_that_comes_up_late_one_that_never_does_and_one_that_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address = CallAddress("127.0.0.1", port, "gone")
    with pytest.raises(TransportError, match="'gone' cannot be called"):
        CallClient(address, TOKEN, connect_s=0.1).add(1)
    target = Target()
    with CallServer(target, TOKEN) as server:
        client = CallClient(server.address, TOKEN, connect_s=0.1)
        pending = client.futures.wait()
        time.sleep(0.1)
    with pytest.raises(TransportError):
        pending.result(5)
    target.going.set()
    with pytest.raises(TransportError):
        client.add(1)


def test_clients_travel(served: Any) -> None:
    _, client = served
    other = pickle.loads(pickle.dumps(client))
    assert other.add(2) == 3
    other.close()


def test_large_arrays_come_without_a_change(served: Any) -> None:
    _, client = served
    array = np.arange(5_000_000, dtype=np.float32).reshape(1000, -1)
    back = client.echo({"a": array, "b": [array[:10]]})
    np.testing.assert_array_equal(back["a"], array)
    np.testing.assert_array_equal(back["b"][0], array[:10])


def test_strangers_are_refused_before_anything_is_unpickled(served: Any) -> None:
    _, client = served
    address = client._address
    with pytest.raises(AuthenticationError, match="could not prove itself"):
        CallClient(address, b"x" * 32, connect_s=60.0).add(1)
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.sendall(b"\0" * 32)
        assert len(stranger.recv(64, socket.MSG_WAITALL)) == 64
        stranger.sendall(b"\0" * 32)
        assert stranger.recv(64) == b""
    assert client.add(1) == 2


def test_hundreds_of_strangers_that_say_a_byte_now_and_then_delay_no_call(served: Any) -> None:
    _, client = served
    address = client._address
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(400):
            stranger = socket.create_connection((address.host, address.port))
            strangers.append(stack.enter_context(stranger))
            with contextlib.suppress(OSError):
                stranger.send(b"x")
        for _ in range(3):
            with contextlib.closing(CallClient(address, TOKEN)) as other:
                assert other.add(1) == 2
            for stranger in strangers:
                with contextlib.suppress(OSError):
                    stranger.send(b"x")
    assert time.monotonic() - began < 4.5  # a stranger's own limit is 5 s


@pytest.mark.parametrize("name", ["sparkdl-connecting", "sparkdl-replies", "sparkdl-caller"])
def test_where_a_thread_cannot_be_started_later_calls_go_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failed = threading.Thread.start, []

    def start_later(thread: threading.Thread) -> None:
        if thread.name == name and not failed:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    with CallServer(Target(), TOKEN) as server:
        client = CallClient(server.address, TOKEN, timeout_s=20.0)
        if name == "sparkdl-connecting":
            with pytest.raises(RuntimeError, match="can't start new thread"):
                client.add(1)
        assert client.add(1) == 2
        assert failed
        client.close()


def test_both_ends_notice_a_host_that_vanished() -> None:
    """Whether one waits, or has sent what nobody acknowledges."""
    with CallServer(Target(), TOKEN) as server:
        client = CallClient(server.address, TOKEN)
        assert client.add(1) == 2
        [at_server] = server._connections
        for end in (client._connection, at_server):
            assert end is not None
            connection = end._socket
            assert isinstance(connection, socket.socket)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
                assert connection.getsockopt(socket.IPPROTO_TCP, option) <= 10
            limit_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert 0 < limit_ms <= 120_000
        client.close()
