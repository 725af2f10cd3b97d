"""Encoded commits and replies over every transport: nothing lost, nothing counted twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from in_threads import STEP, in_thread

from sparkdl.codecs import DGC, Codec, Compression, TopK, codec_names, make_codec
from sparkdl.coordinator.driver_client import DriverClient, open_driver
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import ConfigError, ProtocolError
from sparkdl.ps.client import Client, connect, pull_center
from sparkdl.ps.kinds import StoreKind, limits_of
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.rules import BSP, SSP, Downpour, Hogwild, Rule
from sparkdl.testing.inproc import InprocParameterServer
from sparkdl.transport.connection import Timeouts
from sparkdl.transport.frames import Flag, Kind, Message
from sparkdl.weights import Layout

LAYOUT = Layout.of([("w", (300, 100), "float32")], [("m", (10,), "float32")])
TRAINED = slice(0, LAYOUT.trained_size)
QUICK = Timeouts(connect_s=5.0, reconnect_s=1.0, heartbeat_s=0.3)
LOSSY = [name for name in codec_names() if name not in ("none", "dgc")]


class World:
    """A server with a codec, and its clients over one transport."""

    def __init__(self, transport: str, codec: Codec, rule: Rule, workers: int) -> None:
        settings = Settings(workers, lease_s=5.0, grace_s=0.3)
        mode: Any = "socket" if transport == "inproc" else transport
        self.config = ServerConfig(LAYOUT, rule, workers, mode=mode, settings=settings, codec=codec)
        self.transport = transport
        self.center = np.zeros(LAYOUT.size, np.float32)
        self.local: InprocParameterServer | None = None
        self.process: ServerProcess | None = None
        if transport == "inproc":
            self.local = InprocParameterServer(self.config, self.center)
        else:
            self.process = ServerProcess(self.config, self.center)

    def client(self, rank: int = 0, attempt: int = 0) -> Client:
        compression = self.config.compression()
        assert compression is not None
        if self.local is not None:
            return self.local.client(rank, attempt, timeouts=QUICK)
        assert self.process is not None
        return connect(
            self.process.endpoint, self.transport, rank=rank, attempt=attempt, layout=LAYOUT,
            timeouts=QUICK, compression=compression,
        )  # fmt: skip

    def driver(self) -> DriverClient:
        if self.local is not None:
            return self.local.driver()
        assert self.process is not None
        return open_driver(self.process.endpoint, limits_of(LAYOUT), mode=self.transport)

    def close(self) -> None:
        for end in (self.process and self.process.stop, self.local and self.local.close):
            if end is not None:
                end()


def kept_back(client: Client) -> Any:
    """The values that a client's codec has yet to send; None where nothing is kept."""
    return None if client._coder is None else client._coder._compressor.residual


@contextmanager
def world(
    transport: str, codec: Any, rule: Rule | None = None, workers: int = 1
) -> Iterator[World]:
    made = World(transport, make_codec(codec), rule or Downpour(), workers)
    try:
        yield made
    finally:
        made.close()


def exchange(client: Client, update: np.ndarray) -> np.ndarray:
    client.buffer[...] = update
    return np.array(client.push_pull(STEP))


@pytest.mark.parametrize("transport", ["http", "socket", "shm", "inproc"])
@pytest.mark.parametrize("codec", ["fp16", "onebit", "topk"])
def test_what_is_sent_and_what_is_left_are_all_updates(transport: str, codec: str) -> None:
    """Σ applied + residual = Σ updates; the worker's center is the server's, up to the codec."""
    rng = np.random.default_rng(0)
    total = np.zeros(LAYOUT.size, np.float64)
    with world(transport, codec) as w, w.client() as client:
        client.join()
        client.pull()
        before = client.session.bytes_sent, client.session.bytes_received
        for _ in range(20):
            update = rng.standard_normal(LAYOUT.size).astype(np.float32)
            total += update
            held = exchange(client, update)
        with w.driver() as driver:
            center = pull_center(driver)
        residual = np.zeros(LAYOUT.size, np.float32)
        if kept_back(client) is not None:
            residual[TRAINED] = kept_back(client)
        tolerance = 2e-2 if codec == "fp16" else 1e-4
        np.testing.assert_allclose(center + residual, total, atol=tolerance)
        np.testing.assert_array_equal(held[300 * 100 :], center[300 * 100 :])  # never encoded
        whole = 20 * LAYOUT.size_bytes
        sent = (client.session.bytes_sent - before[0]) / whole
        received = (client.session.bytes_received - before[1]) / whole
        if transport == "shm":
            assert kept_back(client) is None  # nothing crosses a network: sent as it is
            np.testing.assert_array_equal(held, center)
            assert min(sent, received) > 1
        else:
            most = {"fp16": 0.52, "onebit": 0.05, "topk": 0.03}[codec]
            assert max(sent, received) < most
            if codec == "topk":  # the reply holds every coordinate that changed
                np.testing.assert_allclose(held, center, atol=1e-5)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("rule", [Downpour(), Hogwild(), SSP(0)], ids=lambda r: r.name)
