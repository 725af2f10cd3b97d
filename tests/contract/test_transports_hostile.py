"""What a stranger, a broken peer or a dying driver can do to a server: very little."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from processes import ends

from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.errors import ConfigError, ResourceError
from sparkdl.ps.client import connect
from sparkdl.ps.kinds import StoreKind
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.rules import Downpour
from sparkdl.settings.network import ports_of
from sparkdl.transport.frames import (
    HEADER,
    HEADER_BYTES,
    VERSION,
    Flag,
    Kind,
    Message,
    encode,
)
from sparkdl.transport.http.client import CLIENT_HEADER, FRAME_PATH
from sparkdl.weights import Layout
from sparkdl.wire.listening import listen

LAYOUT = Layout.of([("w", (50_000,), "float32")])
CENTER = np.arange(LAYOUT.size, dtype=np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(ServerConfig(LAYOUT, Downpour(), 2), CENTER) as process:
        yield process


@pytest.fixture(autouse=True)
def still_serves(server: ServerProcess) -> Iterator[None]:
    yield
    for mode in ("socket", "shm", "http"):
        with connect(server.endpoint, mode, rank=0, layout=LAYOUT) as client:
            client.join()
            assert client.pull()[7] == 7


def tcp(server: ServerProcess, *, web: bool = False) -> socket.socket:
    """A connection to the framed socket, or to the HTTP server."""
    http = urlsplit(server.address.http)
    place = (http.hostname, http.port) if web else (server.address.host, server.address.port)
    return socket.create_connection(place, 10)


def opened(server: ServerProcess) -> socket.socket:
    stream = tcp(server)
    stream.sendall(encode(Message(Kind.OPEN, meta={"token": server.config.token})))
    assert len(stream.recv(HEADER_BYTES)) == HEADER_BYTES
    return stream


def gets_nothing(stream: socket.socket) -> bool:
    stream.settimeout(60)
    try:
        return stream.recv(1) == b""
    except ConnectionResetError:
        return True
    finally:
        stream.close()


def header(
    kind: int,
    flags: int = 0,
    *,
    offset: int = 0,
    total: int = 0,
    meta_size: int = 0,
    body_size: int = 0,
    version: int = VERSION,
) -> bytes:
    """A header of rank 0, whatever sizes it declares."""
    numbers = (0, 0, 1, 0, 0, 0, 0, 0, 0.0)  # rank, attempt, sequence, ... learning rate
    return HEADER.pack(b"SPDL", version, kind, flags, *numbers, offset, total, meta_size, body_size)


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(100),
        random.Random(0).randbytes(4096),
        encode(Message(Kind.OPEN, meta={"token": "wrong"})),
        encode(Message(Kind.OPEN, meta={"token": ["x"]})),
        encode(Message(Kind.OPEN, meta={"token": "\ud800"})),
        header(Kind.OPEN, meta_size=4) + b"\xff\xff\xff\xff",
        encode(Message(StoreKind.PULL)),
        encode(Message(Kind.OPEN, meta={"token": "x" * 100_000})),
        header(StoreKind.PUSH, body_size=4 * LAYOUT.size),
        header(Kind.OPEN, meta_size=2**32 - 1, body_size=2**63),
        header(Kind.OPEN, body_size=1),
    ],
)
def test_a_stranger_gets_nothing_but_a_close(server: ServerProcess, first: bytes) -> None:
    stream = tcp(server)
    stream.sendall(first)
    assert gets_nothing(stream)


@pytest.mark.parametrize("web", [False, True])
def test_a_stranger_has_five_seconds_in_all(server: ServerProcess, web: bool) -> None:
    """However steadily it goes on; it is told that the server is busy then, and closed."""
    words = (b"GET /health HTTP/1.1\r\nHost: " if web else b"SPDL") + b"\x02" * 60
    with tcp(server, web=web) as stream:
        start = time.monotonic()
        stream.settimeout(0.5)
        for byte in words:
            stream.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                heard = stream.recv(4096)
                break
        assert 4.9 <= time.monotonic() - start < 10
        assert (b"HTTP/1.1 503" if web else b"no room") in heard
        assert gets_nothing(stream)


@pytest.mark.parametrize("too_long", [0, 1])
def test_a_connection_takes_four_kib_before_it_shows_the_token(
    server: ServerProcess, too_long: int
) -> None:
    """Of a frame and of an HTTP request: 4,096 bytes are heard, one more closes."""
    meta = {"token": server.config.token, "more": ""}
    spare = 4096 - len(encode(Message(Kind.OPEN, meta=meta)))
    opening = encode(Message(Kind.OPEN, meta={**meta, "more": "x" * (spare + too_long)}))
    head = f"GET /health HTTP/1.1\r\nAuthorization: Bearer {server.config.token}\r\nMore: "
    request = head.encode() + b"x" * (4096 - len(head) - 4 + too_long) + b"\r\n\r\n"
    for web, words in ((False, opening), (True, request)):
        assert len(words) == 4096 + too_long
        stream = tcp(server, web=web)
        stream.sendall(words)
        if too_long:
            assert gets_nothing(stream)
        else:
            assert stream.recv(8)[:4] in (b"SPDL", b"HTTP")
            stream.close()


@pytest.mark.parametrize(
    "frame",
    [
        random.Random(0).randbytes(HEADER_BYTES),
        header(StoreKind.PUSH, body_size=2**40),
        header(StoreKind.PULL, body_size=4 * LAYOUT.size),
        header(StoreKind.PUSH, body_size=4 * LAYOUT.size - 4),
        header(StoreKind.PUSH, Flag.SLICED, body_size=2**63),
        header(CoordinatorKind.KEEP, total=2**63, body_size=2**63),
        header(CoordinatorKind.REPORT, meta_size=2**31),
        header(StoreKind.PULL, version=VERSION + 1),
        header(CoordinatorKind.HELLO, body_size=4),
        header(200),
        header(CoordinatorKind.REPORT, meta_size=5) + b"{{{{{",
    ],
)
def test_a_malformed_frame_is_answered_and_closed(server: ServerProcess, frame: bytes) -> None:
    stream = opened(server)
    stream.sendall(frame)
    head = stream.recv(HEADER_BYTES, socket.MSG_WAITALL)
    assert head[5] == Kind.ERROR
    while stream.recv(4096):
        pass
    stream.close()


def test_half_a_commit_changes_nothing(server: ServerProcess) -> None:
    with connect(server.endpoint, "socket", rank=1, layout=LAYOUT) as client:
        client.join()
        head = encode(
            Message(
                StoreKind.PUSH,
                rank=1,
                sequence=1,
                body=np.ones(LAYOUT.size_bytes, "u1"),
            )
        )
        stream = opened(server)
        stream.sendall(head + bytes(LAYOUT.size_bytes // 2))
        stream.close()
        time.sleep(0.1)
        np.testing.assert_array_equal(client.pull(), CENTER)


def post(server: ServerProcess, body: bytes, length: int | None = None, **headers: str) -> int:
    parts = urlsplit(server.address.http)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=10)
    sent = {
        "Authorization": f"Bearer {server.config.token}",
        CLIENT_HEADER: "a-test-client",
        "Content-Length": str(len(body) if length is None else length),
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    try:
        connection.request("POST", FRAME_PATH, body, sent)
        return connection.getresponse().status
    finally:
        connection.close()


def test_http_refuses_before_it_reads(server: ServerProcess) -> None:
    frame = encode(Message(CoordinatorKind.STATUS))
    assert post(server, frame) == 200
    assert post(server, frame, Authorization="Bearer wrong") == 401
    assert post(server, frame, Authorization="") == 401
    assert post(server, b"", length=2**40) == 413
    assert post(server, b"short") == 413
    start = time.monotonic()
    assert post(server, b"some", length=2**40, Authorization="Bearer wrong") == 401
    assert time.monotonic() - start < 10  # a thread waits 20 s for the rest of a request
    assert post(server, os.urandom(HEADER_BYTES)) == 400
    assert post(server, frame + b"more") == 400
    assert post(server, frame, X_Sparkdl_Client="x") == 400


def test_a_chunked_request_is_refused_and_leaves_no_traceback(server: ServerProcess) -> None:
    head = (
        f"POST {FRAME_PATH} HTTP/1.1\r\nHost: x\r\n{CLIENT_HEADER}: {'c' * 16}\r\n"
        "Transfer-Encoding: chunked\r\n"
    )
    known = f"Authorization: Bearer {server.config.token}\r\n"
    surrogate = "Authorization: Bearer \udcff\udcfe\r\n"
    for shown, status in ((known, b"411"), ("", b"401"), (surrogate, b"401")):
        with tcp(server, web=True) as stream:
            text = head + shown + "\r\n5\r\nhello\r\n0\r\n\r\n"
            stream.sendall(text.encode(errors="surrogateescape"))
            assert stream.recv(64).split(b" ")[1] == status
    assert "Traceback" not in server.errors, server.errors


@pytest.mark.parametrize("member", [False, True])
def test_headers_without_an_end_cost_little_and_end_soon(
    server: ServerProcess, member: bool
) -> None:
    """A stranger gets 4 KiB, whoever has shown the token 16 KiB."""
    start = time.monotonic()
    resident = psutil.Process(server.pid).memory_info().rss
    with tcp(server, web=True) as stream:
        stream.sendall(b"GET /health HTTP/1.1\r\n")
        if member:
            shown = f"Authorization: Bearer {server.config.token}\r\n{CLIENT_HEADER}: {'m' * 16}"
            stream.sendall(f"Host: x\r\n{shown}\r\n".encode())
        refused = False
        for _ in range(512):  # 32 MiB
            try:
                stream.sendall(b"x" * (64 << 10))
            except (BrokenPipeError, ConnectionResetError):
                refused = True
                break
        assert refused
    assert psutil.Process(server.pid).memory_info().rss - resident < 16 << 20
    assert time.monotonic() - start < 50


@pytest.mark.parametrize("web", [False, True])
def test_idle_connections_of_strangers_delay_no_member(server: ServerProcess, web: bool) -> None:
    idle = [tcp(server, web=web) for _ in range(300)]
    start = time.monotonic()
    with connect(server.endpoint, "http" if web else "socket", rank=0, layout=LAYOUT) as client:
        client.join()
        assert client.pull()[7] == 7
    assert time.monotonic() - start < 4  # the strangers' own limit is 5 s
    for stream in idle:
        stream.close()


def test_health_and_metrics(server: ServerProcess) -> None:
    parts = urlsplit(server.address.http)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=10)
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b"ok\n"
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    values = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
    assert {"sparkdl_ps_commits", "sparkdl_ps_workers_alive", "sparkdl_ps_bytes_in"} <= set(values)
    assert all(float(value) >= 0 for value in values.values())


def test_pages_that_are_open_to_all_take_little_of_the_members_time(server: ServerProcess) -> None:
    """A few requests each second are answered; a flood of them gets "no room"."""
    time.sleep(1.5)  # the allowance is full
    answers = []
    began = time.monotonic()
    for _ in range(60):
        with tcp(server, web=True) as stream:
            stream.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answers.append(stream.recv(64).split(b" ")[1])
    assert answers[:15] == [b"200"] * 15
    assert set(answers) == {b"200", b"503"} or time.monotonic() - began > 2
    time.sleep(1.5)
    with tcp(server, web=True) as stream:
        stream.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert stream.recv(64).split(b" ")[1] == b"200"


def whole_answer(stream: socket.socket) -> bytes:
    """All that comes until the server closes."""
    stream.settimeout(10)
    said = b""
    with contextlib.suppress(ConnectionResetError):  # where a part of the request was not read
        while piece := stream.recv(4096):
            said += piece
    return said


@pytest.mark.parametrize(
    ("request_line", "more", "status"),
    [
        ("GET /health", "", b"200"),
        ("GET /metrics", "", b"200"),
        ("GET /health", "Connection: keep-alive\r\n", b"200"),
        ("GET /health", "Content-Length: 100\r\n", b"200"),
        ("GET /health", "Transfer-Encoding: chunked\r\n", b"200"),
        ("HEAD /health", "", b"401"),
        ("GET /elsewhere", "", b"401"),
        ("HEAD /health", "token", b"200"),
        ("OPTIONS /health", "token", b"200"),
        ("GET /elsewhere", "token", b"404"),
        ("DELETE /health", "token", b"405"),
        (f"POST {FRAME_PATH}", "token", b"413"),
    ],
)
def test_a_connection_is_kept_for_frames_only(
    server: ServerProcess, request_line: str, more: str, status: bytes
) -> None:
    """What a stranger may ask for ends its connection, and no second request is read from it."""
    if more == "token":
        more = f"Authorization: Bearer {server.config.token}\r\n"
    words = f"{request_line} HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode()
    with tcp(server, web=True) as stream:
        stream.sendall(2 * words)
        said = whole_answer(stream)
    assert said.split(b" ")[1] == status
    assert said.count(b"HTTP/1.1 ") == 1


def test_strangers_that_were_answered_take_no_thread(server: ServerProcess) -> None:
    """There are more of them than the server has threads; each begins a second request."""
    time.sleep(1.5)  # the allowance is full
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(tcp(server, web=True)) for _ in range(20)]
        for stranger in strangers:
            stranger.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert stranger.recv(4096).startswith(b"HTTP/1.1 200")
        for stranger in strangers:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stranger.sendall(b"G")
        began = time.monotonic()
        with connect(server.endpoint, "http", rank=0, layout=LAYOUT) as client:
            client.join()
            assert client.pull()[7] == 7
        assert time.monotonic() - began < 5  # a thread waits 20 s for the rest of a request


# ------------------------------------------------------------------ ports and processes


def test_a_port_in_use_is_said_before_anything_runs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"port {port}"):
            ServerProcess(ServerConfig(LAYOUT, Downpour(), 1, port=port), CENTER)
        for spec in (f"{port}-{port + 20}", (port, port + 20)):
            with listen("127.0.0.1", spec) as listener:
                assert port < listener.getsockname()[1] <= port + 20


@pytest.mark.parametrize("spec", [-1, 70000, "x", "9-3", (1, 2, 3)[:1], None])
def test_what_is_no_port(spec: object) -> None:
    with pytest.raises(ConfigError, match="no port"):
        ports_of(spec)  # type: ignore[arg-type]


def test_ipv6_and_a_separate_advertised_address() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    config = ServerConfig(LAYOUT, Downpour(), 1, mode="auto", bind_address="::1")
    with ServerProcess(config, CENTER) as process:
        assert process.address.http.startswith("http://[::1]:")
        for mode in ("socket", "http"):
            with connect(process.endpoint, mode, rank=0, layout=LAYOUT) as client:
                client.join()
                assert client.pull()[3] == 3
    config = ServerConfig(LAYOUT, Downpour(), 1, mode="http", advertised_address="driver.example")
    with ServerProcess(config, CENTER) as process:
        assert process.address.http.startswith("http://driver.example:")


def test_sigterm_ends_cleanly_and_the_secret_is_on_no_command_line() -> None:
    with ServerProcess(ServerConfig(LAYOUT, Downpour(), 1), CENTER) as process:
        shown = psutil.Process(process.pid)
        assert process.config.token not in " ".join([*shown.cmdline(), *shown.environ().values()])
        assert os.getsid(process.pid) != os.getsid(0)
        os.kill(process.pid, signal.SIGINT)  # Ctrl-C means the driver, not the server
        time.sleep(0.2)
        assert process.alive
        os.kill(process.pid, signal.SIGTERM)
        assert process._process.wait(5) == 0


DRIVER = """
import sys, numpy as np
from sparkdl.rules import Downpour
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.weights import Layout
layout = Layout.of([("w", (10,), "float32")])
server = ServerProcess(ServerConfig(layout, Downpour(), 1), np.zeros(10, np.float32))
print(server.pid, server.address.uds, flush=True)
import time
time.sleep(60)
"""


def test_a_killed_driver_leaves_no_server() -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    pid, uds = driver.stdout.readline().decode().split()
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert ends(int(pid), within_s=20)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and os.path.exists(os.path.dirname(uds)):
        time.sleep(0.05)
    assert not os.path.exists(os.path.dirname(uds))


def test_a_rule_of_the_users_own_travels() -> None:
    class Doubling(Downpour):
        name = "doubling"

        def update(self, center, delta, state, commit, out):  # type: ignore[no-untyped-def]
            out[...] = center + 2 * delta

    with (
        ServerProcess(ServerConfig(LAYOUT, Doubling(), 1), CENTER) as process,
        connect(process.endpoint, rank=0, layout=LAYOUT) as client,
    ):
        from sparkdl.ps.client import Progress

        client.join()
        client.buffer[...] = 1
        client.push_pull(Progress(0, 1, 1, 1))
        np.testing.assert_array_equal(client.buffer, CENTER + 2)
