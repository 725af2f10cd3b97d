"""Calls between hosts of an encrypted run: what is on the wire, and who is refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sparkdl.errors import AuthenticationError, TransportError
from sparkdl.program.calls import CallAddress, CallClient
from sparkdl.program.serving import CallServer
from sparkdl.wire.tls import Certificate

TOKEN = b"t" * 32
SECRET = "the secret of the run"
connect = socket.create_connection  # a test puts another one in its place


class Echo:
    def echo(self, thing: Any) -> Any:
        return thing


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return Certificate.make()


class Wire:
    """Passes the bytes of connections on to a port, and keeps them."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = connect(("127.0.0.1", self._port))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def server(certificate: Certificate) -> Iterator[CallServer]:
    with CallServer(
        Echo(), TOKEN, bind="0.0.0.0", advertised="127.0.0.1", certificate=certificate
    ) as made:
        yield made


def elsewhere(server: CallServer) -> CallAddress:
    """The address as a caller of another host sees it."""
    return replace(server.address, host_id="another host")


def test_between_hosts_nothing_can_be_read_and_all_arrives(
    server: CallServer, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(server.address.port)
    address = elsewhere(server)
    monkeypatch.setattr(
        "sparkdl.program.calls.socket.create_connection",
        lambda at, *rest: connect(("127.0.0.1", wire.port), *rest),
    )
    client = CallClient(address, TOKEN, certificate=certificate)
    assert client.echo(SECRET) == SECRET
    array = np.arange(3_000_000, dtype=np.float32)
    waiting = [client.futures.echo(array[i:]) for i in range(4)]
    assert client.echo(array[:0]).shape == (0,)
    for number, future in enumerate(waiting):
        np.testing.assert_array_equal(future.result(30), array[number:])
    client.close()
    wire.close()
    assert len(wire.seen) > 8 * array.nbytes - 100
    assert SECRET.encode() not in wire.seen
    assert array[1000:1010].tobytes() not in wire.seen


def test_many_threads_send_and_receive_at_the_same_time(
    server: CallServer, certificate: Certificate
) -> None:
    client = CallClient(elsewhere(server), TOKEN, certificate=certificate)
    wrong: list[int] = []

    def call(number: int) -> None:
        for size in range(0, 200_000, 10_000):
            sent = bytes([number]) * size
            if client.echo(sent) != sent:
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    client.close()


def test_on_one_host_calls_are_plain_and_stay_on_it(
    server: CallServer, certificate: Certificate
) -> None:
    assert server.address.is_near()
    assert not elsewhere(server).is_near()
    wire = Wire(server.address.local_port)
    near = replace(server.address, local_port=wire.port)
    client = CallClient(near, TOKEN, certificate=certificate)
    assert client.echo(SECRET) == SECRET
    assert SECRET.encode() in wire.seen
    client.close()
    wire.close()


def test_another_certificate_another_node_and_no_certificate_are_refused(
    server: CallServer, certificate: Certificate
) -> None:
    address = elsewhere(server)
    with pytest.raises(AuthenticationError, match="could not prove itself"):
        CallClient(address, TOKEN, certificate=Certificate.make()).echo(1)
    renamed = replace(address, host="localhost")
    with pytest.raises(
        AuthenticationError, match="the other end of an encrypted call could not prove itself"
    ):
        CallClient(renamed, TOKEN, certificate=certificate).echo(1)
    with pytest.raises(AuthenticationError, match="could not prove itself"):
        CallClient(address, b"x" * 32, certificate=certificate, connect_s=60.0).echo(1)
    plain = CallClient(address, TOKEN, timeout_s=5, connect_s=0.1)
    with pytest.raises(TransportError):
        plain.echo(SECRET)
    client = CallClient(address, TOKEN, certificate=certificate)
    assert client.echo(1) == 1
    client.close()
