"""The addresses at which the driver and the ranks listen, and the encryption of their traffic."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from sparkdl.errors import ConfigError
from sparkdl.user_warnings import warn_user

PortSpec = int | str | tuple[int, int]
Encrypt = Literal["auto"] | bool


@dataclass(frozen=True)
class Network:
    """The user's settings of addresses, ports and encryption, for ``SparkModel`` or ``run``.

    Args:
        port: The driver's; see :func:`ports_of`.
        server_bind: Address that the driver listens on; None for the narrowest that works.
        server_address: Address that ranks connect to; None for the one that the driver listens on.
        worker_port: The ranks'; several ranks of a host need a range.
        worker_bind: Address or network (``'10.0.0.0/8'``) that the ranks listen on; None for the
            address from which a rank's host reaches the driver.
        encrypt: ``'auto'``, True or False. ``'auto'``: never on one host; between hosts as Spark's
            own traffic, but calls of a program's nodes, which are pickled, always.

    Raises:
        ConfigError: A value that is not of its kind.
    """

    port: PortSpec = 0
    server_bind: str | None = None
    server_address: str | None = None
    worker_port: PortSpec = 0
    worker_bind: str | None = None
    encrypt: Encrypt = "auto"

    def __post_init__(self) -> None:
        ports_of(self.port)
        ports_of(self.worker_port)
        for name in ("server_bind", "server_address", "worker_bind"):
            _check_address(name, getattr(self, name))
        check_worker_bind(self.worker_bind)
        check_encrypt(self.encrypt)


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


def check_encrypt(encrypt: Any) -> Encrypt:
    """Returns ``encrypt`` if it is ``'auto'``, True or False; raises ConfigError."""
    if encrypt != "auto" and not isinstance(encrypt, bool):
        raise ConfigError(
            "encrypt must say whether traffic between hosts is encrypted",
            expected="'auto', True or False",
            received=repr(encrypt),
            hint="'auto' does as spark.network.crypto.enabled and spark.ssl.rpc.enabled say",
        )
    return "auto" if encrypt == "auto" else bool(encrypt)


def require_encryptable(communicator: str) -> None:
    """Returns if what goes through a communicator can be encrypted; raises ConfigError."""
    if communicator == "horovod":
        raise ConfigError(
            "Horovod's connections cannot be encrypted",
            expected="communicator='builtin' or 'auto' in an encrypted run",
            received="communicator='horovod'",
            hint="or encrypt=False, on a network that you trust",
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
            "token, although Spark's traffic and sparkdl's are encrypted here; encrypt=False "
            "leaves out sparkdl's, and this warning"
        )
        return
    raise ConfigError(
        f"the connections that {framework} makes between the ranks cannot be encrypted",
        expected="a run without distributed= and roles= where encrypt=True",
        received=f"encrypt=True and ranks for {framework}",
        hint="encrypt='auto' or False, on a network that you trust; "
        "sparkdl.communicator() exchanges arrays encrypted",
    )


def _check_address(name: str, address: Any) -> None:
    """Refuses an address that is no text."""
    if address is not None and (not isinstance(address, str) or not address.strip()):
        raise ConfigError(
            f"{name} must be an address",
            expected="a name or an IP address as a text, such as '10.0.0.7', or None",
            received=repr(address)[:200],
        )


def check_worker_bind(bind: Any) -> str | None:
    """Returns ``bind`` if it is an address, a network or None; raises ConfigError."""
    try:
        if bind is not None:
            ipaddress.ip_network(bind, strict=False)
    except ValueError as error:
        raise ConfigError(
            "worker_bind must say where the workers listen",
            expected="None, an address, or a network that each worker's host has an address of, "
            "such as '10.0.0.0/8'",
            received=repr(bind),
            hint="'0.0.0.0' is every address",
        ) from error
    return bind  # type: ignore[no-any-return]


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
            "this is no port",
            expected="0 for any free one, 7000, '7000-7010' or (7000, 7010)",
            received=repr(spec),
        )
    return range(edges[0], edges[1] + 1)
