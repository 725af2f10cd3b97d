"""Connections before they have shown the run's token: strangers cost no thread, and little memory.

One thread accepts connections, reads what they send first, and hands over those that show the
token. A stranger has :data:`FIRST_WORDS_S` seconds in all. Where there are :data:`MAX_STRANGERS`
of them, a newcomer ends the oldest, so they take no place from the ranks of the run, which send at
once. Whoever is ended so is told that the server is busy: a rank that was held up tries again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from sparkdl.errors import SparkDLError, TransportError

FIRST_WORDS_S = 5.0
MAX_STRANGERS = 256
_ACCEPTED_AT_ONCE = 64
_LOOK_S = 0.2
_LOOK_AGAIN_S = 0.1
_NO_DESCRIPTORS_S = 0.02


class BusyError(TransportError):
    """The server has no room for a connection now; another try may find some."""


def no_room() -> BusyError:
    """The answer of a server that is busy."""
    return BusyError(
        "the server has no room for one more connection now",
        expected="room within the time that a connection may take",
        received="a server that is busy with other connections",
        hint="places of attempts that have ended become free after a while",
    )


class Stranger(Protocol):
    """A connection that has not shown the token; its socket does not block."""

    @property
    def connection(self) -> socket.socket:
        """Owned by the greeter until it is handed over."""

    def hear(self) -> bool:
        """Reads what has come; whether the connection may be handed over.

        Raises:
            OSError, EOFError, SparkDLError: It is no connection of this run, and is closed.
        """

    def turn_away(self) -> None:
        """Says that the server has no room, so that a member tries again; it is closed then.

        Raises:
            OSError: The peer does not listen.
        """


def hear_bytes(connection: socket.socket, heard: bytearray, wanted: int) -> bool:
    """Adds what has come to ``heard``, without waiting; whether it has ``wanted`` bytes then.

    Nothing beyond them is read: it is left for who takes the connection over.

    Raises:
        OSError, EOFError: The peer is gone.
    """
    with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
        while len(heard) < wanted:
            piece = connection.recv(wanted - len(heard))
            if not piece:
                raise EOFError("the peer closed the connection")
            heard += piece
    return len(heard) >= wanted


def hear_out(stranger: Stranger, until: float) -> None:
    """Waits for a stranger's first words, where a thread waits for it alone.

    Args:
        stranger: Its connection blocks afterwards.
        until: When to turn the stranger away, on the monotonic clock.

    Raises:
        OSError, EOFError, SparkDLError: It is no connection of this run, or has taken too long.
    """
    connection = stranger.connection
    connection.setblocking(False)
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while not stranger.hear():
        left_s = until - time.monotonic()
        if left_s <= 0 or not poller.poll(1000 * left_s):
            stranger.turn_away()
            raise TimeoutError("no first words in time")
    connection.setblocking(True)


S = TypeVar("S", bound=Stranger)


class Greeter(Generic[S]):
    """Greets the connections of one listening socket until closed.

    Args:
        listener: Listening stream socket; owned from now on.
        welcome: Takes a stranger that has shown the token, with a connection that blocks. Where it
            raises, because no thread can be started, say, the stranger is turned away.
        peeks: Whether strangers, or which ones at the moment, leave what they hear in the socket,
            which then stays readable.
    """

    def __init__(
        self,
        listener: socket.socket,
        introduce: Callable[[socket.socket], S],
        welcome: Callable[[S], None],
        *,
        peeks: bool | Callable[[S], bool] = False,
        name: str,
    ) -> None:
        self._listener, self._introduce, self._welcome = listener, introduce, welcome
        self._peeks = peeks if callable(peeks) else lambda _: peeks
        self._strangers: dict[S, float] = {}  # to their deadlines, the oldest first
        self._partial: list[S] = []
        self._look_again = 0.0
        self._closed = threading.Event()
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops accepting, and closes the connections of all strangers."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._listener.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(_LOOK_AGAIN_S if self._partial else _LOOK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._strangers:
                    self._hear(key.data)
            now = time.monotonic()
            if self._partial and now >= self._look_again:
                self._look_again = now + _LOOK_AGAIN_S
                partial, self._partial = self._partial, []
                for stranger in partial:
                    if stranger in self._strangers:
                        self._hear(stranger)
            while self._strangers and next(iter(self._strangers.values())) <= now:
                self._end_oldest()
        for stranger in list(self._strangers):
            self._end(stranger)
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._end_oldest()
                    self._closed.wait(_NO_DESCRIPTORS_S)
                return
            if len(self._strangers) >= MAX_STRANGERS:
                self._end_oldest()
            connection.setblocking(False)
            stranger = self._introduce(connection)
            self._strangers[stranger] = time.monotonic() + FIRST_WORDS_S
            self._selector.register(connection, selectors.EVENT_READ, stranger)

    def _hear(self, stranger: S) -> None:
        connection = stranger.connection
        try:
            known = stranger.hear()
        except (OSError, EOFError, SparkDLError):
            self._end(stranger)
            return
        if known:
            self._forget(stranger)
            connection.setblocking(True)
            try:
                self._welcome(stranger)
            except Exception as error:
                logging.getLogger(__name__).warning(
                    "a connection was turned away: %s: %s", type(error).__name__, error
                )
                connection.setblocking(False)
                with contextlib.suppress(OSError):
                    stranger.turn_away()
                connection.close()
        elif self._peeks(stranger):
            # it would be reported as readable without end: look again later
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            self._partial.append(stranger)

    def _end_oldest(self) -> None:
        if self._strangers:
            oldest = next(iter(self._strangers))
            with contextlib.suppress(OSError):
                oldest.turn_away()
            self._end(oldest)

    def _end(self, stranger: S) -> None:
        self._forget(stranger)
        stranger.connection.close()

    def _forget(self, stranger: S) -> None:
        del self._strangers[stranger]
        with contextlib.suppress(KeyError):
            self._selector.unregister(stranger.connection)
