"""How ranks talk: the communicator protocol, the world of one, and the registry of names.

A communicator is made in three steps, with one exchange in between that the launcher provides
(in Spark a barrier stage's ``allGather``)::

    connector = make_communicator('builtin', rank=rank)
    member = connector.prepare()                      # opens and holds what others connect to
    members = [Member.from_json(t) for t in context.allGather(member.to_json())]
    with connector.connect(members, token) as communicator:
        communicator.all_reduce(gradient, 'mean', out=gradient)
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sparkdl.collective.arithmetic import put_scaled, reduction_factors
from sparkdl.collective.member import Member
from sparkdl.collective.ordered import (
    DEFAULT_TIMEOUT_S,
    Array,
    OrderedCommunicator,
)
from sparkdl.collective.pending import Pending
from sparkdl.errors import ConfigError, UnknownNameError

__all__ = [
    "COMMUNICATORS",
    "Communicator",
    "Connector",
    "Handle",
    "Member",
    "Pending",
    "SoloCommunicator",
    "SoloConnector",
    "make_communicator",
]


class Handle(Protocol):
    """An all-reduce under way."""

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""

    def wait(self, timeout_s: float | None = None) -> Array:
        """The result once it is there; WaitTimeoutError names the ranks that are missing."""


@runtime_checkable
class Communicator(Protocol):
    """Collective operations among ``size`` ranks.

    Every rank calls the same operations in the same order, with arrays of equal shape and dtype
    (``all_gather`` alone takes different shapes). Results are the same bits on all ranks. Arrays
    of any shape; dtypes: ``sparkdl.collective.ordered.DTYPES``. One operation runs at a time, in
    the order of the calls. A wait that passes the communicator's limit raises WaitTimeoutError,
    which names the missing ranks; a rank that is gone raises TransportError on all others within
    seconds. After either the communicator has failed for good.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def local_rank(self) -> int:
        """This rank among those on its host."""

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""

    def all_reduce(
        self,
        array: npt.ArrayLike,
        op: str = "sum",
        weight: float = 1.0,
        out: Array | None = None,
    ) -> Array:
        """The reduction of every rank's array, on every rank.

        Args:
            array: This rank's contribution.
            op: ``'sum'``; ``'mean'``; ``'weighted'``, ``Σ w_i x_i / Σ w_i``; ``'max'``; ``'min'``.
                Means need floating-point numbers.
            weight: ``w_i`` of ``'weighted'``, at least 0. A rank of weight 0 contributes nothing,
                whatever its array holds; if all are 0 the result is 0.
            out: Where the result goes; ``array`` itself is fine and fastest. None: a new array.

        Returns:
            ``out``, or the new array.
        """

    def all_reduce_async(
        self,
        array: npt.ArrayLike,
        op: str = "sum",
        weight: float = 1.0,
        out: Array | None = None,
    ) -> Handle:
        """:meth:`all_reduce` in the background; ``array`` and ``out`` are its own until waited."""

    def reduce_scatter(
        self,
        array: npt.ArrayLike,
        op: str = "sum",
        weight: float = 1.0,
        out: Array | None = None,
    ) -> Array:
        """This rank's part of :meth:`all_reduce`, flat.

        Rank ``r`` gets elements ``[n·r//size, n·(r+1)//size)`` of the flattened array, the parts
        of ``Layout.shards(size)``.
        """

    def all_gather(self, array: npt.ArrayLike) -> list[Array]:
        """Every rank's array in rank order; shapes and dtypes may differ between ranks."""

    def broadcast(self, array: npt.ArrayLike, root: int = 0, out: Array | None = None) -> Array:
        """The root's array on every rank; on the others ``array`` gives shape and dtype only."""

    def barrier(self) -> None:
        """Returns when all ranks have called it."""

    def group(self, ranks: Sequence[int]) -> Communicator:
        """A communicator among some ranks, renumbered from 0 in their order here.

        Only those ranks call it, each with the same ranks; each group has its own order of
        operations. Closed with its parent.
        """

    def explain(self, error: BaseException) -> BaseException:
        """What failed here, if ``error`` came of it inside a compiled step, which keeps its text
        only; else ``error`` itself."""

    def close(self) -> None:
        """Frees everything; the other ranks' operations with this one fail. Can be repeated."""


