"""Makes the Horovod communicator: the built-in one first, by which the ranks agree on the rest."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparkdl.collective.communicator import Connector, make_communicator
from sparkdl.collective.horovod import HorovodCommunicator, unavailable
from sparkdl.collective.member import Member
from sparkdl.collective.ordered import DEFAULT_TIMEOUT_S, OrderedCommunicator
from sparkdl.collective.pending import name_ranks
from sparkdl.errors import ConfigError, ResourceError


class HorovodConnector:
    """A Horovod communicator in the making.

    Args:
        rank: This rank, from 0.
        interface: Network interface for Gloo; None: the one that has the advertised address.
        timeout_s: Limit for one operation.
        **options: Of :class:`sparkdl.collective.builtin.BuiltinConnector`.
    """

    def __init__(
        self,
        rank: int,
        *,
        interface: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Any,
    ) -> None:
        self._rank, self._interface, self._timeout_s = rank, interface, timeout_s
        self._beside: Connector = make_communicator(
            "builtin", rank=rank, timeout_s=timeout_s, **options
        )

    def prepare(self) -> Member:
        """Opens and holds the sockets of the communicator beside; imports nothing."""
        return _named(self._beside.prepare(), HorovodCommunicator.name)

    def connect(self, members: Sequence[Member], token: bytes) -> HorovodCommunicator:
        """Connects all ranks and initialises Horovod.

        Raises:
            ResourceError: Horovod cannot be used on some ranks; they are named.
        """
        _refuse_others(members, HorovodCommunicator.name)
        beside = self._connect_beside(members, token)
        try:
            lacking = _lacking(beside, members)
            if lacking:
                raise ResourceError(
                    f"Horovod cannot be used on {name_ranks(sorted(lacking))}",
                    expected="horovod.tensorflow to import on all ranks",
                    received="; ".join(f"rank {r}: {why}" for r, why in sorted(lacking.items())),
                    hint="docker/build_horovod.sh builds and installs it; "
                    "communicator='builtin' needs nothing",
                )
            return HorovodCommunicator(beside, members, self._interface, self._timeout_s)
        except BaseException:
            beside.close()
            raise

    def connect_what_there_is(self, members: Sequence[Member], token: bytes) -> OrderedCommunicator:
        """Horovod if all ranks have it, else the built-in communicator."""
        beside = self._connect_beside(members, token)
        try:
            if _lacking(beside, members):
                return beside
            return HorovodCommunicator(beside, members, self._interface, self._timeout_s)
        except BaseException:
            beside.close()
            raise

    def _connect_beside(self, members: Sequence[Member], token: bytes) -> OrderedCommunicator:
        beside = self._beside.connect([_named(m, "builtin") for m in members], token)
        if not isinstance(beside, OrderedCommunicator):
            raise ConfigError("Horovod needs the built-in communicator beside it")
        return beside

    def close(self) -> None:
        """Closes the sockets, if :meth:`connect` did not take them over."""
        self._beside.close()


class AutoConnector:
    """Horovod if it imports on all ranks, else the built-in communicator.

    Args:
        rank: This rank, from 0.
        **options: Of :class:`HorovodConnector`.
    """

    name = "auto"

    def __init__(self, rank: int, **options: Any) -> None:
        self._horovod = HorovodConnector(rank, **options)

    def prepare(self) -> Member:
        """Opens and holds the sockets that either needs; imports nothing."""
        return _named(self._horovod.prepare(), self.name)

    def connect(self, members: Sequence[Member], token: bytes) -> OrderedCommunicator:
        """Connects what all ranks have."""
        _refuse_others(members, self.name)
        return self._horovod.connect_what_there_is(members, token)

    def close(self) -> None:
        """Closes the sockets, if :meth:`connect` did not take them over."""
        self._horovod.close()


def _lacking(beside: OrderedCommunicator, members: Sequence[Member]) -> dict[int, str]:
    """Rank -> why Horovod cannot be used there."""
    reason = unavailable() or _unreachable(members)
    mine = np.frombuffer(reason[:500].encode(), np.uint8)
    told = [array.tobytes().decode(errors="replace") for array in beside.all_gather(mine)]
    return {rank: why for rank, why in enumerate(told) if why}


def _unreachable(members: Sequence[Member]) -> str:
    """Why other hosts cannot reach Horovod here; it would end the process. Empty if they can.

    Horovod 0.28.1 listens on the address that the host's name resolves to, whatever interface it
    is told; docker/build_horovod.sh mends that.
    """
    version = str(importlib.import_module("horovod").__version__)
    if len({m.host_id for m in members}) == 1 or "sparkdl" in version:
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


def _refuse_others(members: Sequence[Member], name: str) -> None:
    others = sorted({m.communicator for m in members} - {name})
    if others:
        raise ConfigError(
            f"cannot connect the {name} communicator",
            expected="all ranks prepared for it",
            received=f"ranks prepared for {', '.join(map(repr, others))}",
        )
