"""Makes the Horovod communicator: first the built-in one, through which the ranks agree on it."""

from __future__ import annotations

import importlib
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from sparkdl.collective.communicator import (
    BuiltinOptions,
    Connector,
    HorovodOptions,
    make_communicator,
)
from sparkdl.collective.horovod import (
    CannotStartError,
    HorovodCommunicator,
    gather_reasons,
    unavailable,
)
from sparkdl.collective.member import Member
from sparkdl.collective.ordered import DEFAULT_TIMEOUT_S, OrderedCommunicator
from sparkdl.collective.pending import name_ranks
from sparkdl.errors import ConfigError, ResourceError

_LOG = logging.getLogger(__name__)


class HorovodConnector:
    """Makes the Horovod communicator of one rank.

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
        **options: Unpack[BuiltinOptions],
    ) -> None:
        self._rank, self._interface, self._timeout_s = rank, interface, timeout_s
        self._encrypted = options.get("certificate") is not None
        self._builtin: Connector = make_communicator(
            "builtin", rank=rank, timeout_s=timeout_s, **options
        )

    def prepare(self) -> Member:
        """Opens the sockets of the built-in communicator; imports no framework."""
        return _named(self._builtin.prepare(), HorovodCommunicator.name)

    def connect(self, members: Sequence[Member], token: bytes) -> HorovodCommunicator:
        """Connects all ranks and initialises Horovod.

        Raises:
            ResourceError: Horovod cannot be used on some ranks; they are named.
        """
        _refuse_others(members, HorovodCommunicator.name)
        builtin = self._connect_builtin(members, token)
        try:
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
        except BaseException:
            builtin.close()
            raise

    def connect_faster(
        self, members: Sequence[Member], token: bytes, size_bytes: int
    ) -> OrderedCommunicator:
        """The faster of Horovod and the built-in communicator; see :class:`AutoConnector`."""
        builtin = self._connect_builtin(members, token)
        try:
            if self._encrypted or _lacking(builtin, members):
                return builtin
            known = _known(builtin, members, size_bytes)
            if known is not None and known.builtin_wins:
                builtin.measured = known.seconds
                return builtin
            try:
                horovod = HorovodCommunicator(builtin, members, self._interface, self._timeout_s)
            except CannotStartError as error:
                if not size_bytes:
                    raise
                _LOG.warning("%s; the built-in communicator reduces in its place", error)
                return builtin
            if not size_bytes:
                return horovod
            if known is None:
                known = _measure(builtin, horovod, size_bytes)
                _KNOWN[_key(members, size_bytes)] = known
            if known.builtin_wins:
                horovod.leave()
            chosen = builtin if known.builtin_wins else horovod
            chosen.measured = known.seconds
            return chosen
        except BaseException:
            builtin.close()
            raise

    def _connect_builtin(self, members: Sequence[Member], token: bytes) -> OrderedCommunicator:
        builtin = self._builtin.connect([_named(m, "builtin") for m in members], token)
        if not isinstance(builtin, OrderedCommunicator):
            raise ConfigError(
                "Horovod needs the built-in communicator",
                expected="an OrderedCommunicator from its connector",
                received=type(builtin).__name__,
            )
        return builtin

    def close(self) -> None:
        """Closes the sockets, unless a communicator uses them. Can be repeated."""
        self._builtin.close()


class AutoConnector:
    """The faster of Horovod and the built-in communicator, measured when the ranks have met.

    Both reduce a buffer of ``size_bytes`` some times; the slowest rank's median counts. A process
    remembers the answer, so that a later fit connects at once. Without measuring Horovod is taken
    where it reduces on GPUs (NCCL), and the built-in communicator where a rank lacks Horovod or
    cannot start it, and in encrypted runs.

    Args:
        rank: This rank, from 0.
        size_bytes: Of what the ranks will reduce most often; 0 takes Horovod wherever it imports
            on all ranks, for functions that call it by themselves.
        **options: Of :class:`HorovodConnector`.
    """

    name = "auto"

    def __init__(
        self, rank: int, *, size_bytes: int = 0, **options: Unpack[HorovodOptions]
    ) -> None:
        self._horovod = HorovodConnector(rank, **options)
        self._size_bytes = size_bytes

    def prepare(self) -> Member:
        """Opens the sockets of the built-in communicator; imports no framework."""
        return _named(self._horovod.prepare(), self.name)

    def connect(self, members: Sequence[Member], token: bytes) -> OrderedCommunicator:
        """Connects the built-in communicator, and Horovod where that is faster."""
        _refuse_others(members, self.name)
        return self._horovod.connect_faster(members, token, self._size_bytes)

    def close(self) -> None:
        """Closes the sockets, unless a communicator uses them. Can be repeated."""
        self._horovod.close()


@dataclass(frozen=True)
class _Comparison:
    """What was measured: the name of a communicator -> seconds of one reduction."""

    seconds: Mapping[str, float]

    @property
    def builtin_wins(self) -> bool:
        return self.seconds["builtin"] <= self.seconds["horovod"]


_MOST_BYTES = 32 << 20
"""Larger buffers take proportionally longer with either communicator."""
_KNOWN: dict[tuple[str | int, ...], _Comparison] = {}


def _key(members: Sequence[Member], size_bytes: int) -> tuple[str | int, ...]:
    """What a comparison depends on: the ranks' hosts, and about how much they reduce."""
    return (*(m.host_id for m in members), size_bytes.bit_length())


