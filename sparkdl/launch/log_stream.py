"""Log lines from the ranks to the driver while they run, over one authenticated connection each.

::

    driver → rank   32 random bytes
    rank → driver   rank, HMAC(token, random bytes + rank)
    driver → rank   one byte: welcome
    rank → driver   lines: length, UTF-8 text; at most 16 KiB each

Nothing that arrives is executed or unpickled. Where the driver cannot be reached (Spark Connect,
address translation) the lines stay with the rank and travel with its result.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import hmac
import queue
import secrets
import selectors
import socket
import struct
import threading
import time

_NONCE_BYTES = 32
_HELLO = struct.Struct("<i32s")
_LENGTH = struct.Struct("<I")
_MAX_LINE_BYTES = 16 << 10
_MAX_STRANGERS = 64
_STRANGER_TIMEOUT_S = 10.0
_QUEUED_LINES = 10_000
KEPT_BYTES = 256 << 10
"""What a rank keeps of the lines that it could not send: the latest."""


def _proof(token: bytes, nonce: bytes, rank: int) -> bytes:
    message = b"sparkdl log line" + nonce + rank.to_bytes(4, "little", signed=True)
    return hmac.new(token, message, hashlib.sha256).digest()


class LineClient:
    """A rank's end; sends in a thread, so that a slow driver never stops the training.

    Args:
        address: The driver's, or None: lines are kept.
        token: The run's secret.
        rank: This rank.
        timeout_s: Limit for connecting.
    """

    def __init__(
        self, address: tuple[str, int] | None, token: bytes, rank: int, timeout_s: float = 5.0
    ) -> None:
        self._kept: collections.deque[str] = collections.deque()
        self._kept_bytes = 0
        self._dropped = 0
        self._queue: queue.Queue[str | None] = queue.Queue(_QUEUED_LINES)
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        if address is not None:
            with contextlib.suppress(OSError):
                self._socket = _join(address, token, rank, timeout_s)
        if self._socket is not None:
            self._thread = threading.Thread(target=self._send, name="sparkdl-lines", daemon=True)
            self._thread.start()

    def send(self, line: str) -> None:
        """Sends or keeps one message; never waits."""
        for part in line.split("\n"):
            if self._thread is None:
                self._keep(part)
                continue
            try:
                self._queue.put_nowait(part)
            except queue.Full:
                self._dropped += 1

    def close(self, timeout_s: float = 5.0) -> list[str]:
        """Sends what is queued and ends; returns the lines that could not be sent."""
        if self._thread is not None and self._socket is not None:
            if self._dropped:
                self._put(f"[{self._dropped} lines dropped: the driver was too slow]", timeout_s)
            self._put(None, timeout_s)
            self._thread.join(timeout_s)
            self._socket.close()
            self._thread = None
        return list(self._kept)

    def _put(self, line: str | None, timeout_s: float) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put(line, timeout=timeout_s)

    def _send(self) -> None:
        assert self._socket is not None
        broken = False
        while (line := self._queue.get()) is not None:
            data = line.encode(errors="replace")[:_MAX_LINE_BYTES]
            try:
                if not broken:
                    self._socket.sendall(_LENGTH.pack(len(data)) + data)
            except OSError:
                broken = True
            if broken:
                self._keep(line)

    def _keep(self, line: str) -> None:
        self._kept.append(line)
        self._kept_bytes += len(line) + 1
        while self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()) + 1


def _join(address: tuple[str, int], token: bytes, rank: int, timeout_s: float) -> socket.socket:
    connection = socket.create_connection(address, timeout=timeout_s)
    try:
        nonce = b""
        while len(nonce) < _NONCE_BYTES:
            data = connection.recv(_NONCE_BYTES - len(nonce))
            if not data:
                raise ConnectionResetError("closed during the handshake")
            nonce += data
        connection.sendall(_HELLO.pack(rank, _proof(token, nonce, rank)))
        if connection.recv(1) != b"\x01":
            raise ConnectionRefusedError("not welcome")
        return connection
    except BaseException:
        connection.close()
        raise


class _Guest:
    """One connection at the driver; ``rank`` is None until it has proved itself."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.rank: int | None = None
        self.buffer = b""
        self.deadline = time.monotonic() + _STRANGER_TIMEOUT_S


class LineServer:
    """The driver's end; lives in the thread that calls :meth:`poll`.

    Args:
        bind_host: Address to listen on.
        advertised_host: Address that the executors connect to.
        token: The run's secret.
        num_workers: Ranks from 0 to below this are let in.
    """

    def __init__(
        self, bind_host: str, advertised_host: str, token: bytes, num_workers: int
    ) -> None:
        self._token, self._num_workers = token, num_workers
        family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
        self._listening = socket.create_server((bind_host, 0), family=family, backlog=128)
        self._listening.setblocking(False)
        self.address = (advertised_host, int(self._listening.getsockname()[1]))
        self.joined: set[int] = set()
        self._guests: dict[int, _Guest] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ, None)
        self._lines: list[tuple[int, str]] = []

    def poll(self, timeout_s: float) -> list[tuple[int, str]]:
        """Waits for lines at most this long; ``(rank, line)`` in the order of arrival."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        now = time.monotonic()
        for guest in [g for g in self._guests.values() if g.rank is None and g.deadline < now]:
            self._drop(guest)
        lines, self._lines = self._lines, []
        return lines

    def drain(self, timeout_s: float = 2.0) -> list[tuple[int, str]]:
        """The last lines: until all connections have ended, or the time is over."""
        deadline, lines = time.monotonic() + timeout_s, []
        while any(g.rank is not None for g in self._guests.values()):
            if time.monotonic() > deadline:
                break
            lines += self.poll(0.05)
        return lines

    def close(self) -> None:
        """Ends all connections."""
        for guest in list(self._guests.values()):
            self._drop(guest)
        self._selector.close()
        self._listening.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        strangers = sum(g.rank is None for g in self._guests.values())
        if strangers >= _MAX_STRANGERS:
            connection.close()
            return
        connection.setblocking(False)
        guest = _Guest(connection)
        self._guests[connection.fileno()] = guest
        self._selector.register(connection, selectors.EVENT_READ, guest)
        self._write(guest, guest.nonce)

    def _read(self, guest: _Guest) -> None:
        try:
            data = guest.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(guest)
            return
        guest.buffer += data
        if guest.rank is None:
            self._check(guest)
        if guest.rank is not None:
            self._take(guest, guest.rank)

    def _check(self, guest: _Guest) -> None:
        if len(guest.buffer) < _HELLO.size:
            return
        rank, proof = _HELLO.unpack_from(guest.buffer)
        guest.buffer = guest.buffer[_HELLO.size :]
        right = hmac.compare_digest(proof, _proof(self._token, guest.nonce, rank))
        if not right or not 0 <= rank < self._num_workers:
            self._drop(guest)
            return
        guest.rank = rank
        self.joined.add(rank)
        self._write(guest, b"\x01")

    def _take(self, guest: _Guest, rank: int) -> None:
        while len(guest.buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(guest.buffer)
            if size > _MAX_LINE_BYTES:
                self._drop(guest)
                return
            end = _LENGTH.size + size
            if len(guest.buffer) < end:
                return
            text = guest.buffer[_LENGTH.size : end].decode(errors="replace")
            guest.buffer = guest.buffer[end:]
            self._lines.append((rank, text))

    def _write(self, guest: _Guest, data: bytes) -> None:
        try:
            guest.socket.send(data)
        except OSError:
            self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        number = guest.socket.fileno()
        if self._guests.pop(number, None) is not None:
            self._selector.unregister(guest.socket)
            guest.socket.close()
