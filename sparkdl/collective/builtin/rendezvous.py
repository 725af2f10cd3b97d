"""How ranks find each other: the sockets that each holds, and one loop that connects them all.

Each rank listens on a TCP socket and, on Linux, on a Unix socket in the abstract name space (which
leaves no file behind). Connecting is one loop over non-blocking sockets, so that another process
which connects and says nothing delays nobody.

A connection begins with the proof of :mod:`sparkdl.wire.proving`, whose hello names the
communicator, the kind of the connection and both ranks. In an encrypted run TLS follows
(:mod:`sparkdl.collective.builtin.paths`).
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparkdl.collective.communicator import name_ranks
from sparkdl.errors import AuthenticationError, WaitTimeoutError
from sparkdl.settings.network import PortSpec
from sparkdl.wire.listening import listen
from sparkdl.wire.proving import IncomingProof, OutgoingProof

RING, LOCAL = 1, 2
"""Kinds of connections: to a neighbour in a ring, and between two ranks of a host."""

Address = tuple[str, int] | str

_MAGIC = b"sparkdl1"
_HELLO = struct.Struct("<8sB16sII")


class ConnectionKey(NamedTuple):
    """Which connection of a communicator this is, seen from one rank: its kind, the other rank."""

    kind: int
    peer: int


class OutgoingHandshake:
    """A connection that this rank makes, on a socket that does not block.

    Args:
        address: Host and port, or the name of a Unix socket.
    """

    def __init__(
        self, key: ConnectionKey, address: Address, group: bytes, rank: int, token: bytes
    ) -> None:
        self.key, self.address = key, address
        if isinstance(address, str):
            self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            target: Any = address
        else:
            family, _, _, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
            self.connection = socket.socket(family, socket.SOCK_STREAM)
        hello = _HELLO.pack(_MAGIC, key.kind, group, rank, key.peer)
        name = f"rank {key.peer} at {address!r}"
        self._proof = OutgoingProof(self.connection, token, hello, name)
        self.connection.setblocking(False)
        self._connected = False
        try:
            self.connection.connect(target)
        except BlockingIOError:
            pass  # the connection is made meanwhile
        except BaseException:
            self.connection.close()
            raise

    def begin(self) -> bool:
        """Sends the hello when the socket is connected; False if it was sent before."""
        if self._connected:
            return False
        code = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._connected = True
        self._proof.begin()
        return True

    def advance(self) -> bool:
        return self._proof.advance()


_UNKNOWN_TIMEOUT_S = 5.0
"""Seconds within which a process that connects must prove that it belongs to the run."""
_MAX_UNKNOWN = 256
"""Connections without a proof, at most: a newcomer ends the oldest. Ranks prove at once."""
_ACCEPTED_AT_ONCE = 64
_RETRY_S = 0.05


class Listener:
    """The sockets that one rank holds from ``prepare`` to ``close``.

    Args:
        port: TCP ports to try; see :func:`sparkdl.settings.network.ports_of`.

    Raises:
        ResourceError: The address or all of the ports are taken.
    """

    def __init__(self, bind_host: str, port: PortSpec = 0) -> None:
        self.refused: list[str] = []
        """Why connections were refused."""
        self._early: dict[tuple[bytes, ConnectionKey], socket.socket] = {}
        self._tcp = listen(bind_host, port)
        self._tcp.setblocking(False)
        self.port = int(self._tcp.getsockname()[1])
        self.local = ""
        self._sockets = [self._tcp]
        if sys.platform == "linux":
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.local = f"sparkdl-{os.getpid()}-{secrets.token_hex(8)}"
            unix.bind("\0" + self.local)
            unix.listen(128)
            unix.setblocking(False)
            self._sockets.append(unix)

    def close(self) -> None:
        """Closes the sockets, and connections that no communicator has asked for."""
        for held in (*self._sockets, *self._early.values()):
            held.close()
        self._early.clear()

    def establish(
        self,
        rank: int,
        token: bytes,
        group: bytes,
        connect_to: Mapping[ConnectionKey, Address],
        expect: Sequence[ConnectionKey],
        timeout_s: float,
    ) -> tuple[dict[ConnectionKey, socket.socket], dict[ConnectionKey, socket.socket]]:
        """Connects to some ranks and waits for others to connect, all at once.

        Args:
            group: 16 bytes that name the communicator to be; connections of other communicators
                that come meanwhile are kept.
            expect: Connections to be made by the others.

        Returns:
            The connections made and those accepted, authenticated and non-blocking.

        Raises:
            AuthenticationError: A listener has another token.
            WaitTimeoutError: Some ranks did not connect in time; they are named.
        """
        connecting = _Connecting(self, rank, token, group, time.monotonic() + timeout_s)
        try:
            return connecting.run(connect_to, expect)
        except BaseException:
            for ready in (*connecting.made.values(), *connecting.accepted.values()):
                ready.close()
            raise
        finally:
            for handshake in connecting.handshakes.values():
                handshake.connection.close()

    def listening(self) -> dict[int, socket.socket]:
        """The listening sockets by file descriptor."""
        return {s.fileno(): s for s in self._sockets}

    def put(self, group: bytes, key: ConnectionKey, connection: socket.socket) -> None:
        """Keeps an authenticated connection until its communicator asks for it."""
        former = self._early.pop((group, key), None)
        if former is not None:
            former.close()
        self._early[group, key] = connection

    def take(self, group: bytes, key: ConnectionKey) -> socket.socket | None:
        """A connection that was kept, or None."""
        return self._early.pop((group, key), None)


class _Connecting:
    """One call of :meth:`Listener.establish`."""

    def __init__(
        self, listener: Listener, rank: int, token: bytes, group: bytes, deadline: float
    ) -> None:
        self.listener, self.rank, self.token, self.group = listener, rank, token, group
        self.deadline = deadline
        self.poll = select.poll()
        self.handshakes: dict[int, OutgoingHandshake | IncomingProof] = {}
        self.deadlines: dict[int, float] = {}  # of these, on the monotonic clock
        self.made: dict[ConnectionKey, socket.socket] = {}
        self.accepted: dict[ConnectionKey, socket.socket] = {}
        self.retries: list[tuple[float, ConnectionKey, Address]] = []
        self.last_error = ""

    def run(
        self, connect_to: Mapping[ConnectionKey, Address], expect: Sequence[ConnectionKey]
    ) -> tuple[dict[ConnectionKey, socket.socket], dict[ConnectionKey, socket.socket]]:
        listening = self.listener.listening()
        for number in listening:
            self.poll.register(number, select.POLLIN)
        for key, address in connect_to.items():
            self._connect(key, address)
        while True:
            for key in expect:
                if key not in self.accepted and (kept := self.listener.take(self.group, key)):
                    self.accepted[key] = kept
            absent = [k for k in connect_to if k not in self.made]
            absent += [k for k in expect if k not in self.accepted]
            if not absent:
                return self.made, self.accepted
            now = time.monotonic()
            if now >= self.deadline:
                raise self._missing(absent)
            self._retry_due(now)
            self._end_overdue(now)
            for number, _ in self.poll.poll(50):
                if number in listening:
                    self._accept(listening[number])
                elif number in self.handshakes:
                    self._advance(self.handshakes[number])

    def _connect(self, key: ConnectionKey, address: Address) -> None:
        try:
            handshake = OutgoingHandshake(key, address, self.group, self.rank, self.token)
        except OSError as error:
            self._retry_later(key, address, error)
            return
        self._add(handshake, select.POLLOUT, self.deadline)

    def _add(
        self, handshake: OutgoingHandshake | IncomingProof, events: int, deadline: float
    ) -> None:
        number = handshake.connection.fileno()
        self.handshakes[number], self.deadlines[number] = handshake, deadline
        self.poll.register(handshake.connection, events)

    def _remove(self, handshake: OutgoingHandshake | IncomingProof) -> None:
        self.poll.unregister(handshake.connection)
        number = handshake.connection.fileno()
        del self.handshakes[number], self.deadlines[number]

    def _retry_later(self, key: ConnectionKey, address: Address, error: Exception) -> None:
        self.last_error = f"{type(error).__name__}: {error} (rank {key.peer} at {address!r})"
        self.retries.append((time.monotonic() + _RETRY_S, key, address))

    def _retry_due(self, now: float) -> None:
        due = [r for r in self.retries if r[0] <= now]
        self.retries = [r for r in self.retries if r[0] > now]
        for _, key, address in due:
            self._connect(key, address)

    def _end_overdue(self, now: float) -> None:
        for number in [n for n, deadline in self.deadlines.items() if deadline < now]:
            handshake = self.handshakes[number]
            self._remove(handshake)
            handshake.connection.close()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = listening.accept()
            except OSError as error:  # none is left, or no file descriptors
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._end_oldest_unknown()
                return
            unknown = sum(isinstance(h, IncomingProof) for h in self.handshakes.values())
            if unknown >= _MAX_UNKNOWN:
                self._end_oldest_unknown()
            connection.setblocking(False)
            until = min(self.deadline, time.monotonic() + _UNKNOWN_TIMEOUT_S)
            proof = IncomingProof(connection, self.token, _HELLO.size, self._is_meant)
            self._add(proof, select.POLLIN, until)

    def _is_meant(self, hello: bytes) -> bool:
        magic, _, _, _, receiver = _HELLO.unpack(hello)
        return bool(magic == _MAGIC and receiver == self.rank)

    def _end_oldest_unknown(self) -> None:
        for handshake in self.handshakes.values():
            if isinstance(handshake, IncomingProof):
                self._remove(handshake)
                handshake.connection.close()
                return

    def _advance(self, handshake: OutgoingHandshake | IncomingProof) -> None:
        try:
            if isinstance(handshake, OutgoingHandshake):
                self._advance_outgoing(handshake)
            elif handshake.hear():
                handshake.welcome()
                self._remove(handshake)
                _, kind, group, sender, _ = _HELLO.unpack(handshake.hello)
                self.listener.put(group, ConnectionKey(kind, sender), handshake.connection)
        except BlockingIOError:
            return
        except (OSError, EOFError, AuthenticationError) as error:
            self._remove(handshake)
            handshake.connection.close()
            if isinstance(handshake, IncomingProof):
                if isinstance(error, AuthenticationError):
                    self.listener.refused.append(error.what)
            elif isinstance(error, AuthenticationError):
                raise
            else:
                self._retry_later(handshake.key, handshake.address, error)

    def _advance_outgoing(self, handshake: OutgoingHandshake) -> None:
        if handshake.begin():
            self.poll.modify(handshake.connection, select.POLLIN)
        elif handshake.advance():
            self._remove(handshake)
            self.made[handshake.key] = handshake.connection

    def _missing(self, absent: list[ConnectionKey]) -> WaitTimeoutError:
        ranks = sorted({key.peer for key in absent})
        refused = self.listener.refused
        return WaitTimeoutError(
            f"rank {self.rank} could not connect to all; missing {name_ranks(ranks)}",
            expected="all ranks to connect in time",
            received=self.last_error or f"nothing from {name_ranks(ranks)}",
            hint=f"{len(refused)} connections were refused: {refused[-1]}"
            if refused
            else "is the rank running, and are its address and port reachable from here?",
        )
