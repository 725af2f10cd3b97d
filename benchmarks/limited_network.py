"""Slow networks on one machine: network namespaces with limited links, or a relay that limits.

With the rights for it (root, ``ip``, ``tc``) each host is a network namespace with one link to a
common switch, limited in both directions by a token bucket. Without, :class:`Relay` forwards
connections to one server at a limited rate.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import threading
import time
from types import TracebackType
from typing import Self

CHUNK = 65_536
_LETTERS = itertools.cycle("abcdefghijklmnopqrstuvwxyz")


class LimitedNetwork:
    """Hosts with a link of so many Mbit/s each, in both directions; a context manager.

    Args:
        hosts: How many hosts.
        mbit: Rate of each link.
        queue_ms: How long a byte may wait before a link; with a queue that is much longer than a
            real switch's, acknowledgements are late where both directions are busy.

    Raises:
        PermissionError: Namespaces or limits are not permitted here.
    """

    def __init__(self, hosts: int, mbit: float, queue_ms: int = 200) -> None:
        # the links of one that was closed before may still be there for a moment
        self._id = f"sl{os.getpid() % 100_000}{next(_LETTERS)}"
        self._net = f"10.{64 + os.getpid() // 250 % 64}.{os.getpid() % 250}"
        self._hosts, self._rate = hosts, f"{mbit:g}mbit"
        # a bucket below 1 ms of the rate would not reach it; tbf takes some kilobytes at least
        self._bucket = f"{max(16_384, int(mbit * 125))}"
        self._queue = f"{queue_ms}ms"
        self._made: list[list[str]] = []

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            raise PermissionError("network namespaces need root, ip and tc")
        try:
            switch = f"{self._id}s"
            self._ip("link", "add", switch, "type", "bridge", undo=["link", "del", switch])
            self._ip("link", "set", switch, "up")
            for host in range(self._hosts):
                self._add(host, switch)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise PermissionError(f"no limited links here: {error}") from error
        return self

    def _add(self, host: int, switch: str) -> None:
        name, port = self.name(host), f"{self._id}p{host}"
        self._ip("netns", "add", name, undo=["netns", "del", name])
        self._ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._ip("link", "set", port, "master", switch, "up")
        self._ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        self._ip("-n", name, "link", "set", "eth0", "up")
        self._ip("-n", name, "link", "set", "lo", "up")
        limit = ["root", "tbf", "rate", self._rate, "burst", self._bucket]
        limit += ["latency", self._queue]
        _call(["tc", "qdisc", "add", "dev", port, *limit])
        _call([*self.command(host), "tc", "qdisc", "add", "dev", "eth0", *limit])

    def _ip(self, *words: str, undo: list[str] | None = None) -> None:
        _call(["ip", *words])
        if undo is not None:
            self._made.append(["ip", *undo])

    def name(self, host: int) -> str:
        """The name of a host's namespace."""
        return f"{self._id}h{host}"

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"{self._net}.{host + 1}"

    def command(self, host: int) -> list[str]:
        """What to put before a command so that it runs on a host."""
        return ["ip", "netns", "exec", self.name(host)]

    def close(self) -> None:
        """Removes all namespaces and links; can be repeated."""
        while self._made:
            subprocess.run(self._made.pop(), capture_output=True, check=False, timeout=10)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _call(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, check=True, timeout=10)


class Relay:
    """Forwards connections to a server on this machine, at a limited rate in each direction.

    All connections share the rate, as they share a server's link.

    Args:
        port: The server's port on the loopback interface.
        mbit: The rate in each direction, in Mbit/s.
    """

    def __init__(self, port: int, mbit: float) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._rates = [_Rate(mbit * 125_000), _Rate(mbit * 125_000)]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target, timeout=10)
            except OSError:
                return
            far.settimeout(None)
            for connection in (near, far):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * CHUNK)
                self._open.append(connection)
            for pair, rate in (((near, far), 0), ((far, near), 1)):
                thread = threading.Thread(
                    target=self._forward, args=(*pair, self._rates[rate]), daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def _forward(self, source: socket.socket, target: socket.socket, rate: _Rate) -> None:
        buffer = bytearray(CHUNK)
        with contextlib.suppress(OSError):
            while count := source.recv_into(buffer):
                rate.wait(count)
                target.sendall(memoryview(buffer)[:count])
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends all connections."""
        for connection in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join(5)


class _Rate:
    """Lets bytes pass one after the other at a rate; thread-safe."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free = bytes_per_s, 0.0
        self._lock = threading.Lock()

    def wait(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now) + count / self._bytes_per_s
            until = self._free
        time.sleep(max(0.0, until - now))