def _known(
    builtin: OrderedCommunicator, members: Sequence[Member], size_bytes: int
) -> _Comparison | None:
    """What all ranks remember of an earlier comparison; None if one of them remembers nothing."""
    known = _KNOWN.get(_key(members, size_bytes))
    mine = -1.0 if known is None else float(known.builtin_wins)
    answers = np.array([float(answer) for answer in builtin.all_gather(np.float64(mine))])
    return known if (answers == mine).all() and mine >= 0 else None


def _measure(
    builtin: OrderedCommunicator, horovod: HorovodCommunicator, size_bytes: int
) -> _Comparison:
    """Reduces a buffer with both; the same on all ranks, for the slowest one's times count."""
    buffer = np.zeros(max(1, min(size_bytes, _MOST_BYTES) // 4), np.float32)
    repeats = 9 if buffer.nbytes < 1 << 20 else 3
    ways: dict[str, Callable[[], object]] = {
        "builtin": lambda: builtin.all_reduce(buffer, out=buffer),
        "horovod": lambda: horovod.reduce_plainly(buffer),
    }
    times = {name: np.empty(repeats) for name in ways}
    for reduce in ways.values():  # the first one makes connections and buffers
        reduce()
    for number in range(repeats):
        for name, reduce in ways.items():
            builtin.barrier()
            began = time.perf_counter()
            reduce()
            times[name][number] = time.perf_counter() - began
    medians = np.array([np.median(times[name]) for name in ways])
    on_gpus = float(horovod.reduces_on_gpus)
    slowest = builtin.all_reduce(medians, "max")
    if builtin.all_reduce(np.float64(on_gpus), "min") > 0:
        slowest[list(ways).index("builtin")] = np.inf
    return _Comparison(dict(zip(ways, slowest.tolist(), strict=True)))


def _lacking(builtin: OrderedCommunicator, members: Sequence[Member]) -> dict[int, str]:
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


def _refuse_others(members: Sequence[Member], name: str) -> None:
    others = sorted({m.communicator for m in members} - {name})
    if others:
        raise ConfigError(
            f"cannot connect the {name} communicator",
            expected="all ranks prepared for it",
            received=f"ranks prepared for {', '.join(map(repr, others))}",
            hint="pass the same communicator= on all ranks",
        )
