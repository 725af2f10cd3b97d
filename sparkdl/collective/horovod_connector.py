"""Makes the Horovod communicator: first the built-in one, through which the ranks agree on it."""

from __future__ import annotations

import importlib
import logging
import socket
from collections.abc import Sequence
from typing import Unpack

import numpy as np

from sparkdl.collective.communicator import (
    DEFAULT_TIMEOUT_S,
    BuiltinOptions,
    Communicator,
    Connector,
    HorovodOptions,
    Member,
    make_communicator,
    name_ranks,
    refuse_others,
)
from sparkdl.collective.horovod import (
    CannotStartError,
    HorovodCommunicator,
    gather_reasons,
    reduces_on_gpus,
    unavailable,
)
from sparkdl.errors import ResourceError

_LOG = logging.getLogger(__name__)


class HorovodConnector:
    """Makes the Horovod communicator of one rank.

    Args:
        rank: This rank, from 0.
        interface: Network interface for Gloo; None: the one that has the advertised address.
        **options: Options of :class:`sparkdl.collective.builtin.BuiltinConnector`.
    """

    name = HorovodCommunicator.name

    def __init__(
        self,
        rank: int,
        *,
        interface: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Unpack[BuiltinOptions],
    ) -> None:
        self._rank, self._interface, self._timeout_s = rank, interface, timeout_s
        self._builtin: Connector = make_communicator(
            "builtin", rank=rank, timeout_s=timeout_s, **options
        )

    def prepare(self) -> Member:
        """Opens the sockets of the built-in communicator; imports no framework."""
        return _named(self._builtin.prepare(), self.name)

    def connect(self, members: Sequence[Member], token: bytes) -> Communicator:
        """Connects all ranks with the built-in communicator, and then with Horovod.

        Raises:
            ResourceError: Horovod cannot be used on some ranks; they are named.
        """
        refuse_others(members, self.name)
        builtin = self._builtin.connect([_named(m, "builtin") for m in members], token)
        try:
            return self._connected(builtin, members)
        except BaseException:
            builtin.close()
            raise

    def _connected(self, builtin: Communicator, members: Sequence[Member]) -> Communicator:
        lacking = _lacking(builtin, members)
        if lacking:
            raise ResourceError(
                f"Horovod cannot be used on {name_ranks(sorted(lacking))}",
                expected="horovod.tensorflow to import on all ranks",
                received="; ".join(f"rank {r}: {why}" for r, why in sorted(lacking.items())),
                hint="docker/build_horovod.sh builds and installs it; "
                "communicator='builtin' needs no installation",
            )
        return HorovodCommunicator(builtin, members, self._interface, self._timeout_s)

    def close(self) -> None:
        self._builtin.close()


class AutoConnector(HorovodConnector):
    """Horovod where it reduces on GPUs (NCCL) on all ranks, else the built-in communicator.

    The choice follows from what is installed and never from the clock, so that two runs of one
    fit round alike. The built-in communicator is also taken where a rank lacks Horovod or cannot
    start it, and in encrypted runs.

    Args:
        rank: This rank, from 0.
        calls_horovod: The ranks run functions that may call Horovod by themselves: Horovod is
            taken wherever it imports on all ranks.
        **options: Options of :class:`HorovodConnector`.
    """

    name = "auto"

    def __init__(
        self, rank: int, *, calls_horovod: bool = True, **options: Unpack[HorovodOptions]
    ) -> None:
        super().__init__(rank, **options)
        self._calls_horovod = calls_horovod
        self._encrypted = options.get("certificate") is not None

    def _connected(self, builtin: Communicator, members: Sequence[Member]) -> Communicator:
        if self._encrypted or not (self._calls_horovod or self._all_reduce_on_gpus(builtin)):
            return builtin
        if _lacking(builtin, members):
            return builtin
        try:
            return HorovodCommunicator(builtin, members, self._interface, self._timeout_s)
        except CannotStartError as error:
            if self._calls_horovod:
                raise
            _LOG.warning("%s; the built-in communicator reduces in its place", error)
            return builtin

    @staticmethod
    def _all_reduce_on_gpus(builtin: Communicator) -> bool:
        """Whether Horovod would reduce on every rank's GPUs; the same on all ranks."""
        return float(builtin.all_reduce(np.float64(reduces_on_gpus()), "min")) > 0


def _lacking(builtin: Communicator, members: Sequence[Member]) -> dict[int, str]:
    """Rank -> the reason why Horovod cannot be used there; empty if it can on all ranks."""
    return gather_reasons(builtin, unavailable() or unreachable(members))


def unreachable(members: Sequence[Member]) -> str:
    """The reason why other hosts cannot reach Horovod here; empty if they can.

    Horovod 0.28.1 listens on the address that the host's name resolves to, and ignores the
    interface that it is given; where others cannot connect, it ends the process. The build of
    docker/build_horovod.sh listens on the interface. Neither connects over IPv6.
    """
    if len({m.host_id for m in members}) == 1:
        return ""
    version = str(importlib.import_module("horovod").__version__)
    of_ipv6 = sorted({m.host for m in members if ":" in m.host})
    if of_ipv6:
        return f"horovod {version} connects over IPv4 only, the ranks' addresses: {of_ipv6}"
    if "sparkdl" in version:
        return ""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        address = f"nothing ({error})"
    if address.startswith(("127.", "nothing")):
        return f"horovod {version} would listen where this host's name resolves to: {address}"
    return ""


def _named(member: Member, name: str) -> Member:
    return Member(member.host, member.port, member.host_id, member.local, name)
