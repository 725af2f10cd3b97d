"""This host: its addresses, and whether another process runs on it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

from sparkdl.errors import ResourceError

_ANYWHERE = ("", "0.0.0.0", "::")
_IOCTL_ADDRESS = 0x8915  # SIOCGIFADDR


def own_address(towards: str = "") -> str:
    """The address, of IPv4 or else IPv6, from which this machine reaches a host.

    A name that this machine resolves to itself, as ``127.0.1.1`` in ``/etc/hosts``, does not say
    how others reach it: its address towards any other network does. 127.0.0.1 if there is none.

    Args:
        towards: The host, an IPv6 address with or without brackets; empty for any other network.
    """
    host = towards.strip("[]")
    for family, elsewhere in (
        (socket.AF_INET, "192.0.2.1"),
        (socket.AF_INET6, "2001:db8::1"),  # addresses for documentation: nothing is sent
    ):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host or elsewhere, 9))
            found = str(probe.getsockname()[0])
            if not host or _is_loopback(host) or not _is_loopback(found):
                return found
    return own_address() if host else "127.0.0.1"


def _is_loopback(host: str) -> bool:
    """Whether an address, or a name by its own meaning, is that of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def rank_addresses(
    bind_host: str | None, advertised_host: str | None = None, towards: str = ""
) -> tuple[str, str]:
    """The address that a rank listens on, and the one that the others connect to.

    Args:
        bind_host: An address, or a network (``'10.0.0.0/8'``); None: the advertised address. IPv6
            addresses may have brackets, as Spark writes them.
        advertised_host: What the others shall connect to; None: what this machine finds out.
        towards: See :func:`own_address`.

    Raises:
        ResourceError: This machine has no address in that network.
    """
    advertised_host = advertised_host and advertised_host.strip("[]")
    if bind_host is None:
        own = advertised_host or own_address(towards)
        return own, own
    bind_host = bind_host.strip("[]")
    bind = address_in(bind_host) if "/" in bind_host else bind_host
    return bind, advertised_host or (own_address(towards) if bind in _ANYWHERE else bind)


def interface_addresses() -> dict[str, str]:
    """Network interface -> its IPv4 address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _IOCTL_ADDRESS, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Network interface and IPv6 address, of each address that other hosts could use."""
    found = []
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        for line in table:
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(int(digits, 16))
            if not address.is_link_local:  # those need the interface's name as well
                found.append((name, str(address)))
    return found


def address_in(network: str) -> str:
    """This machine's address in a network.

    Raises:
        ResourceError: It has none.
    """
    wanted = ipaddress.ip_network(network, strict=False)
    addresses = [*interface_addresses().items(), *_ipv6_addresses()]
    for _, address in addresses:
        if ipaddress.ip_address(address) in wanted:
            return address
    raise ResourceError(
        f"this host ({socket.gethostname()}) has no address in the network {network}",
        expected="Network(worker_bind=...) with a network that all executors' hosts are in",
        received="; ".join(f"{name}: {address}" for name, address in addresses),
    )


def host_id() -> str:
    """Equal for processes that can share memory and Unix sockets, different for others.

    The kernel's boot id tells machines apart, the network name space tells apart containers whose
    abstract Unix sockets do not meet. Where there is neither (not Linux) the host's name.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def loopback_of(bind_address: str) -> str:
    """An address under which this host itself reaches what listens on ``bind_address``.

    >>> loopback_of('0.0.0.0'), loopback_of('10.0.0.5')
    ('127.0.0.1', '10.0.0.5')
    """
    host = bind_address.strip("[]")
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def reachable_host(bind_address: str) -> str:
    """An address of this host for others, if ``bind_address`` is a wildcard."""
    bind = bind_address.strip("[]")
    return own_address() if bind in _ANYWHERE else bind
