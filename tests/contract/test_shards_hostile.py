"""Hostile and broken frames to a server that holds a range of the weights, and rows of a table."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_transports_hostile import gets_nothing, header, opened, tcp

from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.errors import ProtocolError, SparkDLError, TransportError
from sparkdl.ps.kinds import DECISION, StoreKind, limits_of
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.ps.server.config import TablesOfRun, shards_of
from sparkdl.rules import make_rule
from sparkdl.tables.service import TableSpec
from sparkdl.tables.store import RowStore
from sparkdl.transport.connection import Connection, Timeouts
from sparkdl.transport.frames import Flag, Kind, Message, encode
from sparkdl.transport.openers import openers_of
from sparkdl.weights import FloatArray, Layout

LAYOUT = Layout.of([("w", (50_000,), "float32")])
CENTER = np.arange(LAYOUT.size, dtype=np.float32)
SPEC = TableSpec("ads", RowStore(2, "sgd", "zeros", name="ads").settings)


def shard(rule: str, **options: Any) -> ServerProcess:
    config = ServerConfig(LAYOUT, make_rule(rule, **options), 2)
    own = shards_of(config, 2, TablesOfRun((SPEC,), "/tables"))[1]
    return ServerProcess(own, CENTER[own.place])


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with shard("downpour") as process:
        yield process


@pytest.fixture(scope="module")
def rounds() -> Iterator[ServerProcess]:
    with shard("bsp", payload="delta") as process:
        yield process


def connected(server: ServerProcess) -> Connection:
    limits = limits_of(server.config.layout)
    opener = openers_of(server.endpoint, "socket", limits, Timeouts())
    return Connection(opener, limits, Timeouts(), buffered=True, name="a test")


def center(server: ServerProcess, **meta: Any) -> FloatArray:
    connection = connected(server)
    try:
        connection.request(Message(StoreKind.PULL, meta=meta))
        return connection.raw[: server.config.layout.size_bytes].view(np.float32).copy()
    finally:
        connection.close()


@pytest.fixture(autouse=True)
def still_serves(server: ServerProcess, rounds: ServerProcess) -> Iterator[None]:
    yield
    for process in (server, rounds):
        np.testing.assert_array_equal(center(process), CENTER[process.config.place])


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(100),
        random.Random(0).randbytes(4096),
        encode(Message(Kind.OPEN, meta={"token": "wrong"})),
        encode(Message(StoreKind.PULL)),
        header(StoreKind.ROWS_PUSH, body_size=1 << 20),
    ],
)
def test_a_stranger_gets_nothing_but_a_close(server: ServerProcess, first: bytes) -> None:
    stream = tcp(server)
    stream.sendall(first)
    assert gets_nothing(stream)


@pytest.mark.parametrize(
    "frame",
    [
        header(StoreKind.PUSH, body_size=2**40),
        header(StoreKind.STAGE, body_size=4 * LAYOUT.size),  # that of all shards together
        header(StoreKind.STAGE, Flag.ENCODED, body_size=4),
        header(StoreKind.ROWS_PUSH, total=2**63, body_size=2**63),
        header(StoreKind.ROWS_PULL, body_size=2**30),
        header(StoreKind.RESULT, body_size=8),
        header(CoordinatorKind.HELLO),
        header(StoreKind.RESULT, meta_size=5) + b"{{{{{",
    ],
)
def test_a_malformed_frame_is_answered_and_closed(server: ServerProcess, frame: bytes) -> None:
    stream = opened(server)
    stream.sendall(frame)
    head = stream.recv(96, socket.MSG_WAITALL)
    assert head[5] == Kind.ERROR
    while stream.recv(4096):
        pass
    stream.close()


@pytest.mark.parametrize(
    ("kind", "meta"),
    [
        (StoreKind.RESULT, {DECISION: "x"}),
        (StoreKind.RESULT, {DECISION: [2**70, [0, 0], []]}),
        (StoreKind.RESULT, {DECISION: [5, [0, 0], []]}),  # not the next round
        (StoreKind.RESULT, {DECISION: [1, [0, 0], [[0, 0, 1]]]}),  # nobody has sent that
        (StoreKind.PULL, {DECISION: [1, [0, 0], [[7, 0, 1]]]}),
        (StoreKind.SNAPSHOT, {}),
        (StoreKind.ROWS_PULL, {"table": "others"}),
        (StoreKind.ROWS_PUSH, {"parts": [["ads", 10**9, True]]}),
        (StoreKind.ROWS_PUSH, {"parts": [["ads", 10**9, True, True, 0]]}),
        (StoreKind.ROWS_PUSH, {"parts": [["ads", 0, False, False, "now"]], "changes": True}),
        (StoreKind.ROWS_STAGE, {"parts": [["ads", 10**9, True, False, 0]], "piece": [0, 1]}),
        (StoreKind.ROWS_STAGE, {"parts": [], "piece": "all"}),
        (StoreKind.ROWS_STAGE, {"parts": [], "piece": [1, 1]}),
        (StoreKind.ROWS_STAGE, {"parts": [], "piece": [0, 2**40]}),
        (StoreKind.ROWS_STAGE, {"parts": [], "piece": [0, 1], "decision": [9, [0, 0], []]}),
        (StoreKind.ROWS_SAVE, {"reference": "[1]", "clocks": {"ads": 0}}),
        (StoreKind.ROWS_SAVE, {}),
        (
            StoreKind.ROWS_SAVE,
            {
                "reference": '{"folder": "/etc/x", "step": 1, "tables": ["ads"], "older": []}',
                "clocks": {"ads": 0},
            },
        ),
        (StoreKind.PUSH_PULL, {}),
    ],
)
def test_a_request_that_makes_no_sense_is_an_error_and_changes_nothing(
    rounds: ServerProcess, kind: StoreKind, meta: dict[str, Any]
) -> None:
    connection = connected(rounds)
    with pytest.raises((ProtocolError, SparkDLError)):
        connection.request(Message(kind, rank=0, sequence=1, meta=meta))
    connection.request(Message(StoreKind.TELL))  # over the same connection
    connection.close()


def test_half_a_part_changes_nothing(server: ServerProcess) -> None:
    size = server.config.layout.size_bytes
    message = Message(StoreKind.PUSH, rank=1, sequence=1, body=np.ones(size, "u1"))
    stream = opened(server)
    stream.sendall(encode(message) + bytes(size // 2))
    stream.close()


def test_changes_that_are_none_are_refused(server: ServerProcess) -> None:
    connection = connected(server)
    for total, body in ((2**40, bytes(8)), (8, b"SDVCxxxx"), (0, b"")):
        with pytest.raises(SparkDLError):
            connection.request(Message(StoreKind.WRITE, total=total), np.frombuffer(body, np.uint8))
    connection.close()
    assert issubclass(TransportError, SparkDLError)
