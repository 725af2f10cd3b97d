"""Machines of a test: network namespaces with addresses of their own, on one bridge."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NETWORKS = {4: ("10.77.0.", "10.78.0.", 24), 6: ("fd77::", "fd78::", 64)}
"""For each version of the Internet protocol: how the addresses of all machines begin, and that of
the first one's other interface, which the others reach through it; the length of the networks."""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def missing() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "network namespaces need root and the program ip"
    name = f"sdl{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@dataclass(frozen=True)
class Machine:
    """A network namespace.

    Args:
        name: Of the namespace.
        address: On the common network.
        device: What it is connected to the others by.
    """

    name: str
    address: str
    device: str

    def command(self, *arguments: str) -> list[str]:
        """A command that runs there."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def ip(self, *arguments: str) -> None:
        _ip("-n", self.name, *arguments)

    def let_in(self, ports: Iterable[str], version: int = 4) -> None:
        """From now on drops what others send to other TCP ports, as a firewall does.

        What has come from such a port of another machine is an answer, and passes. There are no
        filters in the kernels of many containers, so the rules that choose a routing table do it:
        packets for this machine are delivered by the table ``local``.

        Args:
            ports: Ports or ranges such as ``'7300-7350'``.
            version: Of the Internet protocol.
        """
        others = ("dev", self.device, "ipproto", "tcp")
        rule = (f"-{version}", "rule")
        for end in ("dport", "sport"):
            for one in ports:
                self.ip(*rule, "add", "pref", "5", *others, end, one, "lookup", "local")
        self.ip(*rule, "add", "pref", "9", *others, "blackhole")
        self.ip(*rule, "add", "pref", "20", "lookup", "local")
        self.ip(*rule, "del", "pref", "0")

    def drop(self, sender: str, port: int, version: int = 4) -> None:
        """From now on drops what one address sends to one TCP port."""
        self.ip(f"-{version}", "rule", "add", "pref", "3", "from", sender, "ipproto", "tcp",
                "dport", str(port), "blackhole")  # fmt: skip

    @contextmanager
    def hosts(self, **names: str) -> Iterator[None]:
        """Within, programs that begin there find these addresses by these names, and others none.

        The machine's own name and ``localhost`` stay.
        """
        folder = Path("/etc/netns") / self.name  # where "ip netns exec" looks for it
        folder.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", f"{self.address} {socket.gethostname()}"]
        lines += [f"{address} {name}" for name, address in names.items()]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        try:
            yield
        finally:
            shutil.rmtree(folder)
            with suppress(OSError):
                folder.parent.rmdir()


def second_address(version: int = 4) -> str:
    """Of the first machine, on a network that the others have no address of."""
    return f"{NETWORKS[version][1]}1"


@contextmanager
def machines(count: int, version: int = 4) -> Iterator[list[Machine]]:
    """So many machines; the first one, which has the bridge, also has :func:`second_address`.

    Args:
        count: How many.
        version: Of the Internet protocol; they have no address of the other one.
    """
    network, _, length = NETWORKS[version]
    at_once = ["nodad"] if version == 6 else []  # no look whether another machine has the address
    family = f"-{version}"
    with ExitStack() as stack:
        found = []
        for number in range(count):
            one = Machine(
                f"sdl{os.getpid()}n{number}",
                f"{network}{number + 1}",
                "eth" if number else "bridge",
            )
            _ip("netns", "add", one.name)
            stack.callback(_ip, "netns", "del", one.name)
            one.ip("link", "set", "lo", "up")
            found.append(one)
        first = found[0]
        for link, address in (("bridge", first.address), ("second", second_address(version))):
            first.ip("link", "add", link, "type", "bridge")
            first.ip("address", "add", f"{address}/{length}", "dev", link, *at_once)
            first.ip("link", "set", link, "up")
        for number, one in enumerate(found[1:]):
            end = f"to{number}"
            first.ip("link", "add", end, "type", "veth", "peer", "name", "eth", "netns", one.name)
            first.ip("link", "set", end, "master", "bridge")
            first.ip("link", "set", end, "up")
            one.ip("address", "add", f"{one.address}/{length}", "dev", "eth", *at_once)
            one.ip("link", "set", "eth", "up")
            one.ip(family, "route", "add", "default", "via", first.address)
        yield found
