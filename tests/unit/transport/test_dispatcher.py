"""Which thread sends a reply, and that none of them waits for somebody else's peer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from sparkdl.errors import ProtocolError
from sparkdl.ps.kinds import StoreKind
from sparkdl.transport.frames import ByteArray, FrameLimits, Kind, Message
from sparkdl.transport.service import Dispatcher, Metric, Replies

REQUEST = Message(StoreKind.PUSH_PULL)


class Pairs:
    """A service that answers two requests at a time: the first one waits for the second."""

    limits = FrameLimits()
    idle_s = 60.0
    beside = parting = frozenset()

    def __init__(self, make_reply: Callable[[], Message]) -> None:
        self.bytes_in = self.bytes_out = 0
        self.make_reply = make_reply
        self.waiting: list[int] = []
        self.gone: list[int] = []

    def receive(self, connection: int, message: Message, now: float) -> Replies:
        self.waiting.append(connection)
        if len(self.waiting) < 2:
            return []
        both, self.waiting = self.waiting, []
        return [(c, self.make_reply()) for c in both]

    def disconnect(self, connection: int, now: float) -> Replies:
        self.gone.append(connection)
        return []

    def tick(self, now: float) -> Replies:
        return []

    def buffer(self, connection: int) -> ByteArray:
        return np.empty(0, np.uint8)

    def attach(self, connection: int, buffer: ByteArray) -> None: ...

    def metrics(self) -> list[Metric]:
        return []


class Peer:
    """One end of a connection: what was sent to it, and by which thread."""

    def __init__(self, *, stopped: bool = False) -> None:
        self.reads = threading.Event()
        self.replies: list[tuple[Message, str]] = []
        self.came = threading.Event()
        if not stopped:
            self.reads.set()

    def send(self, reply: Message) -> None:
        assert self.reads.wait(20)
        self.replies.append((reply, threading.current_thread().name))
        self.came.set()


def weights() -> Message:
    return Message(StoreKind.WEIGHTS)


def error() -> Message:
    return Message(Kind.ERROR, meta={"message": "x"})


def test_the_thread_that_makes_a_reply_due_sends_it() -> None:
    dispatcher = Dispatcher(Pairs(weights))
    early, late = Peer(), Peer()
    first, second = dispatcher.open(early.send), dispatcher.open(late.send)
    dispatcher.post(first, REQUEST)
    assert not early.replies
    dispatcher.post(second, REQUEST)
    mine = threading.current_thread().name
    assert [peer.replies[0][1] for peer in (early, late)] == [mine, mine]
    assert dispatcher.service.bytes_in > 0
    dispatcher.shutdown()


def test_it_waits_for_no_stopped_peer_of_another() -> None:
    """A reply with meta may be longer than what a peer's socket takes at once."""
    dispatcher = Dispatcher(Pairs(error))
    stopped, other = Peer(stopped=True), Peer()
    first, second = dispatcher.open(stopped.send), dispatcher.open(other.send)
    dispatcher.post(first, REQUEST)
    dispatcher.post(second, REQUEST)  # would wait until the peer goes on
    assert len(other.replies) == 1
    stopped.reads.set()
    assert stopped.came.wait(20)
    assert stopped.replies[0][1] != threading.current_thread().name
    dispatcher.shutdown()


def test_where_no_thread_can_be_started_it_sends_all_replies_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    dispatcher = Dispatcher(Pairs(error))
    peers = Peer(), Peer()
    first, second = (dispatcher.open(peer.send) for peer in peers)
    dispatcher.post(first, REQUEST)
    monkeypatch.setattr(threading.Thread, "start", start)
    dispatcher.post(second, REQUEST)
    assert [len(peer.replies) for peer in peers] == [1, 1]
    dispatcher.shutdown()


def test_a_request_before_the_reply_is_refused() -> None:
    dispatcher = Dispatcher(Pairs(weights))
    peer = Peer()
    number = dispatcher.open(peer.send)
    dispatcher.post(number, REQUEST)
    with pytest.raises(ProtocolError, match=r"PUSH_PULL frame came too early"):
        dispatcher.post(number, REQUEST)
    other = dispatcher.open(Peer().send)
    dispatcher.post(other, REQUEST)
    assert len(peer.replies) == 1
    dispatcher.post(number, REQUEST)  # now it may
    dispatcher.shutdown()


def test_nobody_sends_over_a_connection_that_is_closed() -> None:
    dispatcher = Dispatcher(Pairs(error))
    stopped, other = Peer(stopped=True), Peer()
    first, second = dispatcher.open(stopped.send), dispatcher.open(other.send)
    dispatcher.post(first, REQUEST)
    dispatcher.post(second, REQUEST)
    closing = threading.Thread(target=dispatcher.close, args=(first,), daemon=True)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()  # a reply is on its way
    stopped.reads.set()
    closing.join(20)
    assert not closing.is_alive()
    assert dispatcher.service.gone == [first]  # type: ignore[attr-defined]
    late = Peer()
    third = dispatcher.open(late.send)
    dispatcher.post(third, REQUEST)
    dispatcher.close(third)
    dispatcher.post(second, REQUEST)
    assert not late.replies
    dispatcher.shutdown()


def test_a_broken_connection_stops_nobody_elses_reply() -> None:
    class Gone(Peer):
        def send(self, reply: Message) -> None:
            raise BrokenPipeError

    dispatcher = Dispatcher(Pairs(weights))
    other = Peer()
    first, second = dispatcher.open(Gone().send), dispatcher.open(other.send)
    dispatcher.post(first, REQUEST)
    dispatcher.post(second, REQUEST)
    assert len(other.replies) == 1
    dispatcher.shutdown()
