"""The addresses at which the driver and the ranks listen, and the encryption of their traffic."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

from sparkdl.errors import ConfigError
from sparkdl.process.user_warnings import warn_user
from sparkdl.settings.values import (
    UserSettings,
    ValueKind,
    checked,
    flag_or_text,
    number_or_text,
    one_of,
    or_none,
    require_instance,
    require_int,
    setting,
)

PortSpec = int | str | tuple[int, int]
Encrypt = Literal["auto"] | bool


def check_address(name: str, address: object) -> str:
    """Returns an address that is a text; raises ConfigError."""
    if not isinstance(address, str) or not address.strip():
        raise ConfigError(
            f"{name} must be an address",
            expected="a name or an IP address as a text, such as '10.0.0.7', or None",
            received=repr(address)[:200],
        )
    return address


def check_worker_bind(name: str, bind: object) -> str:
    """Returns an address or a network; raises ConfigError."""
    try:
        ipaddress.ip_network(check_address(name, bind), strict=False)
    except ValueError as error:
        raise ConfigError(
            "worker_bind must say where the workers listen",
            expected="None, an address, or a network that each worker's host has an address of, "
            "such as '10.0.0.0/8'",
            received=repr(bind),
            hint="'0.0.0.0' is every address",
        ) from error
    return str(bind)


def check_encrypt(encrypt: object) -> Encrypt:
    """Returns ``encrypt`` if it is ``'auto'``, True or False; raises ConfigError."""
    if encrypt != "auto" and not isinstance(encrypt, bool):
        raise ConfigError(
            "encrypt must say whether traffic between hosts is encrypted",
            expected="'auto', True or False", received=repr(encrypt),
            hint="'auto' does as spark.network.crypto.enabled and spark.ssl.rpc.enabled say",
        )  # fmt: skip
    return "auto" if encrypt == "auto" else bool(encrypt)


def check_ports(spec: Any) -> PortSpec:
    """Returns what :func:`ports_of` understands; raises ConfigError."""
    ports_of(spec)
    return spec  # type: ignore[no-any-return]


def check_num_servers(count: object) -> int | str:
    """Returns ``count`` if it is ``'auto'`` or a number of servers; raises ConfigError."""
    return "auto" if count == "auto" else require_int("num_servers", count, 1)


NETWORK_OF_RANKS = (
    "port", "server_bind", "server_address", "worker_port", "worker_bind", "encrypt",
)  # fmt: skip
"""The fields that mean something where there is no parameter server."""
PORTS = checked(check_ports, number_or_text)
ADDRESS = or_none(ValueKind(check_address))


@dataclass(frozen=True)
class Network(UserSettings):
    """The addresses of driver and ranks and their encryption, for ``SparkModel``, ``run``,
    ``launch`` and ``doctor``.

    Args:
        port: The driver's port: 0 for any free one, a number, or a range ``'7000-7010'``.
        server_bind: Address that the driver listens on; None for the narrowest that works.
        server_address: Address that the ranks connect to, if it differs (NAT, several networks).
        worker_port: The ranks' own ports, as ``port``: a range has one for each rank of a host;
            in ``run`` with ``distributed`` two, with a stream one more. Horovod takes any.
        worker_bind: Address or network (``'10.0.0.0/8'``) that the ranks listen on; None for the
            address from which a rank's host reaches the driver.
        encrypt: Whether traffic between hosts is encrypted (TLS): ``'auto'`` as Spark's own
            (``spark.network.crypto.enabled``, ``spark.ssl.rpc.enabled``), but calls of a program's
            nodes, which are pickled, always; True; False. Horovod's cannot be, nor what a framework
            sends by itself.
        num_servers: For ``SparkModel`` in the modes with a server: servers that hold the weights,
            each a range of them; a number, or ``'auto'``: one beside the driver, else one for each
            executor with a slot to spare, and no more than workers.
        servers: ``'driver'``: they are processes beside the driver, and share its link;
            ``'executors'``: tasks of Spark, each in a slot of its own, on the links of their hosts.

    Raises:
        ConfigError: A value that is not of its kind.
    """

    port: PortSpec = setting(0, PORTS)
    server_bind: str | None = setting(None, ADDRESS)
    server_address: str | None = setting(None, ADDRESS)
    worker_port: PortSpec = setting(0, PORTS)
    worker_bind: str | None = setting(None, or_none(ValueKind(check_worker_bind)))
    encrypt: Encrypt = setting("auto", checked(check_encrypt, flag_or_text))
    num_servers: int | str = setting(1, checked(check_num_servers, number_or_text))
    servers: str = setting("driver", one_of(("driver", "executors")))


def at_port(network: Network, port: PortSpec) -> Network:
    """Settings with the argument ``port`` of a call, 0 of which says nothing.

    Raises:
        ConfigError: Both name a port, and not the same; or they are no :class:`Network`.
    """
    network = require_instance("network", network, Network)
    if check_ports(port) == 0 or port == network.port:
        return network
    if network.port != 0:
        raise ConfigError(
            "the server's port is named twice", expected="port=... or network=Network(port=...)",
            received=f"port={port!r}, network=Network(port={network.port!r})",
        )  # fmt: skip
    return replace(network, port=port)


class ListeningOptions(TypedDict, total=False):
    """A :class:`RankListening` as arguments of a communicator's connector."""

    bind_host: str | None
    port: PortSpec
    towards: str


