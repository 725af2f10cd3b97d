"""The communicator protocol: operations of all ranks together; and how one is made by name.

A communicator is made in three steps. Between the first and the last the ranks exchange one text
each, by what the launcher provides (in Spark a barrier stage's ``allGather``)::

    connector = make_communicator('builtin', rank=rank)
    member = connector.prepare()                      # opens the sockets that others connect to
    members = [Member.from_json(t) for t in context.allGather(member.to_json())]
    with connector.connect(members, token) as communicator:
        communicator.all_reduce(gradient, 'mean', out=gradient)
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Unpack, runtime_checkable

import numpy.typing as npt

from sparkdl.collective.arithmetic import Array
from sparkdl.errors import ProtocolError, UnknownNameError
from sparkdl.settings.network import ListeningOptions

if TYPE_CHECKING:
    from sparkdl.wire.tls import Certificate


@dataclasses.dataclass(frozen=True)
class Member:
    """The addresses of one rank, which the ranks tell each other before they connect.

    Args:
        host: Address that the other hosts can connect to.
        port: TCP port of the listening socket, 0 if there is none.
        host_id: Equal for ranks that can share memory, different for all others.
        local: Name of the listening Unix socket for ranks of the same ``host_id``.
        communicator: Name of the communicator that this rank is prepared for.
    """

    host: str
    port: int
    host_id: str
    local: str = ""
    communicator: str = ""

    def to_json(self) -> str:
        """This member as one line, for a barrier's ``allGather``."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Member:
        """The counterpart of :meth:`to_json`.

        Raises:
            ProtocolError: The text is not a member.

        >>> Member.from_json(Member('10.0.0.1', 4711, 'a').to_json()).port
        4711
        """
        try:
            fields = json.loads(text)
            member = cls(**fields)
        except (ValueError, TypeError) as error:
            raise ProtocolError(
                "this text is no member of the world",
                expected="the JSON text of Member.to_json()",
                received=repr(text[:200]),
            ) from error
        texts = (member.host, member.host_id, member.local, member.communicator)
        if not all(isinstance(t, str) for t in texts) or not isinstance(member.port, int):
            raise ProtocolError(
                "this text is no member of the world",
                expected="texts, and a whole number as port",
                received=repr(text[:200]),
            )
        return member


class ReduceHandle(Protocol):
    """An all-reduce that runs in the background."""

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""

    def wait(self, timeout_s: float | None = None) -> Array:
        """The result once it is there; WaitTimeoutError names the ranks that are missing."""


@runtime_checkable
class Communicator(Protocol):
    """Collective operations among ``size`` ranks.

    Every rank calls the same operations in the same order, with arrays of equal shape and dtype
    (``all_gather`` and ``all_to_all`` take different shapes). What all ranks get is the same bits.
    Arrays of any shape; dtypes: ``sparkdl.collective.arithmetic.DTYPES``. One operation runs at a
    time, in the order of the calls. A wait that passes the communicator's limit raises
    WaitTimeoutError, which names the missing ranks; a rank that is gone raises TransportError on
    all others within seconds. After either the communicator has failed for good.
    """

    @property
    def name(self) -> str:
        """``'builtin'``, ``'horovod'`` and so on."""

    @property
    def in_graph(self) -> bool:
        """Whether a compiled TensorFlow step may call Horovod's operations itself."""

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
    ) -> ReduceHandle:
        """:meth:`all_reduce` in the background.

        The caller must not touch ``array`` and ``out`` until it has waited for the handle.
        """

    def reduce_scatter(
        self,
        array: npt.ArrayLike,
        op: str = "sum",
        weight: float = 1.0,
        out: Array | None = None,
    ) -> Array:
        """This rank's part of :meth:`all_reduce`, flat.

        Rank ``r`` gets elements ``[n·r//size, n·(r+1)//size)`` of the flattened array, the parts
        of ``Layout.shards(size)``. ``out`` may be this part of ``array`` itself, which saves a
        copy of the whole with Horovod: the rest of ``array`` is undefined then. Between three and
        more hosts of several ranks each the last bits may differ from :meth:`all_reduce`, whose
        rings carry other bytes; on all ranks and in each repetition they are the same.
        """

    def all_gather(self, array: npt.ArrayLike) -> list[Array]:
        """Every rank's array in rank order; shapes and dtypes may differ between ranks."""

    def all_to_all(self, parts: Sequence[npt.ArrayLike]) -> list[Array]:
        """The parts that every rank has for this one, in rank order.

        Args:
            parts: ``size`` arrays of one dimension; the one at ``r`` goes to rank ``r``. Lengths
                may differ, the dtype is the same on all ranks.
        """

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
        """The communicator's own error, if ``error`` was raised because of it; else ``error``.

        A compiled step replaces the exceptions raised inside it by its own, which have their text
        only.
        """

    def close(self) -> None:
        """Frees everything; the other ranks' operations with this one fail. Can be repeated."""


class Connector(Protocol):
    """Makes the communicator of one rank."""

    def prepare(self) -> Member:
        """Opens the sockets that the other ranks connect to; returns where they are."""

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
        """Closes what :meth:`prepare` opened, unless a communicator uses it. Can be repeated."""


class BuiltinOptions(ListeningOptions, total=False):
    """Arguments of :class:`sparkdl.collective.builtin.BuiltinConnector` that all but ``'solo'``
    take."""

    advertised_host: str | None
    host_id: str | None
    connect_timeout_s: float
    certificate: Certificate | None


class HorovodOptions(BuiltinOptions, total=False):
    """Arguments of :class:`sparkdl.collective.horovod_connector.HorovodConnector`."""

    interface: str | None
    timeout_s: float


class ConnectorOptions(HorovodOptions, total=False):
    """Arguments of any connector; one refuses what it does not know."""

    calls_horovod: bool


# Imported when used: Horovod imports TensorFlow, and tests need no sockets.
COMMUNICATORS = {
    "auto": "sparkdl.collective.horovod_connector:AutoConnector",
    "builtin": "sparkdl.collective.builtin:BuiltinConnector",
    "horovod": "sparkdl.collective.horovod_connector:HorovodConnector",
    "solo": "sparkdl.collective.current:SoloConnector",
}


def make_communicator(
    name: str = "auto", *, rank: int, **options: Unpack[ConnectorOptions]
) -> Connector:
    """The connector of a communicator, by name.

    Args:
        name: ``'builtin'``, ``'horovod'``, ``'solo'``, or ``'auto'``: Horovod where it reduces on
            GPUs on all ranks, else the built-in one.
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
