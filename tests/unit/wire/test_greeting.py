"""Strangers: a deadline in all, a share that is not the members', and no byte lost on the way."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sparkdl.errors import ProtocolError
from sparkdl.wire import greeting
from sparkdl.wire.greeting import Greeter, Stranger
from sparkdl.wire.listening import receive_exactly

PASSWORD = b"open, if you please; I am a member"


class Visitor:
    """A stranger that must say PASSWORD; it reads, or only looks, at what it hears."""

    def __init__(self, connection: socket.socket, peeks: bool) -> None:
        self.connection, self._peeks, self._heard = connection, peeks, b""

    def hear(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            if self._peeks:
                self._heard = self.connection.recv(len(PASSWORD), socket.MSG_PEEK)
            else:
                self._heard += self.connection.recv(len(PASSWORD) - len(self._heard))
        if not PASSWORD.startswith(self._heard[: len(PASSWORD)]):
            raise ProtocolError("another word", expected="the password")
        return self._heard.startswith(PASSWORD)

    def turn_away(self) -> None:
        self.connection.send(b"busy")


@contextmanager
def greeter(peeks: bool = False) -> Iterator[tuple[tuple[str, int], list[Stranger]]]:
    welcome: list[Stranger] = []
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    address = listener.getsockname()
    made = Greeter(
        listener, lambda c: Visitor(c, peeks), welcome.append, peeks=peeks, name="sparkdl-test"
    )
    try:
        yield address, welcome
    finally:
        made.close()
        for stranger in welcome:
            stranger.connection.close()


def soon(condition: object, limit_s: float = 20.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.01)
    return bool(condition())  # type: ignore[operator]


def closed(connection: socket.socket, limit_s: float = 20.0) -> bool:
    connection.settimeout(limit_s)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


@pytest.mark.parametrize("peeks", [False, True])
def test_what_comes_after_the_first_words_is_left_for_who_takes_over(peeks: bool) -> None:
    with greeter(peeks) as (address, welcome), socket.create_connection(address) as peer:
        for byte in PASSWORD:
            peer.sendall(bytes([byte]))
            time.sleep(0.01)
        peer.sendall(b"the rest")
        assert soon(lambda: welcome)
        taken = welcome[0].connection
        taken.settimeout(20)
        expected = PASSWORD + b"the rest" if peeks else b"the rest"
        assert receive_exactly(taken, len(expected)) == expected


@pytest.mark.parametrize("peeks", [False, True])
def test_the_deadline_is_one_for_all_bytes(peeks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whoever passes it is told "busy": it may be a member that was held up."""
    monkeypatch.setattr(greeting, "FIRST_WORDS_S", 0.5)
    with greeter(peeks) as (address, welcome), socket.create_connection(address) as peer:
        began, heard = time.monotonic(), b""
        peer.settimeout(0.2)
        for byte in PASSWORD[:-1]:  # each in time for a limit that counts from the last byte
            peer.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                heard = peer.recv(4)
                break
        ended_s = time.monotonic() - began
        assert heard == b"busy"
        assert closed(peer)
        assert 0.45 <= ended_s < 0.2 * len(PASSWORD) - 1  # all bytes take longer
        assert not welcome


def test_the_first_words_have_five_seconds() -> None:
    assert greeting.FIRST_WORDS_S == 5.0


def test_a_wrong_word_ends_the_connection_at_once() -> None:
    with greeter() as (address, welcome), socket.create_connection(address) as peer:
        peer.sendall(b"shut")
        assert closed(peer)
        assert not welcome


@pytest.mark.parametrize("peeks", [False, True])
def test_a_newcomer_ends_the_oldest_stranger(peeks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "MAX_STRANGERS", 8)
    monkeypatch.setattr(greeting, "FIRST_WORDS_S", 600.0)
    with greeter(peeks) as (address, welcome), contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(30)]
        assert idle[0].recv(10) == b"busy"  # so that a member would know to try again
        assert closed(idle[0])
        member = stack.enter_context(socket.create_connection(address))
        member.sendall(PASSWORD)
        assert soon(lambda: welcome)


def test_closing_ends_the_strangers() -> None:
    with contextlib.ExitStack() as stack:
        with greeter() as (address, _):
            peer = stack.enter_context(socket.create_connection(address))
            time.sleep(0.05)
        assert closed(peer)


@pytest.mark.parametrize("peeks", [False, True])
def test_without_descriptors_the_oldest_stranger_makes_room(
    monkeypatch: pytest.MonkeyPatch, peeks: bool
) -> None:
    """The greeter neither gives up nor spins: it ends a stranger, pauses, and accepts again."""
    accepted, calls = socket.socket.accept, []

    def accept(listener: socket.socket) -> tuple[socket.socket, object]:
        calls.append(time.monotonic())
        if 2 <= len(calls) <= 4:
            raise OSError(errno.EMFILE, "Too many open files")
        return accepted(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with greeter(peeks) as (address, welcome), socket.create_connection(address) as oldest:
        oldest.settimeout(20)
        assert oldest.recv(4) == b"busy"
        with socket.create_connection(address) as member:
            member.sendall(PASSWORD)
            assert soon(lambda: welcome)
    assert calls[4] - calls[1] >= 2 * greeting._NO_DESCRIPTORS_S


@pytest.mark.parametrize("peeks", [False, True])
def test_a_member_that_cannot_be_taken_is_turned_away_and_the_next_is_not(
    peeks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As where no thread can be started for it."""
    taken: list[Stranger] = []

    def welcome(stranger: Stranger) -> None:
        if not taken:
            taken.append(stranger)
            raise RuntimeError("can't start new thread")
        taken.append(stranger)

    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    made = Greeter(listener, lambda c: Visitor(c, peeks), welcome, peeks=peeks, name="sparkdl-test")
    try:
        for answer in (b"busy", b""):
            with socket.create_connection(address, 20) as peer:
                peer.sendall(PASSWORD)
                if answer:
                    assert peer.recv(10) == answer
                    assert closed(peer)
                else:
                    assert soon(lambda: len(taken) == 2)
    finally:
        made.close()
        for stranger in taken:
            stranger.connection.close()
    assert "can't start new thread" in caplog.text
