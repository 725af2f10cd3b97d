"""Two hosts on one machine: network namespaces, and a link of a given rate and delay between them.

The link is a veth pair with ``tc``'s netem where the kernel has it. Where it has not, this process
is the link: it carries packets between two TUN devices and delays each. Needs root.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 65520
_ADDRESSES = ("10.231.7.1", "10.231.7.2")


@dataclass(frozen=True)
class Host:
    """One of the two hosts.

    Args:
        name: The name of its namespace.
        device: Its end of the link.
        address: Its address there.
    """

    name: str
    device: str
    address: str

    def sent_bytes(self) -> int:
        """Bytes that went out over the link so far, headers included."""
        line = _run("ip", "-n", self.name, "-s", "-o", "link", "show", self.device)
        return int(line.split("TX:")[1].split("\\")[1].split()[0])


def enter(name: str) -> None:
    """Moves the calling thread, and those it starts later, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


@contextlib.contextmanager
def two_hosts(
    rate_bits: float, delay_s: float, *, loss: float = 0.0, mtu: int = _MTU
) -> Iterator[tuple[tuple[Host, Host], str]]:
    """Two connected namespaces; yields both hosts, and a text that says how the link is made.

    Args:
        rate_bits: Bits per second, each way.
        delay_s: Delay of each packet, each way.
        loss: Share of the packets that are lost, each way.
        mtu: Most bytes of a packet.

    Raises:
        PermissionError: Namespaces or devices may not be made here; the message says which.
    """
    tag = f"sdl{os.getpid() % 100000}"
    names = f"{tag}a", f"{tag}b"
    one, two = (Host(name, f"{name}0", a) for name, a in zip(names, _ADDRESSES, strict=True))
    hosts = one, two
    with contextlib.ExitStack() as stack:
        for name in names:
            _permitted("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        how = _veth(hosts, rate_bits, delay_s, loss)
        if not how:
            stack.enter_context(_carried(hosts, rate_bits, delay_s, loss))
            how = "packets carried between two TUN devices (no netem in this kernel)"
        for host in hosts:
            ip = ("ip", "-n", host.name)
            _run(*ip, "addr", "add", f"{host.address}/30", "dev", host.device)
            _run(*ip, "link", "set", "lo", "up")
            _run(*ip, "link", "set", host.device, "mtu", str(mtu), "up")
        yield hosts, how


def _veth(hosts: tuple[Host, ...], rate_bits: float, delay_s: float, loss: float) -> str:
    one, two = hosts
    _permitted(
        "ip", "link", "add", one.device, "netns", one.name, "type", "veth",
        "peer", "name", two.device, "netns", two.name,
    )  # fmt: skip
    for host in hosts:
        netem = [
            "tc", "-n", host.name, "qdisc", "add", "dev", host.device, "root", "netem",
            "delay", f"{delay_s * 1e6:.0f}us", "rate", f"{rate_bits:.0f}bit", "limit", "10000",
            "loss", f"{loss:.4%}",
        ]  # fmt: skip
        if subprocess.run(netem, capture_output=True, check=False).returncode:
            _run("ip", "-n", one.name, "link", "del", one.device)
            return ""
    return "a veth pair with netem"


@contextlib.contextmanager
def _carried(
    hosts: tuple[Host, ...], rate_bits: float, delay_s: float, loss: float
) -> Iterator[None]:
    ends: list[int] = []
    carriers: list[_Carrier] = []
    try:
        for host in hosts:
            try:
                ends.append(os.open("/dev/net/tun", os.O_RDWR))
                request = struct.pack("16sH22x", host.device.encode(), _IFF_TUN | _IFF_NO_PI)
                fcntl.ioctl(ends[-1], _TUNSETIFF, request)
            except OSError as error:
                raise PermissionError(f"/dev/net/tun: {error}") from error
            _run("ip", "link", "set", host.device, "netns", host.name)
        carriers = [_Carrier(a, b, rate_bits, delay_s, loss) for a, b in (ends, ends[::-1])]
        yield
    finally:
        for carrier in carriers:
            carrier.stop()
        for end in ends:
            os.close(end)


class _Carrier:
    """One direction: packets leave one after the other at the rate, and arrive a delay later."""

    def __init__(
        self, source: int, target: int, rate_bits: float, delay_s: float, loss: float
    ) -> None:
        self._source, self._target = source, target
        self._rate_bits, self._delay_s = rate_bits, delay_s
        self._loss, self._random = loss, random.Random(source)
        self._under_way: collections.deque[tuple[float, bytes]] = collections.deque()
        self._some = threading.Semaphore(0)
        self._room = threading.Semaphore(64)  # packets; whoever sends more waits
        self._stopped = False
        os.set_blocking(source, False)
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._take, self._give)]
        for thread in self._threads:
            thread.start()

    def _take(self) -> None:
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        free = 0.0
        while not self._stopped:
            if not poll.poll(200):
                continue
            try:
                packet = os.read(self._source, 1 << 17)
            except OSError:
                continue
            free = max(free, time.perf_counter()) + len(packet) * 8 / self._rate_bits
            if self._random.random() < self._loss:
                continue
            while not self._room.acquire(timeout=0.2):
                if self._stopped:
                    return
            self._under_way.append((free + self._delay_s, packet))
            self._some.release()

    def _give(self) -> None:
        while not self._stopped:
            if not self._some.acquire(timeout=0.2):
                continue
            due, packet = self._under_way.popleft()
            wait = due - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            with contextlib.suppress(OSError):
                os.write(self._target, packet)
            self._room.release()

    def stop(self) -> None:
        self._stopped = True
        for thread in self._threads:
            thread.join(5.0)


def _permitted(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise PermissionError(str(error)) from error
    if done.returncode:
        raise PermissionError(f"{' '.join(command)}: {done.stderr.strip()}")


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
