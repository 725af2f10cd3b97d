"""How ranks find and trust each other: held listening sockets and a mutual challenge.

Each rank holds a TCP socket and, on Linux, a Unix socket in the abstract name space (which leaves
no file behind). Connecting is one loop over non-blocking sockets, so that a stranger who connects
and says nothing delays nobody. The handshake, dialer D and listener L with the shared token T::

    D → L   hello = magic, kind, group, sender, receiver, nonce_D
    L → D   nonce_L, HMAC(T, "listener" + hello + nonce_L)
    D → L   HMAC(T, "dialer" + hello + nonce_L)
    L → D   one byte: welcome

All lengths are fixed, and proofs are compared in constant time. The data that follow are neither
encrypted nor signed: like Horovod's and Spark's by default, they trust the network's wires.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sparkdl.collective.pending import name_ranks
from sparkdl.errors import AuthenticationError, ResourceError, TransportError, WaitTimeoutError

RING, LOCAL = 1, 2

_MAGIC = b"sparkdl1"
_HELLO = struct.Struct("<8sB16sII32s")
_CHALLENGE = struct.Struct("<32s32s")
_WELCOME = b"\x01"
_STRANGER_TIMEOUT_S = 10.0
_MAX_STRANGERS = 256
_RETRY_S = 0.05

Address = tuple[str, int] | str


class ConnectionKey(NamedTuple):
    """Which connection this is, seen from one rank: its kind and the other rank."""

    kind: int
    peer: int


def _proof(token: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.new(token, role + hello + nonce, hashlib.sha256).digest()


class _Talk:
    """One handshake under way on one non-blocking socket."""

    def __init__(self, connection: socket.socket, expects: int, deadline: float) -> None:
        self.socket = connection
        self.expects = expects
        self.deadline = deadline
        self.received = b""
        self.hello = b""
        self.nonce = b""

    def read(self) -> bool:
        """Reads what is there; True when the message expected is complete."""
        data = self.socket.recv(self.expects - len(self.received))
        if not data:
            raise ConnectionResetError("closed during the handshake")
        self.received += data
        return len(self.received) == self.expects

    def take(self, expects: int) -> bytes:
        message, self.received, self.expects = self.received, b"", expects
        return message


class _Dial(_Talk):
    """A handshake that this rank began."""

    def __init__(self, link: ConnectionKey, address: Address, deadline: float) -> None:
        self.link, self.address = link, address
        if isinstance(address, str):
            family, target = socket.AF_UNIX, address
            connection = socket.socket(family, socket.SOCK_STREAM)
        else:
            found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
            connection = socket.socket(found[0], socket.SOCK_STREAM)
            target = found[4]  # type: ignore[assignment]
        super().__init__(connection, _CHALLENGE.size, deadline)
        connection.setblocking(False)
        self.connected = False
        try:
            with contextlib.suppress(BlockingIOError):
                connection.connect(target)
        except BaseException:
            connection.close()
            raise


class Listener:
    """The sockets that one rank holds from ``prepare`` to ``close``.

    Args:
        bind_host: Address to listen on.
        port: TCP port; 0: any free one; a pair: the first free one of that range, ends included.
        local: Whether to listen for ranks of the same host too.

    Raises:
        ResourceError: The address or all of the ports are taken.
    """

    def __init__(
        self, bind_host: str = "0.0.0.0", port: int | tuple[int, int] = 0, *, local: bool = True
    ) -> None:
        self.refused: list[str] = []
        self._stash: dict[tuple[bytes, ConnectionKey], socket.socket] = {}
        self._tcp = _listen(bind_host, port)
        self.port = int(self._tcp.getsockname()[1])
        self.local = ""
        self._sockets = [self._tcp]
        if local and sys.platform == "linux":
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.local = f"sparkdl-{os.getpid()}-{secrets.token_hex(8)}"
            unix.bind("\0" + self.local)
            unix.listen(128)
            unix.setblocking(False)
            self._sockets.append(unix)

    def close(self) -> None:
        """Closes the sockets, and connections that nobody asked for."""
        for held in (*self._sockets, *self._stash.values()):
            held.close()
        self._stash.clear()

    def establish(
        self,
        rank: int,
        token: bytes,
        group: bytes,
        dial: Mapping[ConnectionKey, Address],
        expect: Sequence[ConnectionKey],
        timeout_s: float,
    ) -> tuple[dict[ConnectionKey, socket.socket], dict[ConnectionKey, socket.socket]]:
        """Dials some ranks and waits to be dialed by others, all at once.

        Args:
            rank: This rank, as the others know it.
            token: The shared secret.
            group: 16 bytes that name the communicator to be; others' connections are kept.
            dial: Connections to make, and where.
            expect: Connections to be made by the others.
            timeout_s: Limit for all of it.

        Returns:
            The connections dialed and those accepted, authenticated and non-blocking.

        Raises:
            AuthenticationError: A listener has another token.
            WaitTimeoutError: Someone did not come; they are named.
        """
        deadline = time.monotonic() + timeout_s
        meeting = _Meeting(self, rank, token, group, deadline)
        try:
            return meeting.run(dial, expect)
        except BaseException:
            for made in (*meeting.dialed.values(), *meeting.accepted.values()):
                made.close()
            raise
        finally:
            for talk in meeting.talks.values():
                talk.socket.close()

    def fileno_map(self) -> dict[int, socket.socket]:
        """The listening sockets by file descriptor."""
        return {s.fileno(): s for s in self._sockets}

    def put(self, group: bytes, link: ConnectionKey, connection: socket.socket) -> None:
        """Keeps an authenticated connection until its communicator asks for it."""
        former = self._stash.pop((group, link), None)
        if former is not None:
            former.close()
        self._stash[group, link] = connection

    def pick(self, group: bytes, link: ConnectionKey) -> socket.socket | None:
        """A kept connection, or None."""
        return self._stash.pop((group, link), None)


class _Meeting:
    """One call of :meth:`Listener.establish`."""

    def __init__(
        self, listener: Listener, rank: int, token: bytes, group: bytes, deadline: float
    ) -> None:
        self.listener, self.rank, self.token, self.group = listener, rank, token, group
        self.deadline = deadline
        self.poll = select.poll()
        self.talks: dict[int, _Talk] = {}
        self.dialed: dict[ConnectionKey, socket.socket] = {}
        self.accepted: dict[ConnectionKey, socket.socket] = {}
        self.retries: list[tuple[float, ConnectionKey, Address]] = []
        self.last_error = ""

    def run(
        self, dial: Mapping[ConnectionKey, Address], expect: Sequence[ConnectionKey]
    ) -> tuple[dict[ConnectionKey, socket.socket], dict[ConnectionKey, socket.socket]]:
        listening = self.listener.fileno_map()
        for number in listening:
            self.poll.register(number, select.POLLIN)
        for link, address in dial.items():
            self._dial(link, address)
        while True:
            for link in expect:
                if link not in self.accepted and (kept := self.listener.pick(self.group, link)):
                    self.accepted[link] = kept
            absent = [k for k in dial if k not in self.dialed]
            absent += [k for k in expect if k not in self.accepted]
            if not absent:
                return self.dialed, self.accepted
            now = time.monotonic()
            if now >= self.deadline:
                self._give_up(absent)
            self._drop_slow(now)
            for number, events in self.poll.poll(50):
                if number in listening:
                    self._accept(listening[number])
                elif number in self.talks:
                    self._advance(self.talks[number], events)

    def _dial(self, link: ConnectionKey, address: Address) -> None:
        try:
            talk = _Dial(link, address, self.deadline)
        except OSError as error:
            self._retry(link, address, error)
            return
        self.talks[talk.socket.fileno()] = talk
        self.poll.register(talk.socket, select.POLLOUT)

    def _retry(self, link: ConnectionKey, address: Address, error: OSError) -> None:
        self.last_error = f"{type(error).__name__}: {error} (rank {link.peer} at {address!r})"
        self.retries.append((time.monotonic() + _RETRY_S, link, address))

    def _drop_slow(self, now: float) -> None:
        due = [r for r in self.retries if r[0] <= now]
        self.retries = [r for r in self.retries if r[0] > now]
        for _, link, address in due:
            self._dial(link, address)
        for talk in [t for t in self.talks.values() if t.deadline < now]:
            self._end(talk)
            talk.socket.close()

    def _end(self, talk: _Talk) -> None:
        number = talk.socket.fileno()
        self.poll.unregister(number)
        del self.talks[number]

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError:  # gone again, or no file descriptors for now
            return
        strangers = sum(not isinstance(t, _Dial) for t in self.talks.values())
        if strangers >= _MAX_STRANGERS:
            connection.close()
            return
        connection.setblocking(False)
        until = min(self.deadline, time.monotonic() + _STRANGER_TIMEOUT_S)
        self.talks[connection.fileno()] = _Talk(connection, _HELLO.size, until)
        self.poll.register(connection, select.POLLIN)

    def _advance(self, talk: _Talk, events: int) -> None:
        try:
            if isinstance(talk, _Dial):
                self._advance_dial(talk)
            elif talk.read():
                self._advance_accept(talk)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(talk)
            talk.socket.close()
            if isinstance(error, AuthenticationError):
                raise
            if isinstance(talk, _Dial):
                self._retry(talk.link, talk.address, error)

    def _advance_dial(self, talk: _Dial) -> None:
        if not talk.connected:
            code = talk.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            talk.connected = True
            link = talk.link
            talk.hello = _HELLO.pack(
                _MAGIC, link.kind, self.group, self.rank, link.peer, secrets.token_bytes(32)
            )
            talk.socket.send(talk.hello)
            self.poll.modify(talk.socket, select.POLLIN)
            return
        if not talk.read():
            return
        if talk.expects == _CHALLENGE.size:
            nonce, proof = _CHALLENGE.unpack(talk.take(len(_WELCOME)))
            if not hmac.compare_digest(proof, _proof(self.token, b"listener", talk.hello, nonce)):
                raise AuthenticationError(
                    f"rank {talk.link.peer} could not prove itself to rank {self.rank}",
                    expected="a proof made with this run's token",
                    received=f"another proof from {talk.address!r}",
                    hint="is a process of another run listening there?",
                )
            talk.socket.send(_proof(self.token, b"dialer", talk.hello, nonce))
            return
        self._end(talk)
        self.dialed[talk.link] = talk.socket

    def _advance_accept(self, talk: _Talk) -> None:
        if not talk.hello:
            talk.hello = talk.take(32)
            magic, _, _, _, receiver, _ = _HELLO.unpack(talk.hello)
            if magic != _MAGIC or receiver != self.rank:
                self._refuse("a hello that was not meant for this rank")
            talk.nonce = secrets.token_bytes(32)
            proof = _proof(self.token, b"listener", talk.hello, talk.nonce)
            talk.socket.send(_CHALLENGE.pack(talk.nonce, proof))
            return
        if not hmac.compare_digest(
            talk.received, _proof(self.token, b"dialer", talk.hello, talk.nonce)
        ):
            self._refuse("a wrong token")
        talk.socket.send(_WELCOME)
        _, kind, group, sender, _, _ = _HELLO.unpack(talk.hello)
        self._end(talk)
        self.listener.put(group, ConnectionKey(kind, sender), talk.socket)

    def _refuse(self, why: str) -> None:
        self.listener.refused.append(why)
        raise ConnectionAbortedError(why)

    def _give_up(self, absent: list[ConnectionKey]) -> None:
        ranks = sorted({link.peer for link in absent})
        refused = self.listener.refused
        raise WaitTimeoutError(
            f"rank {self.rank} could not connect to all; missing {name_ranks(ranks)}",
            expected="all ranks to connect in time",
            received=self.last_error or f"nothing from {name_ranks(ranks)}",
            hint=f"{len(refused)} connections were refused: {refused[-1]}"
            if refused
            else "is the rank running, and are its address and port reachable from here?",
        )


def _listen(bind_host: str, port: int | tuple[int, int]) -> socket.socket:
    first, last = (port, port) if isinstance(port, int) else port
    family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
    problem: OSError | None = None
    for candidate in range(first, last + 1):
        try:
            held = socket.create_server((bind_host, candidate), family=family, backlog=128)
        except (OSError, OverflowError) as error:
            problem = error if isinstance(error, OSError) else OSError(str(error))
            continue
        held.setblocking(False)
        return held
    raise ResourceError(
        f"cannot listen on {bind_host or 'any address'}",
        expected=f"a free port from {first} to {last}" if first else "a free port",
        received=str(problem) if problem else "an empty range",
        hint="port=0 takes any free port",
    ) from problem


def own_address() -> str:
    """This machine's address on its way out; the loopback address where there is none."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def own_host_id() -> str:
    """Equal for processes that can share memory and Unix sockets, different for others.

    The kernel's boot id tells machines apart, the network name space tells apart containers whose
    abstract Unix sockets do not meet. Without either (not Linux) each process is its own host.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return secrets.token_hex(16)


def set_tcp_options(connection: socket.socket) -> None:
    """No delay for small frames; a host that vanished is noticed within about 15 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def peer_gone(rank: int, peer: int, why: object = "") -> TransportError:
    """The error for a connection that ended."""
    return TransportError(
        f"rank {peer} is gone; rank {rank} cannot go on",
        expected="all ranks to stay until the operation is done",
        received=f"the connection to rank {peer} ended" + (f" ({why})" if why else ""),
        hint=f"the cause is on rank {peer}, or on a rank it waited for",
    )
