"""A server that has no room says so, and a member tries again until there is some."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import select
import socket
import socketserver
import ssl
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.machine import Coordinator
from sparkdl.coordinator.session import open_session
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import TransportError
from sparkdl.transport import socket as stream
from sparkdl.transport.address import Address, Endpoint, Listeners, ListenOptions
from sparkdl.transport.connection import Connection, Timeouts
from sparkdl.transport.frames import HEADER_BYTES, FrameLimits, Kind, Message, encode, error_to_meta
from sparkdl.transport.http.client import CLIENT_HEADER, FRAME_PATH
from sparkdl.transport.http.gateway import _HTTP_BUSY
from sparkdl.transport.openers import openers_of
from sparkdl.transport.server import Server
from sparkdl.wire import tls
from sparkdl.wire.greeting import no_room
from sparkdl.wire.hosts import host_id
from sparkdl.wire.tls import Certificate, connect_encrypted

TOKEN = "a token"
ROOM = 40  # of a server for one worker


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_member_waits_for_room_and_is_not_told_of_a_wrong_token(encrypted: bool) -> None:
    certificate = Certificate.make() if encrypted else None
    fingerprint = certificate.fingerprint if certificate else ""
    listeners = Listeners.bind(ListenOptions("socket", web=False), None)
    server = Server(Coordinator(Settings(1)), TOKEN, listeners, 1, certificate).start()
    endpoint = Endpoint(server.address, TOKEN, fingerprint)
    address = (server.address.host, server.address.port)
    opening = encode(Message(Kind.OPEN, meta={"token": TOKEN}))
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        held = []
        for _ in range(ROOM):
            connection = socket.create_connection(address, 20)
            if encrypted:
                connection = connect_encrypted(connection, TOKEN, fingerprint)
            held.append(stack.enter_context(connection))
            connection.sendall(opening)
            assert connection.recv(HEADER_BYTES)[5] == Kind.OK
        with pytest.raises(TransportError, match="no room"):
            open_session(endpoint, rank=0, timeouts=Timeouts(connect_s=0.3))

        def join() -> str:
            with open_session(endpoint, rank=0, timeouts=Timeouts(connect_s=20.0)) as session:
                return session.meet("in")[0]

        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(join)
            time.sleep(0.5)
            assert not joining.done()
            for connection in held[:5]:
                connection.close()
            assert joining.result(20) == "in"


@pytest.mark.parametrize("mode", ["socket", "shm"])
def test_a_member_held_up_before_its_first_words_tries_again(
    mode: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is told that the server was busy, and not that its token is wrong.

    Where the server has closed a Unix socket by then, the first words cannot even be sent.
    """
    monkeypatch.setattr("sparkdl.wire.greeting.FIRST_WORDS_S", 0.3)
    listeners = Listeners.bind(ListenOptions(mode, web=False), str(tmp_path))
    server = Server(Coordinator(Settings(1)), TOKEN, listeners, 1, None).start()
    send, held_up = stream.send_frame, []

    def send_late(*arguments: Any, **options: Any) -> None:
        if not held_up:
            held_up.append(time.sleep(1.0))
        send(*arguments, **options)

    monkeypatch.setattr(stream, "send_frame", send_late)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        session = stack.enter_context(open_session(Endpoint(server.address, TOKEN, ""), rank=0))
        assert session.meet("in") == ["in"]
    assert held_up


class _Refuser:
    """A server that ends the first connections in some way, and answers OPEN on later ones."""

    def __init__(self, path: Path | None, say: bytes, times: int) -> None:
        self._say, self._times = say, times
        self._listener = (
            socket.socket(socket.AF_UNIX) if path is not None else socket.socket(socket.AF_INET)
        )
        self._listener.bind(str(path) if path is not None else ("127.0.0.1", 0))
        self._listener.listen(8)
        self.ended = threading.Semaphore(0)
        self.came = 0
        host, port = ("", 0) if path is not None else self._listener.getsockname()
        uds = str(path) if path is not None else ""
        mode: Any = "shm" if uds else "socket"
        self.endpoint = Endpoint(Address("", host, port, uds, host_id(), mode), TOKEN)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.came += 1
                with connection:
                    if self.came > self._times:
                        connection.recv(4096)
                        connection.sendall(encode(Message(Kind.OK)))
                        connection.recv(1)
                        continue
                    connection.sendall(self._say)
                    if not self._say and connection.family == socket.AF_INET:
                        linger = struct.pack("ii", 1, 0)  # a reset in place of an end
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.ended.release()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(20)


_BUSY = encode(Message(Kind.ERROR, meta=error_to_meta(no_room())))


