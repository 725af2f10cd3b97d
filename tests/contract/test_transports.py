"""One suite for all transports: http, socket and shm against a real server process, and inproc."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from in_threads import STEP, in_thread
from processes import runs

from sparkdl.coordinator.driver_client import DriverClient, open_driver
from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import (
    AuthenticationError,
    ProtocolError,
    SparkDLError,
    TransportError,
    WaitTimeoutError,
    WorkerError,
)
from sparkdl.failures import Failure
from sparkdl.process.closing import Closing
from sparkdl.ps.client import Client, connect, pull_center
from sparkdl.ps.kinds import StoreKind, limits_of
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.ps.strategy import ServerStrategy
from sparkdl.rules import BSP, Downpour, Rule
from sparkdl.testing.inproc import InprocParameterServer
from sparkdl.training.reports import EpochReport
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import Timeouts
from sparkdl.transport.frames import BLOB_BYTES, MAX_META_BYTES, Message
from sparkdl.transport.shm import SENT_BY_ANY_BYTES
from sparkdl.weights import Layout

LAYOUT = Layout.of([("w", (300, 100), "float32")], [("m", (10,), "float32")])
QUICK = Timeouts(connect_s=5.0, reconnect_s=1.0, heartbeat_s=0.3)


class Running:
    """A server of one transport, and clients of it."""

    def __init__(self, transport: str, config: ServerConfig) -> None:
        self.transport, self.config = transport, config
        self.process: ServerProcess | None = None
        self.server: InprocParameterServer | None = None
        center = np.zeros(LAYOUT.size, np.float32)
        if transport == "inproc":
            self.server = InprocParameterServer(config, center)
        else:
            self.process = ServerProcess(config, center)

    def client(
        self, rank: int = 0, attempt: int = 0, *, token: str = "", layout: Layout = LAYOUT
    ) -> Client:
        if self.server is not None:
            return self.server.client(
                rank, attempt, token=token or None, layout=layout, timeouts=QUICK
            )
        assert self.process is not None
        endpoint = self.process.endpoint
        if token:
            endpoint = replace(endpoint, token=token)
        return connect(
            endpoint, self.transport, rank=rank, attempt=attempt, layout=layout, timeouts=QUICK
        )

    def driver(self) -> DriverClient:
        if self.server is not None:
            return self.server.driver()
        assert self.process is not None
        return open_driver(self.process.endpoint, limits_of(LAYOUT), mode=self.transport)

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
        if self.server is not None:
            self.server.close()


class Named:
    """A rank, as a launcher names it."""

    def __init__(self, rank: int, attempt: int = 0) -> None:
        self.rank, self.attempt = rank, attempt

    def all_gather(self, text: str) -> list[str]:
        raise NotImplementedError


@pytest.fixture(params=["http", "socket", "shm", "inproc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["http", "socket", "shm"])
def remote(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def running(
    transport: str, rule: Rule | None = None, workers: int = 2, **limits: Any
) -> Iterator[Running]:
    settings = Settings(workers, **{"lease_s": 5.0, "grace_s": 0.3, **limits})
    mode: Any = "socket" if transport == "inproc" else transport
    server = Running(
        transport, ServerConfig(LAYOUT, rule or Downpour(), workers, mode=mode, settings=settings)
    )
    try:
        yield server
    finally:
        server.stop()


def test_push_and_pull_round_trip(transport: str) -> None:
    with running(transport) as server, server.client() as client:
        assert client.session.transport == transport
        client.join(rows=5, batches_per_epoch=2)
        values = np.arange(LAYOUT.size, dtype=np.float32)
        client.buffer[...] = values
        client.push(STEP)
        client.buffer[...] = -1
        expected = values.copy()
        expected[LAYOUT.trained_size :] /= 2
        np.testing.assert_array_equal(client.pull(), expected)
        client.buffer[...] = 1
        client.push_pull(STEP)
        np.testing.assert_array_equal(client.buffer[:3], expected[:3] + 1)
        assert client.session.clock == 2
        center = client.buffer.copy()
        client.session.report(EpochReport(0, 2, np.array([1.5])))
        with server.driver() as driver:
            status = driver.status()
            assert status.workers[0].batches_per_epoch == 2
            assert (status.epochs[0].rows, status.epochs[0].metrics.tolist()) == (2, [1.5])
            assert status.bytes_in > 2 * LAYOUT.size_bytes
            np.testing.assert_array_equal(pull_center(driver), center)
            driver.control(stop=True, learning_rate=0.25)
        client.session.report(EpochReport(0, 0))
        assert client.session.stopped
        assert client.session.learning_rate == 0.25
        client.session.finish()


def test_a_last_pull_is_answered_after_the_last_commits(transport: str) -> None:
    with running(transport) as server, server.client(0) as first, server.client(1) as second:
        for client in (first, second):
            client.join()
        first.buffer[...] = 1
        first.push(STEP)
        thread, out = in_thread(lambda: first.pull(last=True)[0])
        time.sleep(0.3)
        assert not out
        second.buffer[...] = 10
        second.push(STEP)
        assert second.pull(last=True)[0] == 11
        thread.join(10)
        assert out == [11]


def test_a_wrong_token_is_refused(transport: str) -> None:
    with running(transport) as server:
        for token in ("wrong", "é" * 9 if transport != "http" else "x" * 9):
            with pytest.raises(AuthenticationError), server.client(token=token) as client:
                client.join()
        with server.client() as client:  # the right one still works
            client.join()


def test_a_body_of_another_size_is_refused(transport: str) -> None:
    other = Layout.of([("w", (7,), "float32")])
    with (
        running(transport) as server,
        pytest.raises(ProtocolError, match="does not fit"),
        server.client(layout=other) as client,
    ):
        client.join()


def test_frames_out_of_order_are_refused(transport: str) -> None:
    with running(transport) as server, server.client() as client:
        with pytest.raises(ProtocolError, match="before HELLO"):
            client.pull()
        client.join()
        with pytest.raises(ProtocolError, match="rules that wait and take gradients"):
            client.snapshot(1)
        with pytest.raises(ProtocolError, match="too large"):
            client.session.request(Message(CoordinatorKind.REPORT, meta={"x": "y" * (5 << 20)}))
        client.pull()  # the connection still works


def test_concurrent_commits_add_up_exactly(transport: str) -> None:
    def work(client: Client) -> None:
        for _ in range(50):
            client.buffer[...] = 1
            client.push_pull(STEP)

    with running(transport, workers=3) as server:
        clients = [server.client(rank) for rank in range(3)]
        for client in clients:
            client.join()
        threads = [in_thread(lambda c=client: work(c)) for client in clients]
        for thread, out in threads:
            thread.join(30)
            assert out == [None]
        with server.driver() as driver:
            np.testing.assert_array_equal(pull_center(driver)[: LAYOUT.trained_size], 150.0)
        for client in clients:
            client.close()


@pytest.mark.parametrize("when", ["before the request", "after the commit"])
def test_a_commit_sent_again_counts_once(transport: str, when: str) -> None:
    with running(transport) as server, server.client() as client:
        client.join()
        client.buffer[...] = 1
        channel = client.session._connection.channel
        assert channel is not None
        if when == "before the request":
            channel.abort()
        else:
            original = channel.request

            def lossy(message: Message, timeout_s: float | None) -> Message:
                reply = original(message, timeout_s)
                if message.kind is StoreKind.PUSH_PULL:
                    channel.abort()
                    raise ConnectionResetError("the reply was lost")
                return reply

            channel.request = lossy  # type: ignore[method-assign]
        client.push_pull(STEP)
        np.testing.assert_array_equal(client.buffer[:3], 1.0)
        assert client.session._connection.channel is not channel
        client.buffer[...] = 1
        client.push_pull(STEP)
        np.testing.assert_array_equal(client.buffer[:3], 2.0)


def test_rounds_give_the_mean_gradient_to_all(transport: str) -> None:
    with running(transport, BSP()) as server:
        clients = [server.client(rank) for rank in (0, 1)]
        greetings = [
            in_thread(lambda c=c: c.join(batches_per_epoch=c.session.rank + 1)) for c in clients
        ]
        for thread, out in greetings:
            thread.join(10)
            assert out[0].steps_per_epoch == 2
        for _ in range(3):
            for client in clients:
                client.buffer[...] = client.session.rank
            rounds = [
                in_thread(lambda c=c: c.push_pull(replace(STEP, rows=1 + 2 * c.session.rank)))
                for c in clients
            ]
            for (thread, _), client in zip(rounds, clients, strict=True):
                thread.join(10)
                np.testing.assert_array_equal(client.buffer, np.float32(0.75))
                assert client.round_rows == 4
        for client in clients:
            client.close()


@pytest.mark.parametrize("killed", [False, True])
def test_one_worker_sends_the_weights_of_an_epoch_while_the_others_wait(
    transport: str, killed: bool
) -> None:
    with running(transport, BSP()) as server:
        clients = [server.client(rank) for rank in (0, 1)]
        for thread, _ in [in_thread(c.join) for c in clients]:
            thread.join(10)
        assert clients[0].snapshot_wanted(1)
        waiting, out = in_thread(lambda: clients[1].snapshot_wanted(1))
        waiting.join(0.2)
        assert waiting.is_alive()
        if killed:
            clients[0].close()
            waiting.join(10)
            assert out == [True]
        sender = clients[killed]
        sender.buffer[...] = 7
        sender.snapshot(1)
        waiting.join(10)
        assert out == [killed]
        with server.driver() as driver:
            np.testing.assert_array_equal(pull_center(driver), np.float32(7))
        for client in clients:
            client.close()


def test_rounds_of_large_weights_over_shared_memory() -> None:
    """Whose result each connection's own thread copies."""
    layout = Layout.of([("w", (SENT_BY_ANY_BYTES // 4 + 1,), "float32")])
    config = ServerConfig(layout, BSP(), 2, mode="shm", settings=Settings(2))
    with ServerProcess(config, np.zeros(layout.size, np.float32)) as process:
        clients = [connect(process.endpoint, "shm", rank=r, layout=layout) for r in (0, 1)]
        for thread, _ in [in_thread(client.join) for client in clients]:
            thread.join(10)
        for number in range(3):
            for client in clients:
                client.buffer[...] = client.session.rank + number
            for thread, out in [in_thread(lambda c=c: c.push_pull(STEP)) for c in clients]:
                thread.join(10)
                assert float(out[0][-1]) == number + 0.5
        for client in clients:
            client.close()


def test_a_failure_reaches_a_rank_that_waits(transport: str) -> None:
    with running(transport, BSP()) as server:
        clients = [server.client(rank) for rank in (0, 1)]
        for thread, _ in [in_thread(c.join) for c in clients]:
            thread.join(10)
        thread, out = in_thread(lambda: clients[0].push_pull(STEP))
        time.sleep(0.2)
        clients[1].session.fail(Failure(1, "ValueError: bad row", "the traceback"))
        thread.join(5)
        assert isinstance(out[0], WorkerError)
        assert out[0].rank == 1
        assert "the traceback" in str(out[0])
        for client in clients:
            client.close()


def test_a_wait_that_passes_its_limit_names_the_missing(transport: str) -> None:
    with (
        running(transport, BSP(), start_timeout_s=0.5) as server,
        server.client(1) as client,
        pytest.raises(WaitTimeoutError, match="missing: 0"),
    ):
        client.join()


def test_an_epochs_end_waits_for_the_driver(transport: str) -> None:
    with running(transport) as server, server.client() as client, server.driver() as driver:
        client.join()
        end = EpochReport(0, 1, ended=True)
        thread, out = in_thread(lambda: client.session.report(end, wait=True))
        deadline = time.monotonic() + 20
        while 0 not in driver.status().epochs and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.7)  # heartbeats go on meanwhile
        assert not out
        driver.control(release=0)
        thread.join(5)
        assert out == [None]


def test_a_joiners_state_travels_in_chunks(transport: str) -> None:
    with running(transport, BSP()) as server:
        clients = [server.client(rank) for rank in (0, 1)]
        for thread, _ in [in_thread(c.join) for c in clients]:
            thread.join(10)
        clients[1].close()
        joiner = server.client(1, attempt=1)
        greeting, welcome = in_thread(joiner.join)
        time.sleep(0.3)
        state = os.urandom(3 * LAYOUT.size_bytes + 17)
        clients[0].give_state = lambda: state
        clients[0].buffer[...] = 3
        pushing, result = in_thread(lambda: clients[0].push_pull(replace(STEP, batch=6)).copy())
        greeting.join(10)
        assert (welcome[0].source, welcome[0].batch) == ("state", 5)
        assert joiner.get_state() == state
        joiner.buffer[...] = 5
        joiner.push_pull(replace(STEP, batch=6))
        pushing.join(10)
        np.testing.assert_array_equal(result[0], np.full(LAYOUT.size, 4))  # the push is as it was
        for client in (clients[0], joiner):
            client.close()


def test_a_killed_server_is_noticed_within_seconds(remote: str) -> None:
    with running(remote, BSP()) as server:
        clients = [server.client(rank) for rank in (0, 1)]
        for thread, _ in [in_thread(c.join) for c in clients]:
            thread.join(10)
        waiting, out = in_thread(lambda: clients[0].push_pull(STEP))
        time.sleep(0.2)
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(TransportError, match="lost the parameter server"):
            clients[1].push_pull(STEP)
        waiting.join(10)
        assert isinstance(out[0], TransportError)
        assert time.monotonic() - start < 15
        with pytest.raises(TransportError):
            server.process.check()
        for client in clients:
            client.close()


WORKER = """
import pickle, sys
endpoint, mode, layout = pickle.load(sys.stdin.buffer)
from sparkdl.ps.client import connect
from sparkdl.transport.connection import Timeouts
client = connect(endpoint, mode, rank=1, layout=layout, timeouts=Timeouts(heartbeat_s=0.2))
client.join()
print("joined", flush=True)
import time
time.sleep(60)
"""


def test_a_round_waits_for_the_next_attempt_of_a_killed_worker(remote: str) -> None:
    import pickle

    with running(remote, BSP(), lease_s=1.5) as server, server.client(0) as client:
        assert server.process is not None
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(pickle.dumps((server.process.endpoint, remote, LAYOUT)))
        worker.stdin.close()
        client.join()
        assert worker.stdout.readline() == b"joined\n"
        thread, out = in_thread(lambda: client.push_pull(STEP))
        time.sleep(0.3)
        assert not out
        worker.kill()
        worker.wait()
        worker.stdout.close()
        thread.join(3)  # longer than the lease
        assert not out
        client.give_state = lambda: b"of before the round"
        with server.client(1, attempt=1) as successor:
            assert successor.join().source == "state"
            assert successor.get_state() == b"of before the round"
            successor.push_pull(STEP)
        thread.join(20)
        assert len(out) == 1
        assert not isinstance(out[0], SparkDLError)


def test_nothing_is_left_behind(remote: str) -> None:
    with running(remote) as server:
        assert server.process is not None
        pid, address = server.process.pid, server.process.address
        with server.client() as client:
            client.join()
            client.pull()
    assert not runs(pid)
    if address.uds:
        assert not os.path.exists(os.path.dirname(address.uds))
    assert not [name for name in os.listdir("/dev/shm") if "sparkdl" in name]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="no list of mapped memory")
def test_what_was_closed_maps_no_memory(remote: str) -> None:
    """Not even while its objects are held: in a fit they hold each other."""
    with running(remote) as server:
        client, driver = server.client(), server.driver()
        client.join()
        client.pull()
        driver.status()
        client.close()
        driver.close()
        mapped = Path("/proc/self/maps").read_text()
    assert "sparkdl-mailbox" not in mapped


def test_auto_takes_the_fastest_that_works() -> None:
    with running("auto") as server:
        assert server.process is not None
        address = server.process.address
        ways = {
            "shm": address,
            "socket": replace(address, host_id="another host"),
            "http": replace(address, host_id="another host", port=1),
        }
        for expected, way in ways.items():
            endpoint = Endpoint(way, server.config.token)
            with connect(endpoint, rank=0, layout=LAYOUT, timeouts=QUICK) as client:
                client.join()
                client.pull()
                assert client.session.transport == expected
        nowhere = replace(address, host_id="x", port=1, http="http://127.0.0.1:1")
        with pytest.raises(TransportError, match=r"socket: .*http: "):
            connect(Endpoint(nowhere, "t"), rank=0, layout=LAYOUT, timeouts=QUICK)


def test_no_reply_is_torn_by_a_commit(remote: str) -> None:
    layout = Layout.of([("w", (2_000_000,), "float32")])  # many pieces, more than kernels buffer
    settings = Settings(2, grace_s=0.3)
    config = ServerConfig(layout, Downpour(), 2, mode=remote, settings=settings)  # type: ignore[arg-type]
    with ServerProcess(config, np.zeros(layout.size, np.float32)) as process:
        writer, reader = (
            connect(process.endpoint, remote, rank=rank, layout=layout) for rank in (0, 1)
        )
        writer.join()
        reader.join()
        over = threading.Event()

        def write() -> None:
            while not over.is_set():
                writer.buffer[...] = 1
                writer.push(STEP)

        thread, out = in_thread(write)
        seen = set()
        pulls, deadline = 0, time.monotonic() + 60
        while pulls < 15 or (len(seen) < 2 and time.monotonic() < deadline):
            center = reader.pull()
            assert center.min() == center.max()
            seen.add(float(center[0]))
            pulls += 1
        over.set()
        thread.join(20)
        assert out == [None]
        assert len(seen) > 1
        writer.close()
        reader.close()


def test_the_temporary_folder_is_long_and_tmp_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither can be written to Python takes the present folder, whose path may be long."""
    long = tmp_path / ("long" * 20)
    long.mkdir()
    made, writable = tempfile.mkdtemp, os.access

    def mkdtemp(prefix: str, dir: str | None = None) -> str:
        assert dir != "/tmp", "read-only"
        return made(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/tmp" and writable(path, mode))
    config = ServerConfig(LAYOUT, Downpour(), 1, mode="shm")
    with ServerProcess(config, np.zeros(LAYOUT.size, np.float32)) as process:
        client = connect(process.endpoint, "shm", rank=0, layout=LAYOUT)
        client.join()
        assert not client.pull().any()
        client.close()


def test_a_failure_is_reported_whatever_the_size_of_the_model(remote: str) -> None:
    """The mailbox of shared memory is as large as the model."""
    layout = Layout.of([("w", (BLOB_BYTES // 4 + 1000,), "float32")])
    config = ServerConfig(layout, Downpour(), 2, mode=remote)  # type: ignore[arg-type]
    with ServerProcess(config, np.zeros(layout.size, np.float32)) as process:
        strategy = ServerStrategy(process.endpoint, layout, config.rule)
        with open_driver(process.endpoint, limits_of(layout), mode=remote) as driver:
            strategy.report_failure(Named(1), ValueError("bad row"))
            failure = driver.status().failure
    assert failure is not None
    assert (failure.rank, failure.error) == (1, "ValueError: bad row")
    assert "bad row" in failure.traceback


def test_the_driver_reads_what_a_worker_kept(transport: str) -> None:
    state = np.random.default_rng(0).bytes(BLOB_BYTES + 17)  # two chunks
    with running(transport) as server, server.client() as client, server.driver() as driver:
        client.join()
        assert driver.kept() == b""
        client.session.keep([state], 1)
        assert driver.kept() == state


def test_lines_reach_the_driver(transport: str) -> None:
    with running(transport) as server, server.client(1) as client, server.driver() as driver:
        client.session.log(["importing", "", "größer"])  # before it joins
        assert driver.take_lines() == [(1, "importing"), (1, ""), (1, "größer")]
        assert driver.take_lines() == []


def test_metrics_too_large_for_a_frame_are_an_error_that_says_so(transport: str) -> None:
    with running(transport) as server, server.client() as client, server.driver() as driver:
        client.join()
        with pytest.raises(ProtocolError, match="metrics of epoch 0 cannot be sent"):
            client.session.report(EpochReport(0, 1, np.zeros(BLOB_BYTES // 8 + 1)))
        large = np.arange(BLOB_BYTES // 8, dtype=np.float64)
        client.session.report(EpochReport(0, 1, large))
        np.testing.assert_array_equal(driver.status().epochs[0].metrics, large)


def test_a_reply_that_cannot_be_encoded_is_an_error_that_says_so(transport: str) -> None:
    with running(transport) as server, server.client() as client, server.driver() as driver:
        text = "x" * (MAX_META_BYTES - 120)  # fits a HELLO, but not the reply that says more
        with pytest.raises(ProtocolError, match="meta of a OK frame is too large"):
            client.session.join(text=text)
        assert driver.status().workers[0].alive  # the server goes on, and so does the worker
        client.session.join(text="short")
        client.pull()


# ------------------------------------------------------------------ http through a proxy


def test_a_client_keeps_its_id_over_many_reconnects() -> None:
    """A proxy may close each connection after its response; 48 ids are all that there are."""
    with running("http", workers=1) as server:
        assert server.process is not None
        with ClosingProxy(server.process.address.http) as proxy:
            address = replace(server.process.address, http=proxy.url)
            endpoint = Endpoint(address, server.config.token)
            quick = replace(QUICK, heartbeat_s=0.02)  # each beat is one more connection
            with connect(endpoint, "http", rank=0, layout=LAYOUT, timeouts=quick) as client:
                client.join()
                for _ in range(60):
                    client.buffer[...] = 1
                    client.push_pull(STEP)
                np.testing.assert_array_equal(client.buffer[:3], 60.0)
                assert proxy.connections > 60
                with server.driver() as driver:  # is not locked out
                    assert driver.status().commits == 60
                with open_driver(endpoint, limits_of(LAYOUT), mode="http") as driver:
                    for _ in range(60):
                        assert driver.status().commits == 60
                client.session.finish()


class ClosingProxy(Closing):
    """Forwards to an HTTP server, and closes each connection after one response."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            client,
            contextlib.suppress(OSError),
            socket.create_connection(self._target) as server,
            client.makefile("rb") as request,
            server.makefile("rb") as response,
        ):
            self._forward(request, server)
            self._forward(response, client)

    @staticmethod
    def _forward(source: Any, target: socket.socket) -> None:
        """Forwards one request or response, by its Content-Length."""
        length = 0
        while (line := source.readline()) not in (b"\r\n", b""):
            target.sendall(line)
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        target.sendall(b"\r\n" + source.read(length))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_a_report_leaves_the_buffer_alone(transport: str) -> None:
    """It may come from another thread while the weights of the last exchange are still read."""
    with running(transport) as server, server.client() as client:
        client.join(batches_per_epoch=2)
        client.buffer[...] = np.arange(LAYOUT.size, dtype=np.float32)
        received = client.push_pull(STEP).copy()
        client.session.report(EpochReport(0, 1, np.full(1000, -1.0)))
        client.session.keep([b"\xff" * 100_000], 1)
        client.session.log(["a line"])
        np.testing.assert_array_equal(client.buffer, received)
        client.push(STEP)  # and what is sent next is what the buffer holds
        client.pull()
        np.testing.assert_array_equal(client.buffer[:10], 2 * received[:10])
        with server.driver() as driver:
            assert driver.kept() == b"\xff" * 100_000
            np.testing.assert_array_equal(driver.status().epochs[0].metrics, np.full(1000, -1.0))
