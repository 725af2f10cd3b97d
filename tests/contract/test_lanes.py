"""Several requests in flight over one connection: order, places, broken and hostile peers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from sparkdl.coordinator.kinds import CoordinatorKind
from sparkdl.coordinator.machine import Coordinator
from sparkdl.coordinator.settings import Settings
from sparkdl.coordinator.status import Status
from sparkdl.errors import AuthenticationError, ProtocolError, TransportError
from sparkdl.ps.kinds import StoreKind, limits_of
from sparkdl.ps.store import make_store
from sparkdl.rules import Downpour
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import Timeouts
from sparkdl.transport.frames import (
    ByteArray,
    Flag,
    FrameKind,
    FrameLimits,
    Kind,
    Message,
    kinds_of,
)
from sparkdl.transport.framing import receive_frame, send_frame
from sparkdl.transport.lanes import LANES, Lanes
from sparkdl.transport.listeners import Listeners, ListenOptions
from sparkdl.transport.server import Server
from sparkdl.transport.service import Metric, Replies, Service
from sparkdl.transport.socket import connect_stream
from sparkdl.weights import Layout
from sparkdl.wire.listening import shut_down
from sparkdl.wire.tls import Certificate

TOKEN = "a token"
LIMITS = FrameLimits(dense_bytes=1 << 20, kinds=kinds_of(StoreKind))


class Desk:
    """Keeps each PUSH until a PULL names its number; the reply to a PUSH is its own body."""

    limits = LIMITS
    idle_s = 60.0
    beside: frozenset[FrameKind] = frozenset()
    parting: frozenset[FrameKind] = frozenset()

    def __init__(self) -> None:
        self.bytes_in = self.bytes_out = 0
        self.kept: dict[int, tuple[int, ByteArray]] = {}
        self.order: list[int] = []
        self.came = threading.Condition()
        self._buffers: dict[int, ByteArray] = {}

    def receive(self, connection: int, message: Message, now: float) -> Replies:
        with self.came:
            self.order.append(message.sequence)
            self.came.notify_all()
            if message.kind is StoreKind.PUSH:
                assert message.body is not None
                self.kept[message.sequence] = connection, message.body
                return []
            replies = [(connection, Message(Kind.OK, sequence=message.sequence))]
            if message.sequence in self.kept:
                other, body = self.kept.pop(message.sequence)
                reply = Message(StoreKind.WEIGHTS, sequence=message.sequence, body=body)
                replies.insert(0, (other, reply))
            return replies

    def wait_for(self, count: int) -> None:
        with self.came:
            assert self.came.wait_for(lambda: len(self.order) >= count, 20)

    def disconnect(self, connection: int, now: float) -> Replies:
        return []

    def tick(self, now: float) -> Replies:
        return []

    def buffer(self, connection: int) -> ByteArray:
        return self._buffers.setdefault(connection, self.limits.allocate())

    def attach(self, connection: int, buffer: ByteArray) -> None: ...

    def metrics(self) -> list[Metric]:
        return []


@contextlib.contextmanager
def serving(service: Service, certificate: Certificate | None = None) -> Iterator[Endpoint]:
    listeners = Listeners.bind(ListenOptions("socket", web=False), None)
    server = Server(service, TOKEN, listeners, 1, certificate).start()
    try:
        fingerprint = certificate.fingerprint if certificate else ""
        yield Endpoint(server.address, TOKEN, fingerprint)
    finally:
        server.close()


def push(lanes: Lanes, number: int, priority: int = 0, into: ByteArray | None = None):  # type: ignore[no-untyped-def]
    body = np.full(LIMITS.dense_bytes, number, np.uint8)
    return lanes.send(Message(StoreKind.PUSH, sequence=number, priority=priority), body, into=into)


def release(lanes: Lanes, number: int):  # type: ignore[no-untyped-def]
    return lanes.send(Message(StoreKind.PULL, sequence=number))


@pytest.fixture(params=["plain", "encrypted"])
def certificate(request: pytest.FixtureRequest) -> Certificate | None:
    return Certificate.make() if request.param == "encrypted" else None


def test_replies_come_in_the_order_in_which_the_service_is_done(
    certificate: Certificate | None,
) -> None:
    desk = Desk()
    with serving(desk, certificate) as endpoint, Lanes(endpoint, LIMITS, name="w") as lanes:
        place = np.zeros(LIMITS.dense_bytes, np.uint8)
        first, second, third = push(lanes, 1), push(lanes, 2, into=place), push(lanes, 3)
        for number, future in ((3, third), (2, second)):
            assert release(lanes, number).result(20).kind is Kind.OK
            reply = future.result(20)
            assert reply.sequence == number
            assert reply.body is not None
            assert reply.body.tobytes() == bytes([number]) * LIMITS.dense_bytes
        assert np.all(place == 2)  # received into its place
        assert not first.done()
    assert isinstance(first.exception(20), TransportError)  # it was closed without a reply


def test_the_most_urgent_of_those_that_wait_leaves_first() -> None:
    desk = Desk()
    with serving(desk) as endpoint, Lanes(endpoint, LIMITS, name="w") as lanes:
        flying = [push(lanes, number) for number in range(1, LANES + 1)]
        desk.wait_for(LANES)
        waiting = {n: push(lanes, n, priority=p) for n, p in ((50, 0), (51, -5), (52, 7), (53, 7))}
        with Lanes(endpoint, LIMITS, name="x") as other:
            for number in (1, 2, 3, 4):  # their lanes become free, one after the other
                release(other, number).result(20)
                assert flying[number - 1].result(20).sequence == number
                desk.wait_for(LANES + 2 * number)
        told = [number for number in desk.order if number >= 50]
        assert told == [52, 53, 50, 51]
        assert not any(future.done() for future in waiting.values())


def test_a_broken_connection_is_opened_again_and_what_has_no_reply_sent_again(
    certificate: Certificate | None,
) -> None:
    desk = Desk()
    with serving(desk, certificate) as endpoint, Lanes(endpoint, LIMITS, name="w") as lanes:
        futures = [push(lanes, 1), push(lanes, 2)]
        desk.wait_for(2)
        shut_down(lanes._connection)
        desk.wait_for(4)
        assert sorted(desk.order) == [1, 1, 2, 2]
        for number in (1, 2):
            release(lanes, number).result(20)
        assert [future.result(20).sequence for future in futures] == [1, 2]


def test_a_server_that_is_gone_ends_all_requests(certificate: Certificate | None) -> None:
    desk = Desk()
    timeouts = Timeouts(connect_s=1.0, reconnect_s=0.2)
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(serving(desk, certificate))
        lanes = Lanes(endpoint, LIMITS, timeouts, name="worker 3")
        future = push(lanes, 1)
        desk.wait_for(1)
        stack.close()
        with pytest.raises(TransportError, match="worker 3 lost the parameter server"):
            future.result(20)
        with pytest.raises(TransportError, match="lost"):
            push(lanes, 2)
        lanes.close()


def test_a_reply_without_room_for_it_ends_the_connection() -> None:
    desk = Desk()
    with serving(desk) as endpoint, Lanes(endpoint, LIMITS, name="w") as lanes:
        small = push(lanes, 1, into=np.zeros(10, np.uint8))
        release(lanes, 1)
        with pytest.raises(ProtocolError, match="no room for the reply to PUSH"):
            small.result(20)


def test_a_request_that_cannot_be_encoded_ends_itself_only() -> None:
    desk = Desk()
    with serving(desk) as endpoint, Lanes(endpoint, LIMITS, name="w") as lanes:
        wrong = lanes.send(Message(StoreKind.PULL, meta={"x": object()}))
        with pytest.raises(ProtocolError, match="cannot be sent"):
            wrong.result(20)
        assert release(lanes, 9).result(20).kind is Kind.OK


def test_a_wrong_token_is_refused() -> None:
    with serving(Desk()) as endpoint, pytest.raises(AuthenticationError):
        Lanes(Endpoint(endpoint.address, "another"), LIMITS, name="w")


@pytest.mark.parametrize("lane", [0, LANES, 255])
def test_a_lane_that_is_not_free_is_refused_and_its_buffer_stays(lane: int) -> None:
    desk = Desk()
    with serving(desk) as endpoint, Lanes(endpoint, LIMITS, name="w") as lanes:
        stream = connect_stream(endpoint, LIMITS, 20.0, lanes=True)
        body = np.ones(LIMITS.dense_bytes, np.uint8)
        send_frame(stream, Message(StoreKind.PUSH, sequence=1, body=body), LIMITS)
        desk.wait_for(1)
        hostile = Message(StoreKind.PUSH, sequence=2, lane=lane, body=body * 2)
        with contextlib.suppress(OSError):  # the server may close before all was written
            send_frame(stream, hostile, LIMITS)
        with contextlib.suppress(OSError, EOFError):
            reply = receive_frame(stream, LIMITS, lambda _, size: np.empty(size, np.uint8))
            assert reply.kind is Kind.ERROR
            assert "not free" in reply.meta["what"]
            assert stream.recv(1) == b""
        stream.close()
        assert np.all(desk.kept[1][1] == 1)
        assert desk.order == [1]
        assert release(lanes, 9).result(20).kind is Kind.OK  # of another peer


def test_a_driver_asks_a_parameter_server_for_several_things_at_once() -> None:
    layout = Layout.of([("w", (50_000,), "float32")])
    center = np.arange(50_000, dtype=np.float32)
    service = Coordinator(Settings(1), make_store(layout, center, Downpour()))
    limits = limits_of(layout)
    with serving(service) as endpoint, Lanes(endpoint, limits, name="the driver") as lanes:
        places = [np.zeros(layout.size_bytes, np.uint8) for _ in range(LANES + 4)]
        pulls = [lanes.send(Message(StoreKind.PULL), into=place) for place in places]
        status = lanes.send(Message(CoordinatorKind.STATUS, priority=1))
        for future, place in zip(pulls, places, strict=True):
            assert not future.result(20).flags & Flag.ENCODED
            np.testing.assert_array_equal(place.view(np.float32), center)
        assert Status.from_wire(status.result(20).meta, np.empty(0, np.uint8)).clock == 0


def test_a_peer_that_reads_nothing_holds_nobody_up(certificate: Certificate | None) -> None:
    """Its replies wait for it alone; the server ends in time."""
    desk = Desk()
    with (
        contextlib.ExitStack() as stack,
        serving(desk, certificate) as endpoint,
        Lanes(endpoint, LIMITS, name="w") as lanes,
    ):
        stream = connect_stream(endpoint, LIMITS, 20.0, lanes=True)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = np.ones(LIMITS.dense_bytes, np.uint8)
        for number in range(1, 9):
            message = Message(StoreKind.PUSH, sequence=number, lane=number, body=body)
            send_frame(stream, message, LIMITS)
        desk.wait_for(8)
        for number in range(1, 9):
            assert release(lanes, number).result(20).kind is Kind.OK
        # over a lane whose reply is stuck: its thread waits, and ends with the server
        send_frame(stream, Message(StoreKind.PULL, sequence=9, lane=8), LIMITS)
        assert release(lanes, 10).result(20).kind is Kind.OK
        stack.callback(stream.close)