def test_what_a_worker_holds_follows_the_center(codec: str, rule: Rule) -> None:
    """Without news of its own a worker's view converges to the center that others changed."""
    rng = np.random.default_rng(1)
    with world("inproc", codec, rule) as w, w.client() as client:
        client.join()
        client.pull()
        exchange(client, rng.standard_normal(LAYOUT.size).astype(np.float32))
        with w.driver() as driver:
            center = pull_center(driver)
            first = np.abs(np.array(client.pull()) - center).max()
            for _ in range(250):
                held = np.array(client.pull())
        assert np.abs(held - center).max() <= max(0.6 * first, 1e-6)


@pytest.mark.parametrize("transport", ["http", "socket", "inproc"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("codec", ["topk", "int8"])
def test_a_resent_commit_and_its_reply_count_once(transport: str, when: str, codec: str) -> None:
    """The connection breaks before the commit arrives, or before its reply does."""
    rng = np.random.default_rng(2)
    total = np.zeros(LAYOUT.size, np.float64)
    with world(transport, codec) as w, w.client() as client:
        client.join()
        client.pull()
        for round_ in range(6):
            update = rng.standard_normal(LAYOUT.size).astype(np.float32)
            total += update
            if round_ in (2, 3, 5):
                break_once(client, when)
            held = exchange(client, update)
        with w.driver() as driver:
            center, status = pull_center(driver), driver.status()
        assert status.commits == 6
        np.testing.assert_allclose(center[TRAINED] + kept_back(client), total[TRAINED], atol=1e-4)
        # What the worker holds is within one step of the codec, not an update apart.
        assert np.abs(held - center).max() < (1e-5 if codec == "topk" else 0.2)


def break_once(client: Client, when: str) -> None:
    """The next commit's connection breaks once."""
    channel = client.session._connection.channel
    assert channel is not None
    request = channel.request

    def broken(message: Message, timeout_s: float | None) -> Message:
        if message.kind is not StoreKind.PUSH_PULL:
            return request(message, timeout_s)
        channel.request = request  # type: ignore[method-assign]
        if when == "after":
            request(message, timeout_s)
        client.buffer[...] = -7  # a reply cut off in the middle leaves anything here
        raise ConnectionResetError("cut")

    channel.request = broken  # type: ignore[method-assign]


@pytest.mark.parametrize("transport", ["http", "shm"])
@pytest.mark.parametrize("codec", ["fp16", "onebit", "topk", DGC(ratio=0.01)], ids=str)
def test_ranks_of_a_round_get_the_same_mean(transport: str, codec: Any) -> None:
    """Bit for bit, whatever the codec loses; a rank without rows changes nothing."""
    rng = np.random.default_rng(3)
    with world(transport, codec, BSP(), workers=2) as w:
        clients = [w.client(rank) for rank in range(2)]
        joined = [in_thread(c.join) for c in clients]
        for thread, _ in joined:
            thread.join(10)
        for step in range(3):
            gradients = [rng.standard_normal(LAYOUT.size).astype(np.float32) for _ in clients]
            rows = (1, 0) if step == 1 else (1, 3)

            def commit(client: Client, values: np.ndarray, count: int) -> np.ndarray:
                client.buffer[...] = values
                progress = STEP.__class__(0, 1, 1, count)
                return np.array(client.push_pull(progress))

            work = [
                in_thread(lambda c=c, g=g, n=n: commit(c, g, n))
                for c, g, n in zip(clients, gradients, rows, strict=True)
            ]
            for thread, _ in work:
                thread.join(10)
            (first,), (second,) = (out for _, out in work)
            np.testing.assert_array_equal(first, second)
            assert clients[0].round_rows == sum(rows)
            if codec == "fp16":
                mean = np.average(gradients, axis=0, weights=rows)
                np.testing.assert_allclose(first, mean, atol=5e-3)
        for client in clients:
            client.close()


def test_dgc_shapes_training_on_shared_memory_too() -> None:
    """Its momentum is part of the optimizer, so it does not depend on how a worker is connected."""
    with world("shm", DGC(ratio=0.25, momentum=0.5)) as w, w.client() as client:
        client.join()
        client.pull()
        exchange(client, np.ones(LAYOUT.size, np.float32))
        exchange(client, np.ones(LAYOUT.size, np.float32))
        with w.driver() as driver:
            center = pull_center(driver)[TRAINED]
        # The second quarter was held back once: 1 + (0.5 · 1 + 1).
        assert sorted(set(center.tolist())) == [0.0, 1.0, 2.5]
        assert kept_back(client) is not None


def test_a_new_attempt_holds_nothing_and_gets_the_whole_center() -> None:
    with world("socket", "topk") as w:
        client = w.client()
        client.join()
        client.pull()
        exchange(client, np.ones(LAYOUT.size, np.float32))
        client.close()
        with w.client(attempt=1) as again, w.driver() as driver:
            again.join()
            np.testing.assert_array_equal(again.pull(), pull_center(driver))
            exchange(again, np.ones(LAYOUT.size, np.float32))
            np.testing.assert_allclose(again.buffer, pull_center(driver))


# ---------------------------------------------------------------------- hostile and wrong


def test_encoded_bodies_are_bounded_before_they_are_read() -> None:
    compression = Compression(TopK(0.01), LAYOUT, 2)
    limits = limits_of(LAYOUT, compression)
    limits.check(encoded(StoreKind.PUSH), 0, compression.max_bytes)
    for size, message, bounds in (
        (compression.max_bytes + 1, encoded(StoreKind.PUSH), limits),
        (8, encoded(StoreKind.PUSH), limits_of(LAYOUT)),  # no compression in this run
        (8, Message(StoreKind.PUSH), limits),
        (8, Message(StoreKind.SNAPSHOT), limits),
    ):
        with pytest.raises(ProtocolError, match="does not fit"):
            bounds.check(message, 0, size)


def encoded(kind: Kind) -> Message:
    return Message(kind, Flag.ENCODED)


def test_only_commits_come_encoded() -> None:
    with world("inproc", "topk", BSP()) as w, w.client() as client:
        client.join()
        with pytest.raises(ProtocolError, match="whole flat buffer"):
            client.session.request(encoded(StoreKind.SNAPSHOT), np.zeros(8, np.uint8))


@pytest.mark.parametrize("transport", ["http", "socket", "inproc"])
def test_a_payload_that_no_encoder_makes_is_refused(transport: str) -> None:
    with world(transport, "topk") as w, w.client() as client:
        client.join()
        for payload in (
            np.full(56, 255, np.uint8),  # indices far out of bounds
            np.zeros(43, np.uint8),  # no whole number of entries
            np.zeros(3, np.uint8),  # shorter than the averaged section
        ):
            message = encoded(StoreKind.PUSH)
            message.sequence = message.rows = message.batches = 1
            message.rank, message.attempt = 0, 0
            with pytest.raises(ProtocolError, match="malformed"):
                client.session._connection.request(message, payload)
        exchange(client, np.ones(LAYOUT.size, np.float32))  # the run goes on
        with w.driver() as driver:
            assert driver.status().commits == 1


def test_a_codec_that_saves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than no compression"):
        ServerConfig(LAYOUT, Downpour(), 1, codec=TopK(ratio=0.9))
    assert ServerConfig(LAYOUT, Downpour(), 1, codec=make_codec(None)).compression() is None