@pytest.mark.parametrize("mode", ["socket", "shm"])
@pytest.mark.parametrize("say", [_BUSY, b""])
def test_a_member_whose_connection_ends_before_its_first_words_tries_again(
    mode: str, say: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether the server has said why, or has just reset the connection."""
    refuser = _Refuser(tmp_path / "u" if mode == "shm" else None, say, times=3)
    send = stream.send_frame

    tries = itertools.count(1)

    def send_late(*arguments: Any, **options: Any) -> None:
        if next(tries) <= 3:
            assert refuser.ended.acquire(timeout=20)
            time.sleep(0.05)
        send(*arguments, **options)

    monkeypatch.setattr(stream, "send_frame", send_late)
    timeouts = Timeouts(connect_s=20.0)
    limits = FrameLimits()
    opener = openers_of(refuser.endpoint, mode, limits, timeouts)
    connection = Connection(opener, limits, timeouts, buffered=False, name="a member")
    try:
        connection.open()
        assert refuser.came == 4
    finally:
        connection.close()
        refuser.close()


def test_a_refusal_is_heard_where_the_server_closed_before_all_was_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(_BUSY)
        body = np.zeros(1 << 20, np.uint8)
        message = Message(CoordinatorKind.KEEP, total=body.size, body=body)
        reply = stream.exchange(ours, message, FrameLimits(), lambda: body)
        assert reply.meta["code"] == "busy"
        with pytest.raises(BrokenPipeError):
            stream.exchange(ours, message, FrameLimits(), lambda: body)


def test_what_resets_every_connection_is_an_error_in_the_end() -> None:
    refuser = _Refuser(None, b"", times=1 << 30)
    try:
        began = time.monotonic()
        with pytest.raises(TransportError, match="reset"):
            open_session(refuser.endpoint, rank=0, timeouts=Timeouts(connect_s=1.0))
        assert 0.9 < time.monotonic() - began < 10
    finally:
        refuser.close()


@pytest.mark.parametrize("mode", ["socket", "http"])
def test_a_member_held_up_in_the_tls_handshake_tries_again(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_S", 0.5)
    certificate = Certificate.make()
    listeners = Listeners.bind(ListenOptions(mode, web=mode == "http"), None)
    server = Server(Coordinator(Settings(1)), TOKEN, listeners, 1, certificate).start()
    endpoint = Endpoint(server.address, TOKEN, certificate.fingerprint)
    context, held_up = tls._pinning_client, []

    def late_context() -> ssl.SSLContext:
        if not held_up:
            held_up.append(time.sleep(1.5))
        return context()

    monkeypatch.setattr(tls, "_pinning_client", late_context)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        session = stack.enter_context(open_session(endpoint, mode=mode, rank=0))
        assert session.meet("in") == ["in"]
    assert held_up


def test_a_member_over_http_waits_for_room_among_the_clients() -> None:
    listeners = Listeners.bind(ListenOptions("http", web=True), None)
    server = Server(Coordinator(Settings(1)), TOKEN, listeners, 1, None).start()
    place = urlsplit(server.address.http)
    endpoint = Endpoint(server.address, TOKEN, "")

    def tell(client: int, kind: Kind) -> None:
        web = http.client.HTTPConnection(place.hostname or "", place.port or 0, timeout=20)
        shown = {"Authorization": f"Bearer {TOKEN}", CLIENT_HEADER: f"client {client:09}"}
        web.request("POST", FRAME_PATH, encode(Message(kind)), shown)
        assert web.getresponse().status == 200
        web.close()

    def join() -> str:
        patient = Timeouts(reconnect_s=20.0)
        with open_session(endpoint, mode="http", rank=0, timeouts=patient) as session:
            return session.meet("in")[0]

    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        for client in range(ROOM):
            tell(client, CoordinatorKind.STATUS)
        hasty = Timeouts(reconnect_s=0.3)
        with (
            open_session(endpoint, mode="http", rank=0, timeouts=hasty) as session,
            pytest.raises(TransportError, match="no room"),
        ):
            session.meet("in")
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(join)
            time.sleep(0.5)
            assert not joining.done()
            tell(7, CoordinatorKind.BYE)
            assert joining.result(20) == "in"


@pytest.mark.parametrize("mode", ["socket", "shm", "http"])
def test_a_member_that_gets_no_thread_tries_again(
    mode: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the server goes on accepting; of HTTP's connections those with TLS begin in a thread."""
    certificate = Certificate.make() if mode == "http" else None
    listeners = Listeners.bind(ListenOptions(mode, web=mode == "http"), str(tmp_path))
    server = Server(Coordinator(Settings(1)), TOKEN, listeners, 1, certificate).start()
    endpoint = Endpoint(server.address, TOKEN, certificate.fingerprint if certificate else "")
    start, failed = threading.Thread.start, []

    def start_later(thread: threading.Thread) -> None:
        if thread.name.startswith("sparkdl-ps-") and len(failed) < 2:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        session = stack.enter_context(open_session(endpoint, mode=mode, rank=0))
        assert session.meet("in") == ["in"]
        if mode != "http":
            [transport] = server._transports
            assert len(transport._members) <= 2  # type: ignore[attr-defined]
    assert len(failed) == 2
    assert "can't start new thread" in caplog.text


_SILENT_TOO_LONG = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("refusal", [_HTTP_BUSY, _SILENT_TOO_LONG])
def test_a_member_over_http_that_is_not_served_tries_again(refusal: bytes) -> None:
    """A gate before the server refuses the first connections, and lets others in."""
    listeners = Listeners.bind(ListenOptions("http", web=True), None)
    server = Server(Coordinator(Settings(1)), TOKEN, listeners, 1, None).start()
    inside = urlsplit(server.address.http)
    turned_away = []

    class Gate(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if len(turned_away) < 3:
                self.request.recv(4096)
                turned_away.append(self.request.send(refusal))
                return
            with socket.create_connection((inside.hostname, inside.port)) as onward:
                pair = {self.request: onward, onward: self.request}
                while True:
                    for source in select.select(list(pair), [], [], 20)[0]:
                        data = source.recv(1 << 16)
                        if not data:
                            return
                        pair[source].sendall(data)

    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        gate = stack.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Gate))
        gate.daemon_threads = True
        serving = threading.Thread(target=gate.serve_forever, args=(0.05,))
        serving.start()
        stack.callback(serving.join, 20)
        stack.callback(gate.shutdown)
        outside = replace(server.address, http=f"http://127.0.0.1:{gate.server_address[1]}")
        endpoint = Endpoint(outside, TOKEN, "")
        with open_session(
            endpoint, mode="http", rank=0, timeouts=Timeouts(connect_s=20.0)
        ) as session:
            assert list(session.meet("in")) == ["in"]
    assert len(turned_away) == 3
