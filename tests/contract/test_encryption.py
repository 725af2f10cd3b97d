"""TLS between the processes of a run: who is let in, what passes, and what is on the wire."""

from __future__ import annotations

import contextlib
import gc
import http.client
import itertools
import pickle
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from sparkdl.collective.builtin.paths import encrypt_neighbours
from sparkdl.collective.builtin.waiting import Watch
from sparkdl.collective.communicator import make_communicator
from sparkdl.coordinator.driver_client import CoordinatorHost, open_driver
from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.session import open_session
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import AuthenticationError, TransportError
from sparkdl.ps.client import Client, Progress, connect
from sparkdl.ps.kinds import limits_of
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.rules import Downpour
from sparkdl.transport.address import Endpoint, Listeners, ListenOptions
from sparkdl.transport.connection import Timeouts
from sparkdl.transport.frames import BLOB_BYTES, Kind, Message, encode
from sparkdl.transport.http.client import CLIENT_HEADER, FRAME_PATH
from sparkdl.transport.server import Server
from sparkdl.weights import Layout
from sparkdl.wire import tls
from sparkdl.wire.proving import NONCE_BYTES, PROOF_BYTES, WELCOME, proof_of
from sparkdl.wire.tls import KNOCK, Certificate

LAYOUT = Layout.of([("w", (3_000_000,), "float32")])  # more than kernels buffer, several pieces
QUICK = Timeouts(connect_s=5.0, reconnect_s=1.0, heartbeat_s=0.3)
STEP = Progress(epoch=0, batch=1, batches=1, rows=1)
TOKEN = b"a token of at least 16 bytes"


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return Certificate.make()


@contextlib.contextmanager
def serving(
    transport: str, certificate: Certificate, token: str | None = None
) -> Iterator[Endpoint]:
    """A parameter server in threads of this process."""
    settings = Settings(2, lease_s=5.0, grace_s=0.3)
    config = ServerConfig(
        LAYOUT,
        Downpour(),
        2,
        mode=transport,
        settings=settings,
        certificate=certificate,  # type: ignore[arg-type]
    )
    listeners = Listeners.bind(config.listen, None)
    service = config.service(np.zeros(LAYOUT.size, np.float32))
    token = token or config.token
    server = Server(service, token, listeners, 2, certificate)
    try:
        server.start()
        yield Endpoint(server.address, token, certificate.fingerprint)
    finally:
        server.close()