class Connector(Protocol):
    """A communicator in the making on one rank."""

    def prepare(self) -> Member:
        """Opens and holds what the other ranks connect to; tells where that is."""

    def connect(self, members: Sequence[Member], token: bytes) -> Communicator:
        """Connects all ranks.

        Args:
            members: What :meth:`prepare` returned on each rank, in rank order.
            token: The run's secret, the same on all ranks; at least 16 bytes.

        Raises:
            AuthenticationError: A peer has another token.
            WaitTimeoutError: A rank did not come in time; it is named.
            TransportError: A rank cannot be reached.
        """

    def close(self) -> None:
        """Frees what :meth:`prepare` opened, if :meth:`connect` did not take it over."""


class SoloCommunicator(OrderedCommunicator):
    """The world of one: every operation as with many ranks, and no one to talk to.

    >>> SoloCommunicator().all_reduce([1.0, 3.0], 'weighted', weight=5.0)
    array([1., 3.])
    """

    name = "solo"

    def __init__(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(0, 1, timeout_s=timeout_s)

    def _all_reduce(self, source: Array, target: Array, op: str, weight: float) -> None:
        put_scaled(source, reduction_factors(op, [weight])[0], target)

    def _reduce_scatter(self, source: Array, target: Array, op: str, weight: float) -> None:
        self._all_reduce(source, target, op, weight)

    def _all_gather(self, source: Array) -> list[Array]:
        return [np.array(source)]

    def _broadcast(self, target: Array, root: int) -> None:
        return

    def _barrier(self) -> None:
        return

    def _group(self, ranks: list[int]) -> OrderedCommunicator:
        return SoloCommunicator(timeout_s=self._timeout_s)


class SoloConnector:
    """Makes a :class:`SoloCommunicator`; refuses more than one member."""

    def __init__(self, rank: int = 0, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._rank, self._timeout_s = rank, timeout_s

    def prepare(self) -> Member:
        """A member with no address: nobody connects."""
        return Member("", 0, "solo", communicator="solo")

    def connect(self, members: Sequence[Member], token: bytes) -> Communicator:
        """The world of one."""
        if len(members) != 1 or self._rank != 0:
            raise ConfigError(
                "cannot connect the solo communicator",
                expected="one member, rank 0",
                received=f"{len(members)} members, rank {self._rank}",
                hint="communicator='builtin' connects any number of ranks",
            )
        return SoloCommunicator(timeout_s=self._timeout_s)

    def close(self) -> None:
        """Nothing to free."""


# Names are resolved when used: the registry imports no transport.
COMMUNICATORS = {
    "auto": "sparkdl.collective.horovod_connector:AutoConnector",
    "builtin": "sparkdl.collective.builtin:BuiltinConnector",
    "horovod": "sparkdl.collective.horovod_connector:HorovodConnector",
    "solo": "sparkdl.collective.communicator:SoloConnector",
}


def make_communicator(name: str = "auto", *, rank: int, **options: Any) -> Connector:
    """A communicator in the making, by name.

    Args:
        name: ``'builtin'``, ``'horovod'``, ``'solo'``, or ``'auto'``: Horovod if it imports on
            all ranks, else the built-in one.
        rank: This rank, from 0.
        **options: The connector's own (``timeout_s``, ``bind_host``, …).

    Raises:
        UnknownNameError: No communicator has this name.
    """
    if name not in COMMUNICATORS:
        raise UnknownNameError("communicator", name, sorted(COMMUNICATORS))
    module, _, attribute = COMMUNICATORS[name].partition(":")
    connector: Connector = getattr(importlib.import_module(module), attribute)(rank, **options)
    return connector
