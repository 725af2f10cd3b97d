"""``Communicator``: operations of all ranks together, in order; and how one is made by name.

A communicator is made in three steps. Between the first and the last the ranks exchange one text
each, by what the launcher provides (in Spark a barrier stage's ``allGather``)::

    connector = make_communicator('builtin', rank=rank)
    member = connector.prepare()                      # opens the sockets that others connect to
    members = [Member.from_json(t) for t in context.allGather(member.to_json())]
    with connector.connect(members, token) as communicator:
        communicator.all_reduce(gradient, 'mean', out=gradient)
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import importlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from sparkdl.collective.arithmetic import (
    Array,
    check_array,
    check_gathered,
    check_group,
    check_op,
    check_out,
    check_parts,
    check_root,
    shard_edges,
)
from sparkdl.config import COMMUNICATORS
from sparkdl.errors import (
    ConfigError,
    ProtocolError,
    TransportError,
    UnknownNameError,
    WaitTimeoutError,
)
from sparkdl.process.closing import Closing
from sparkdl.settings.network import ListeningOptions
from sparkdl.settings.registry import is_same_class
from sparkdl.settings.values import require_seconds

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
                "this text is no member of the world", expected="the JSON text of Member.to_json()",
                received=repr(text[:200]),
            ) from error  # fmt: skip
        texts = (member.host, member.host_id, member.local, member.communicator)
        if not all(isinstance(t, str) for t in texts) or not isinstance(member.port, int):
            raise ProtocolError(
                "this text is no member of the world", expected="texts, and a whole number as port",
                received=repr(text[:200]),
            )  # fmt: skip
        return member


def refuse_others(members: Sequence[Member], name: str) -> None:
    """Raises ConfigError if a rank is prepared for another communicator."""
    others = sorted({m.communicator for m in members} - {name})
    if others:
        raise ConfigError(
            f"cannot connect the {name} communicator", expected="all ranks prepared for it",
            received=f"ranks prepared for {', '.join(map(repr, others))}",
            hint="pass the same communicator= on all ranks",
        )  # fmt: skip


T = TypeVar("T")


class Pending(Generic[T]):
    """An operation that runs in the background, or has ended.

    Any thread may wait for it, any number of times. The caller must not touch the operation's
    arrays until :meth:`wait` has returned.
    """

    def __init__(self, work: Callable[[], T], missing: Callable[[], list[int]], what: str) -> None:
        self._work = work
        self._missing = missing
        self._what = what
        self._done = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def run(self, guard: Callable[[Callable[[], T]], T]) -> None:
        """Does the work under ``guard`` and keeps its result or error; never raises."""
        try:
            self._result.append(guard(self._work))
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def done(self) -> bool:
        """Whether :meth:`wait` would return (or raise) at once."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> T:
        """The result, once it is there.

        Args:
            timeout_s: How long to wait at most; None: as long as the communicator's own limit.

        Raises:
            WaitTimeoutError: Not done in time; it goes on, and can be waited for again.
            SparkDLError: What the operation itself raised.
        """
        if not self._done.wait(timeout_s):
            raise WaitTimeoutError(
                f"{self._what} is not done; missing {name_ranks(self._missing())}",
                expected=f"an end within {timeout_s:g} s", received="it still runs",
                hint="wait again, or close the communicator",
            )  # fmt: skip
        if self._error is not None:
            raise self._error
        return self._result[0]


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks as words for an error message.

    >>> name_ranks([3]), name_ranks([1, 2]), name_ranks([])
    ('rank 3', 'ranks 1, 2', 'no rank')
    """
    if not ranks:
        return "no rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(r) for r in ranks)


DEFAULT_TIMEOUT_S = 600.0


class Communicator(Closing):
    """Collective operations among ``size`` ranks.

    Every rank calls the same operations in the same order, with arrays of equal shape and dtype
    (``all_gather`` and ``all_to_all`` take different shapes). What all ranks get is the same bits.
    Arrays of any shape; dtypes: ``sparkdl.collective.arithmetic.DTYPES``. A wait that passes the
    communicator's limit raises WaitTimeoutError, which names the missing ranks; a rank that is gone
    raises TransportError on all others within seconds. After either the communicator has failed for
    good: the ranks may be at different places of an operation.

    One operation runs at a time, in the order of the calls. A synchronous call runs in the caller's
    thread when no operation is queued (the fast path), else it is queued behind the others. Calls
    from several threads are safe only if all ranks issue them in the same order. Arguments are
    checked before anything is sent. A communicator of one kind (TCP and shared memory, Horovod,
    threads) is a subclass with the methods that have an underscore, at the end of the class.

    Args:
        timeout_s: Limit for one operation, after which the communicator has failed.
    """

    name = "communicator"
    """``'builtin'``, ``'horovod'`` and so on."""
    in_graph = False
    """Whether a compiled TensorFlow step may call Horovod's operations itself."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        local_rank: int = 0,
        local_size: int = 1,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(
                f"cannot make a {self.name} communicator", expected="0 <= rank < size",
                received=f"rank {rank}, size {size}",
            )  # fmt: skip
        require_seconds("timeout_s", timeout_s)
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = local_rank, local_size
        self._timeout_s = timeout_s
        self._turn = threading.Condition()
        self._queue: collections.deque[Pending[Any]] = collections.deque()
        self._busy = False
        self._closed = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._groups: list[Communicator] = []

    def all_reduce(
        self, array: npt.ArrayLike, op: str = "sum", weight: float = 1.0, out: Array | None = None
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
        return self._call(self._reduce_work(array, op, weight, out))

    def all_reduce_async(
        self, array: npt.ArrayLike, op: str = "sum", weight: float = 1.0, out: Array | None = None
    ) -> Pending[Array]:
        """:meth:`all_reduce` in the background.

        The caller must not touch ``array`` and ``out`` until it has waited for the handle.
        """
        return self._submit(self._reduce_work(array, op, weight, out), "all_reduce")

    def reduce_scatter(
        self, array: npt.ArrayLike, op: str = "sum", weight: float = 1.0, out: Array | None = None
    ) -> Array:
        """This rank's part of :meth:`all_reduce`, flat.

        Rank ``r`` gets elements ``[n·r//size, n·(r+1)//size)`` of the flattened array, the parts
        of ``Layout.shards(size)``. ``out`` may be this part of ``array`` itself, which saves a
        copy of the whole with Horovod: the rest of ``array`` is undefined then. Between three and
        more hosts of several ranks each the last bits may differ from :meth:`all_reduce`, whose
        rings carry other bytes; on all ranks and in each repetition they are the same.
        """
        source = check_array(array, "reduce_scatter")
        weight = check_op(source, op, weight, "reduce_scatter")
        edges = shard_edges(source.size, self.size)
        shape = (edges[self.rank + 1] - edges[self.rank],)
        target = np.empty(shape, source.dtype) if out is None else out
        check_out(source, target, shape, "reduce_scatter", edges[self.rank])
        flat, result = source.reshape(-1), target.reshape(-1)

        def work() -> Array:
            self._reduce_scatter(flat, result, op, weight)
            return target

        return self._call(work)

    def all_gather(self, array: npt.ArrayLike) -> list[Array]:
        """Every rank's array in rank order; shapes and dtypes may differ between ranks."""
        source = check_array(array, "all_gather")
        check_gathered(source)
        return self._call(lambda: self._all_gather(source))

    def all_to_all(self, parts: Sequence[npt.ArrayLike]) -> list[Array]:
        """The parts that every rank has for this one, in rank order.

        Args:
            parts: ``size`` arrays of one dimension; the one at ``r`` goes to rank ``r``. Lengths
                may differ, the dtype is the same on all ranks.
        """
        sources = check_parts(parts, self.size)
        return self._call(lambda: self._all_to_all(sources))

    def broadcast(self, array: npt.ArrayLike, root: int = 0, out: Array | None = None) -> Array:
        """The root's array on every rank; on the others ``array`` gives shape and dtype only."""
        source = check_array(array, "broadcast")
        check_root(root, self.size)
        target = np.empty_like(source) if out is None else out
        check_out(source, target, source.shape, "broadcast")
        flat, result = source.reshape(-1), target.reshape(-1)

        def work() -> Array:
            if self.rank == root and target is not source:
                np.copyto(result, flat)
            self._broadcast(result, root)
            return target

        return self._call(work)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self._call(self._barrier)

    def group(self, ranks: Sequence[int]) -> Communicator:
        """A communicator among some ranks, renumbered from 0 in their order here.

        Only those ranks call it, each with the same ranks; each group has its own order of
        operations. Closed with its parent.
        """
        members = check_group(ranks, self.rank, self.size)

        def work() -> Communicator:
            made = self._group(members)
            self._groups.append(made)
            return made

        return self._call(work)

    def explain(self, error: BaseException) -> BaseException:
        """The communicator's own error, if ``error`` was raised because of it; else ``error``.

        A compiled step replaces the exceptions raised inside it by its own, which have their text
        only.
        """
        return error if self._failure is None else self._failure

    def close(self) -> None:
        """Frees everything; the other ranks' operations with this one fail. Can be repeated."""
        with self._turn:
            already, self._closed = self._closed, True
            self._turn.notify_all()
        if already:
            return
        for made in self._groups:
            made.close()
        if self._busy:
            self._abort()  # an operation under way must end before its memory is unmapped
        deadline = time.monotonic() + 5.0
        with self._turn:
            while self._busy and time.monotonic() < deadline:
                self._turn.wait(0.05)
            waiting = list(self._queue)
            self._queue.clear()
        for pending in waiting:
            pending.run(self._guarded)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._release()

    def __repr__(self) -> str:
        return f"<{self.name} communicator, rank {self.rank} of {self.size}>"

    def _reduce_work(
        self, array: npt.ArrayLike, op: str, weight: float, out: Array | None
    ) -> Callable[[], Array]:
        source = check_array(array, "all_reduce")
        weight = check_op(source, op, weight, "all_reduce")
        target = np.empty_like(source) if out is None else out
        check_out(source, target, source.shape, "all_reduce")
        flat, result = source.reshape(-1), target.reshape(-1)

        def work() -> Array:
            self._all_reduce(flat, result, op, weight)
            return target

        return work

    def _call(self, work: Callable[[], T]) -> T:
        with self._turn:
            inline = not self._busy and not self._queue
            if inline:
                self._busy = True
        if not inline:
            return self._submit(work, "the operation").wait()
        try:
            return self._guarded(work)
        finally:
            with self._turn:
                self._busy = False
                if self._queue or self._closed:
                    self._turn.notify_all()

    def _submit(self, work: Callable[[], T], what: str) -> Pending[T]:
        pending = Pending(work, self._missing, f"{what} on rank {self.rank}")
        with self._turn:
            if not self._closed:
                if self._thread is None:
                    name = f"sparkdl-{self.name}-{self.rank}"
                    self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                    self._thread.start()
                self._queue.append(pending)
                self._turn.notify_all()
                return pending
        pending.run(self._guarded)
        return pending

    def _serve(self) -> None:
        """The queue's own thread: one operation after the other until the communicator closes."""
        while True:
            with self._turn:
                while not self._closed and (self._busy or not self._queue):
                    self._turn.wait()
                if self._closed:
                    return
                pending = self._queue.popleft()
                self._busy = True
            pending.run(self._guarded)
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    def _guarded(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise TransportError(
                f"the {self.name} communicator of rank {self.rank} is closed",
                expected="an operation before close()", received="one after it",
            )  # fmt: skip
        if self._failure is not None:
            raise TransportError(
                f"the {self.name} communicator of rank {self.rank} has failed before",
                expected="no operation after a failure",
                received=str(self._failure),
                hint="close it and connect anew",
            ) from self._failure
        try:
            return work()
        except BaseException as error:
            self._failure = error
            self._abort()  # the others learn of it by the end of the connection
            raise

    @abc.abstractmethod
    def _all_reduce(self, source: Array, target: Array, op: str, weight: float) -> None:
        """Reduces flat ``source`` into flat ``target`` (may be the same memory)."""

    @abc.abstractmethod
    def _reduce_scatter(self, source: Array, target: Array, op: str, weight: float) -> None:
        """Reduces flat ``source``; this rank's shard (``shard_edges``) goes into ``target``."""

    @abc.abstractmethod
    def _all_gather(self, source: Array) -> list[Array]:
        """Every rank's array in rank order; shapes and dtypes may differ."""

    @abc.abstractmethod
    def _all_to_all(self, parts: list[Array]) -> list[Array]:
        """Every rank's part for this one; ``parts`` are flat, of one dtype on all ranks."""

    @abc.abstractmethod
    def _broadcast(self, target: Array, root: int) -> None:
        """Makes flat ``target`` equal to the root's on all ranks."""

    @abc.abstractmethod
    def _barrier(self) -> None:
        """Returns when all ranks have called it."""

    @abc.abstractmethod
    def _group(self, ranks: list[int]) -> Communicator:
        """A communicator among ``ranks`` (sorted, this one among them)."""

    def _missing(self) -> list[int]:
        """The ranks that the operation under way waits for, as far as is known."""
        return []

    def _abort(self) -> None:
        """Makes the other ranks' waits for this one end at once; called from any thread."""

    def _release(self) -> None:
        """Frees sockets and memory; called once, when no operation runs."""


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
    """Arguments of the built-in connector that all communicators but ``'solo'`` take."""

    advertised_host: str | None
    host_id: str | None
    connect_timeout_s: float
    certificate: Certificate | None


class HorovodOptions(BuiltinOptions, total=False):
    """Arguments of :class:`sparkdl.collective.horovod.HorovodConnector`."""

    interface: str | None
    timeout_s: float


class ConnectorOptions(HorovodOptions, total=False):
    """Arguments of any connector; one refuses what it does not know."""

    calls_horovod: bool


Maker = Callable[..., Any]
"""Makes the :class:`Connector` of a rank; its arguments are those of :func:`make_communicator`."""
MakerType = TypeVar("MakerType", bound=Maker)
# Imported when used: Horovod imports TensorFlow, and tests need no sockets.
_MAKERS: dict[str, str | Maker] = {
    "auto": "sparkdl.collective.horovod:AutoConnector",
    "builtin": "sparkdl.collective.builtin:BuiltinConnector",
    "horovod": "sparkdl.collective.horovod:HorovodConnector",
    "solo": "sparkdl.collective.current:SoloConnector",
}


def register(cls: MakerType) -> MakerType:
    """Gives a class of connectors the name in its attribute ``name``; may be a decorator.

    From then on ``communicator=`` takes the name in this process, and workers get the class.

    Raises:
        ConfigError: It lacks a method of :class:`Connector`, or another communicator has the name.
    """
    name = getattr(cls, "name", None)
    known = _MAKERS.get(name, cls) if isinstance(name, str) else None
    methods = all(hasattr(cls, each) for each in ("prepare", "connect", "close"))
    if not methods or not is_same_class(known, cls):
        raise ConfigError(
            "cannot register this communicator", received=f"{cls!r}, name {name!r}",
            expected="a class with prepare, connect and close, and a name that no other one has",
            hint="its docstring: sparkdl.collective.communicator.Connector",
        )  # fmt: skip
    if name not in _MAKERS:
        COMMUNICATORS.append(str(name))
    _MAKERS[str(name)] = cls
    return cls


def maker_of(name: str) -> str | Maker:
    """The name of a communicator, or the class that was registered: workers make theirs of it."""
    made = _MAKERS.get(name, name)
    return name if isinstance(made, str) else made


def make_communicator(
    name: str | Maker = "auto", *, rank: int, **options: Unpack[ConnectorOptions]
) -> Connector:
    """The connector of a communicator, by name.

    Args:
        name: ``'builtin'``, ``'horovod'``, ``'solo'``, or ``'auto'``: Horovod where it reduces on
            GPUs on all ranks, else the built-in one; or what :func:`maker_of` gives.
        rank: This rank, from 0.
        **options: The connector's own (``timeout_s``, ``bind_host``, …).

    Raises:
        UnknownNameError: No communicator has this name.
    """
    if isinstance(name, str) and name not in _MAKERS:
        raise UnknownNameError("communicator", name, sorted(_MAKERS))
    maker = _MAKERS[name] if isinstance(name, str) else name
    if isinstance(maker, str):
        module, _, attribute = maker.partition(":")
        maker = getattr(importlib.import_module(module), attribute)
    connector: Connector = maker(rank, **options)
    return connector