@pytest.fixture(params=["socket", "http"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def endpoint(transport: str, certificate: Certificate) -> Iterator[Endpoint]:
    with serving(transport, certificate) as made:
        yield made


def port_of(endpoint: Endpoint) -> int:
    """The port that members connect to."""
    return endpoint.address.port or urlsplit(endpoint.address.http).port or 0


OPENING = KNOCK + b"n" * NONCE_BYTES


def prove(connection: socket.socket, token: str) -> None:
    """Knocks, and proves the token."""
    connection.sendall(OPENING)
    connection.sendall(answer_to(challenge_from(connection), token))


def challenge_from(connection: socket.socket) -> bytes:
    """What the server answers to a knock: its nonce, and its own proof."""
    return connection.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)


def answer_to(challenge: bytes, token: str) -> bytes:
    """The proof that the server's nonce asks for."""
    return proof_of(token.encode(), b"connector", OPENING, challenge[:NONCE_BYTES])


def client_of(endpoint: Endpoint, transport: str, rank: int = 0) -> Client:
    return connect(endpoint, transport, rank=rank, layout=LAYOUT, timeouts=QUICK)


class Eavesdropper:
    """Forwards TCP connections to a port, and keeps all that passes; may cut them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.heard, self.of_client, self.of_server = bytearray(), bytearray(), bytearray()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def _begin(self, work: Any, *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._open += [near, far]
                self._begin(self._forward, near, far, self.of_client)
                self._begin(self._forward, far, near, self.of_server)

    def _forward(self, source: socket.socket, target: socket.socket, own: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                own += data
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Eavesdropper:
        return self

    def __exit__(self, *_: Any) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)
        for connection in self._open:
            connection.close()


def through(eavesdropper: Eavesdropper, endpoint: Endpoint, transport: str = "") -> Endpoint:
    """The way to the server by way of the eavesdropper; of all its transports, or of one."""
    address = replace(endpoint.address, port=endpoint.address.port and eavesdropper.port)
    if endpoint.address.http and transport != "socket":
        address = replace(address, http=f"http://127.0.0.1:{eavesdropper.port}")
    return replace(endpoint, address=address)


def test_neither_token_nor_weights_can_be_read_on_the_wire_and_a_cut_is_mended(
    endpoint: Endpoint, transport: str
) -> None:
    words = np.frombuffer(b"a row of secret weights ", np.float32)
    with (
        Eavesdropper(port_of(endpoint)) as eavesdropper,
        client_of(through(eavesdropper, endpoint), transport) as client,
    ):
        client.join(batches_per_epoch=4)
        client.buffer[:6] = words
        client.buffer[6:] = 1.0
        client.push_pull(replace(STEP, batch=1))
        eavesdropper.cut()
        client.buffer[...] = 1.0
        client.push_pull(replace(STEP, batch=2))  # reconnects; counts once
        np.testing.assert_array_equal(client.pull()[6:], 2.0)
        assert len(eavesdropper.heard) > 4 * LAYOUT.size_bytes
        assert endpoint.token.encode() not in eavesdropper.heard
        assert b"secret" not in eavesdropper.heard


def test_a_wrong_token_is_refused_before_tls(endpoint: Endpoint, transport: str) -> None:
    with pytest.raises(AuthenticationError, match="the server could not prove itself"):
        client_of(replace(endpoint, token="another"), transport).join()


def test_another_certificate_is_refused_before_the_token_is_shown(
    transport: str, certificate: Certificate
) -> None:
    """Whoever answers in the driver's place, even with a recorded knock, has no key to pin to."""
    impostor = Certificate.make()
    with serving(transport, impostor) as endpoint:
        believed = replace(endpoint, fingerprint=certificate.fingerprint)
        with pytest.raises(AuthenticationError, match="another certificate"):
            client_of(believed, transport).join()


def test_a_client_without_tls_gets_nothing(endpoint: Endpoint, transport: str) -> None:
    plain = replace(endpoint, fingerprint="")
    with (
        pytest.raises((TransportError, AuthenticationError)),
        client_of(plain, transport) as client,
    ):
        client.join()


def test_a_knock_without_the_token_opens_nothing(endpoint: Endpoint, transport: str) -> None:
    """Who takes over a connection after its knock may speak TLS, but not show the token."""
    with socket.create_connection(("127.0.0.1", port_of(endpoint)), 10) as raw:
        prove(raw, endpoint.token)
        assert raw.recv(1) == WELCOME
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(raw) as stranger:
            if transport == "socket":
                stranger.sendall(encode(Message(Kind.OPEN, meta={"token": "guessed"})))
                assert stranger.recv(1) == b""
            else:
                stranger.sendall(
                    b"POST /v1/frame HTTP/1.1\r\nHost: x\r\nContent-Length: 96\r\n\r\n"
                )
                assert stranger.recv(64).startswith(b"HTTP/1.1 401")


def test_a_recorded_proof_is_refused_at_every_port(certificate: Certificate) -> None:
    """Also at a server that never heard it; more than there is room for cost the members nothing.

    A stranger sends all of a member's words at once, or each when the member did.
    """
    with (
        serving("auto", certificate) as endpoint,
        serving("socket", certificate, endpoint.token) as sibling,
        Eavesdropper(endpoint.address.port) as eavesdropper,
        contextlib.ExitStack() as stack,
    ):
        with client_of(through(eavesdropper, endpoint, "socket"), "socket") as client:
            client.join()
        nonce = bytes(eavesdropper.of_server[:NONCE_BYTES])
        opening = bytes(eavesdropper.of_client[: len(OPENING)])
        proof = proof_of(endpoint.token.encode(), b"connector", opening, nonce)
        assert eavesdropper.of_client.startswith(opening + proof)
        ports = (endpoint.address.port, urlsplit(endpoint.address.http).port, sibling.address.port)
        for number, port in enumerate(ports * 60):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            stranger.sendall(opening + proof if number % 2 else opening)
            assert challenge_from(stranger)[:NONCE_BYTES] != nonce
            if not number % 2:
                stranger.sendall(proof)
            assert stranger.recv(1) == b""
        for transport in ("socket", "http"):
            with client_of(endpoint, transport) as client:
                client.join()


def test_nothing_is_kept_of_a_connection_that_has_ended(endpoint: Endpoint, transport: str) -> None:
    """Of any number of connections with the token: a run may make some each minute for weeks."""

    def connect_once() -> None:
        raw = socket.create_connection(("127.0.0.1", port_of(endpoint)), 20)
        tls.connect_encrypted(raw, endpoint.token, endpoint.fingerprint).close()

    def kept() -> int:
        gc.collect()
        return len(gc.get_objects()) + sum(len(o) for o in gc.get_objects() if type(o) is set)

    for _ in range(20):
        connect_once()
    time.sleep(0.5)
    before = kept()
    for _ in range(300):
        connect_once()
    time.sleep(0.5)
    assert kept() - before < 150


@pytest.mark.parametrize(
    "silent_after", ["nothing", "half a knock", "a knock", "a proof", "the handshake"]
)
def test_the_silent_are_closed(
    endpoint: Endpoint, silent_after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an HTTP 408, which would look like an answer to the request that comes next."""
    monkeypatch.setattr(tls, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr("sparkdl.wire.greeting.FIRST_WORDS_S", 0.5)
    with socket.create_connection(("127.0.0.1", port_of(endpoint)), 20) as stranger:
        if silent_after == "half a knock":
            stranger.sendall(OPENING[:2])
        elif silent_after == "a knock":
            stranger.sendall(OPENING)
        elif silent_after == "a proof":
            prove(stranger, endpoint.token)
        elif silent_after == "the handshake":
            stranger = tls.connect_encrypted(stranger, endpoint.token, endpoint.fingerprint)
        began = time.monotonic()
        said = b""
        with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
            while piece := stranger.recv(256):
                said += piece
        assert time.monotonic() - began < 5
        assert not said.startswith(b"HTTP/1.1 408")


def test_the_deadline_until_open_is_one_for_all_bytes(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_S", 1.0)
    with serving("socket", certificate) as endpoint:
        raw = socket.create_connection(("127.0.0.1", port_of(endpoint)), 20)
        opening = encode(Message(Kind.OPEN, meta={"token": endpoint.token}))
        with tls.connect_encrypted(raw, endpoint.token, endpoint.fingerprint) as slow:
            began = time.monotonic()
            slow.settimeout(0.3)
            for byte in opening:  # each in time for a limit that counts from the last one
                slow.sendall(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    heard = slow.recv(1)
                    break
            assert time.monotonic() - began < 10
            slow.settimeout(20)
            frame = heard + slow.recv(4096)
            assert b"no room" in frame  # a member that was held up knows to try again


@pytest.mark.parametrize("cut_within_a_request", [False, True])
def test_a_connection_that_breaks_leaves_no_traceback(
    certificate: Certificate, cut_within_a_request: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with serving("http", certificate) as endpoint:
        raw = socket.create_connection(("127.0.0.1", port_of(endpoint)), 20)
        with tls.connect_encrypted(raw, endpoint.token, endpoint.fingerprint) as peer:
            request = f"POST {FRAME_PATH} HTTP/1.1\r\nHost: x\r\n"
            peer.sendall((request if cut_within_a_request else request + "\r\n").encode())
            if not cut_within_a_request:
                assert peer.recv(4096).startswith(b"HTTP/1.1 401")
            time.sleep(0.3)  # a thread reads the rest of the request
        with client_of(endpoint, "http") as client:
            client.join()
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_what_is_open_to_all_needs_no_tls_and_frames_do(certificate: Certificate) -> None:
    with serving("http", certificate) as endpoint:
        web = http.client.HTTPConnection("127.0.0.1", port_of(endpoint), timeout=10)
        web.request("GET", "/health")
        answer = web.getresponse()
        assert (answer.read(), answer.headers["Connection"]) == (b"ok\n", "close")
        shown = {"Authorization": f"Bearer {endpoint.token}", CLIENT_HEADER: "a-plain-client"}
        web.request("POST", FRAME_PATH, encode(Message(CoordinatorKind.STATUS)), shown)
        assert web.getresponse().status == 401
        web.close()


def test_no_encrypted_reply_is_torn_by_a_commit(endpoint: Endpoint, transport: str) -> None:
    with client_of(endpoint, transport, 0) as writer, client_of(endpoint, transport, 1) as reader:
        writer.join()
        reader.join()
        over = threading.Event()

        def write() -> None:
            for batch in itertools.count(1):
                writer.buffer[...] = 1
                writer.push(replace(STEP, batch=batch))
                if over.is_set():
                    return

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            seen = set()
            for _ in range(8):
                center = reader.pull()
                assert center.min() == center.max()
                seen.add(float(center[0]))
            over.set()
            writing.result(30)
        assert len(seen) > 1


def test_a_server_in_a_process_of_its_own(certificate: Certificate) -> None:
    config = ServerConfig(LAYOUT, Downpour(), 1, certificate=certificate)
    with ServerProcess(config, np.zeros(LAYOUT.size, np.float32)) as process:
        assert process.endpoint.fingerprint == certificate.fingerprint
        for mode in ("socket", "shm", "http"):
            with (
                client_of(process.endpoint, mode) as client,
                open_driver(process.endpoint, limits_of(LAYOUT), mode=mode) as driver,
            ):
                client.join()
                state = np.random.default_rng(0).bytes(BLOB_BYTES + 17)  # two chunks
                client.session.keep([state], 1)
                assert driver.kept() == state
                assert client.session.transport == mode


def test_ranks_meet_at_an_encrypted_coordinator(certificate: Certificate) -> None:
    listen = ListenOptions("socket", web=False)
    with CoordinatorHost(Settings(1), listen, certificate) as host:
        with open_session(host.endpoint, rank=0) as session:
            assert session.meet("here") == ["here"]
            session.log(["one", "two"])
        assert host.driver.take_lines() == [(0, "one"), (0, "two")]


def test_a_certificate_shows_no_key_and_survives_pickling(certificate: Certificate) -> None:
    again = pickle.loads(pickle.dumps(certificate))
    assert again == certificate
    assert again.fingerprint == certificate.fingerprint
    assert "PRIVATE" not in repr(certificate)
    assert certificate.private not in repr(certificate)
    assert Certificate.make().fingerprint != certificate.fingerprint


@pytest.mark.parametrize("piece_bytes", [1, 3, 100])
def test_knock_and_proof_may_come_in_pieces(
    endpoint: Endpoint, transport: str, piece_bytes: int
) -> None:
    with socket.create_connection(("127.0.0.1", port_of(endpoint)), 10) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin in range(0, len(OPENING), piece_bytes):
            raw.sendall(OPENING[begin : begin + piece_bytes])
            time.sleep(0.01)
        proof = answer_to(challenge_from(raw), endpoint.token)
        for begin in range(0, len(proof), piece_bytes):
            raw.sendall(proof[begin : begin + piece_bytes])
            time.sleep(0.01)
        assert raw.recv(1) == WELCOME


def test_a_proof_is_heard_as_soon_as_it_comes(endpoint: Endpoint) -> None:
    """Over HTTP, too, whose greeter only looks at what else strangers say, and does so seldom."""
    took_s = []
    for _ in range(30):
        raw = socket.create_connection(("127.0.0.1", port_of(endpoint)), 20)
        began = time.monotonic()
        with tls.connect_encrypted(raw, endpoint.token, endpoint.fingerprint):
            took_s.append(time.monotonic() - began)
    assert statistics.median(took_s) < 0.05


# ------------------------------------------------------------------ ranks of an all-reduce


def ring(certificates: list[Certificate | None], hosts: str = "abc", **options: Any) -> list[Any]:
    """What each rank's connect() returned or raised; ranks are threads on hosts of their own."""
    connectors = [
        make_communicator(
            "builtin", rank=rank, bind_host="127.0.0.1", host_id=hosts[rank],
            certificate=certificate, **options,
        )
        for rank, certificate in enumerate(certificates)
    ]  # fmt: skip
    members = [connector.prepare() for connector in connectors]

    def connect_rank(connector: Any) -> Any:
        try:
            return connector.connect(members, TOKEN)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(connectors)) as pool:
        return list(pool.map(connect_rank, connectors))


@pytest.mark.parametrize("hosts", ["abc", "aabb"])
def test_an_encrypted_ring_reduces_the_same_bits(certificate: Certificate, hosts: str) -> None:
    sizes = (1, 5_000, 400_000)
    results = []
    for given in (None, certificate):
        communicators = ring([given] * len(hosts), hosts)

        def reduce(communicator: Any) -> list[Any]:
            got = []
            for size in sizes:
                values = np.random.default_rng(communicator.rank).normal(size=size)
                got.append(communicator.all_reduce(values.astype(np.float32)))
                got += communicator.all_gather(values[: size // (1 + communicator.rank)])
                got.append(communicator.broadcast(values, 1))
            group = (
                communicator.group([0, len(hosts) - 1])
                if communicator.rank in (0, len(hosts) - 1)
                else None
            )
            got.append(group.all_reduce(np.ones(40_000)) if group is not None else None)
            communicator.barrier()
            return got

        with ThreadPoolExecutor(len(hosts)) as pool:
            results.append(list(pool.map(reduce, communicators)))
        for communicator in communicators:
            communicator.close()
    for plain, secured in zip(*results, strict=True):
        for one, other in zip(plain, secured, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_rank_with_another_certificate_is_refused(certificate: Certificate) -> None:
    answers = ring([certificate, Certificate.make()], connect_timeout_s=10.0)
    assert all(isinstance(answer, TransportError | AuthenticationError) for answer in answers)
    assert any(isinstance(answer, AuthenticationError) for answer in answers)


def test_connections_of_other_ranks_cannot_be_joined(certificate: Certificate) -> None:
    """All ranks hold one certificate, but each connection has the names of its two ends."""
    near, far = socket.socketpair()
    other_near, other_far = socket.socketpair()
    for end in (near, far, other_near, other_far):
        end.setblocking(False)

    def begin(to_next: socket.socket, previous: socket.socket, rank: int) -> Any:
        watch = Watch(rank, 10.0)
        try:  # rank 0 means rank 1, but the other end is rank 2's
            return encrypt_neighbours(
                to_next, previous, rank, (rank + 1, rank + 1), b"group", certificate, watch
            )
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(begin, (near, other_near), (other_far, far), (0, 2)))
    assert all(isinstance(answer, AuthenticationError) for answer in answers), answers


def test_the_end_of_an_encrypted_rank_is_noticed(certificate: Certificate) -> None:
    first, second = ring([certificate, certificate])
    second.close()
    with pytest.raises(TransportError, match="rank 1 is gone"):
        first.all_reduce(np.ones(100_000, np.float32))
    first.close()