@dataclass(frozen=True)
class RankListening:
    """The address at which a rank listens; made on the driver, resolved on the rank's host.

    Args:
        bind: Address or network; None for the address from which the host reaches ``towards``.
        port: See :func:`ports_of`.
        towards: A host that all ranks reach: the driver's.
    """

    bind: str | None = None
    port: PortSpec = 0
    towards: str = ""

    def options(self) -> ListeningOptions:
        """As arguments of :class:`sparkdl.collective.builtin.BuiltinConnector`."""
        return {"bind_host": self.bind, "port": self.port, "towards": self.towards}


THIS_HOST = RankListening("127.0.0.1")
"""The choice for ranks that are all on this machine."""


def require_encryptable(communicator: object) -> None:
    """Returns if what goes through a communicator can be encrypted; raises ConfigError."""
    if communicator == "horovod":
        raise ConfigError(
            "Horovod's connections cannot be encrypted",
            expected="communicator='builtin' or 'auto' in an encrypted run",
            received="communicator='horovod'",
            hint="or network=Network(encrypt=False), where you trust the network",
        )


def say_what_is_in_the_clear(framework: str, encrypt: Encrypt) -> None:
    """Warns that a framework connects the ranks of an encrypted run without encryption.

    Args:
        framework: The framework that connects the ranks.
        encrypt: What the user asked; ``'auto'``, which encrypts what can be, gets a warning.

    Raises:
        ConfigError: The user asked for encryption.
    """
    if encrypt == "auto":
        warn_user(
            f"what {framework} sends between the ranks by itself is not encrypted and shows no "
            "token, although Spark's traffic and sparkdl's are encrypted here; "
            "Network(encrypt=False) leaves out sparkdl's, and this warning"
        )
        return
    raise ConfigError(
        f"the connections that {framework} makes between the ranks cannot be encrypted",
        expected="a run without distributed= and roles= where encrypt=True",
        received=f"encrypt=True and ranks for {framework}",
        hint="encrypt='auto' or False, on a network that you trust; "
        "sparkdl.communicator() exchanges arrays encrypted",
    )


def ports_of(spec: PortSpec) -> range:
    """The ports to try: ``0`` any free one, ``7000``, ``'7000-7010'`` or ``(7000, 7010)``.

    Raises:
        ConfigError: It is none of these.
    """
    try:
        if isinstance(spec, str):
            first, _, last = spec.partition("-")
            edges = int(first), int(last or first)
        elif isinstance(spec, tuple):
            edges = int(spec[0]), int(spec[1])
        else:
            edges = int(spec), int(spec)
    except (TypeError, ValueError, IndexError):
        edges = (-1, -1)
    if not 0 <= edges[0] <= edges[1] <= 65535:
        raise ConfigError(
            "this is no port", expected="0 for any free one, 7000, '7000-7010' or (7000, 7010)",
            received=repr(spec),
        )  # fmt: skip
    return range(edges[0], edges[1] + 1)
