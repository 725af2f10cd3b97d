"""What every communicator shares: argument checks, and the order of operations.

Collectives only work when all ranks issue the same ones in the same order.
:class:`OrderedCommunicator` keeps that order for synchronous and asynchronous calls alike, checks
arguments before anything is sent, and turns the first failure into a lasting one, so that a
communicator whose state is unknown is never used again. A transport subclasses it and implements
the six methods that start with an underscore at its end.
"""

from __future__ import annotations

import abc
import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from sparkdl.collective.pending import Pending
from sparkdl.errors import ConfigError, TransportError, UnknownNameError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

Array = npt.NDArray[Any]
T = TypeVar("T")

OPS = ("sum", "mean", "weighted", "max", "min")
FLOATING = ("float16", "bfloat16", "float32", "float64")
DTYPES = (
    *FLOATING,
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
MAX_DIMENSIONS = 8
DEFAULT_TIMEOUT_S = 600.0


def shard_edges(size: int, count: int) -> list[int]:
    """Edges of ``count`` nearly equal parts of ``size`` elements (as ``Layout.shards``).

    >>> shard_edges(7, 3)
    [0, 2, 4, 7]
    """
    return [size * i // count for i in range(count + 1)]


class OrderedCommunicator(abc.ABC):
    """Base of the communicators: checks, order, asynchronous handles, lasting failure.

    One operation runs at a time, in the order of the calls. A synchronous call runs in the caller's
    thread when nothing is queued (the fast path), else it takes its place in the queue. Calls from
    several threads are safe only if all ranks issue them in the same order.

    Args:
        rank: This rank, from 0.
        size: Number of ranks.
        local_rank: This rank among those on its host.
        local_size: Number of ranks on this host.
        timeout_s: Limit for one operation, after which the communicator has failed.
    """

    name = "communicator"

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
                f"cannot make a {self.name} communicator",
                expected="0 <= rank < size",
                received=f"rank {rank}, size {size}",
            )
        if not timeout_s > 0:
            raise ConfigError(
                f"cannot make a {self.name} communicator",
                expected="timeout_s above 0",
                received=f"timeout_s={timeout_s!r}",
            )
        self._rank, self._size = rank, size
        self._local_rank, self._local_size = local_rank, local_size
        self._timeout_s = timeout_s
        self._turn = threading.Condition()
        self._queue: collections.deque[Pending[Any]] = collections.deque()
        self._busy = False
        self._closed = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._groups: list[OrderedCommunicator] = []

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    @property
    def local_rank(self) -> int:
        """This rank among those on its host."""
        return self._local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return self._local_size

    def all_reduce(
        self,
        array: npt.ArrayLike,
        op: str = "sum",
        weight: float = 1.0,
        out: Array | None = None,
    ) -> Array:
        """See :meth:`sparkdl.collective.communicator.Communicator.all_reduce`."""
        return self._call(self._reduce_work(array, op, weight, out))

    def all_reduce_async(
        self,
        array: npt.ArrayLike,
        op: str = "sum",
        weight: float = 1.0,
        out: Array | None = None,
    ) -> Pending[Array]:
        """See :meth:`sparkdl.collective.communicator.Communicator.all_reduce_async`."""
        return self._submit(self._reduce_work(array, op, weight, out), "all_reduce")

    def reduce_scatter(
        self,
        array: npt.ArrayLike,
        op: str = "sum",
        weight: float = 1.0,
        out: Array | None = None,
    ) -> Array:
        """See :meth:`sparkdl.collective.communicator.Communicator.reduce_scatter`."""
        source = self._check(array, "reduce_scatter")
        weight = self._check_op(source, op, weight, "reduce_scatter")
        edges = shard_edges(source.size, self._size)
        shape = (edges[self._rank + 1] - edges[self._rank],)
        target = np.empty(shape, source.dtype) if out is None else out
        self._check_out(source, target, shape, "reduce_scatter")
        flat, result = source.reshape(-1), target.reshape(-1)

        def work() -> Array:
            self._reduce_scatter(flat, result, op, weight)
            return target

        return self._call(work)

    def all_gather(self, array: npt.ArrayLike) -> list[Array]:
        """See :meth:`sparkdl.collective.communicator.Communicator.all_gather`."""
        source = self._check(array, "all_gather")
        if source.ndim > MAX_DIMENSIONS:
            raise ConfigError(
                "cannot all_gather this array",
                expected=f"at most {MAX_DIMENSIONS} dimensions",
                received=f"shape {source.shape}",
            )
        return self._call(lambda: self._all_gather(source))

    def broadcast(self, array: npt.ArrayLike, root: int = 0, out: Array | None = None) -> Array:
        """See :meth:`sparkdl.collective.communicator.Communicator.broadcast`."""
        source = self._check(array, "broadcast")
        if not 0 <= root < self._size:
            raise ConfigError(
                "cannot broadcast",
                expected=f"a root from 0 to {self._size - 1}",
                received=f"root={root!r}",
            )
        target = np.empty_like(source) if out is None else out
        self._check_out(source, target, source.shape, "broadcast")
        flat, result = source.reshape(-1), target.reshape(-1)

        def work() -> Array:
            if self._rank == root and target is not source:
                np.copyto(result, flat)
            self._broadcast(result, root)
            return target

        return self._call(work)

    def barrier(self) -> None:
        """See :meth:`sparkdl.collective.communicator.Communicator.barrier`."""
        self._call(self._barrier)

    def group(self, ranks: Sequence[int]) -> OrderedCommunicator:
        """See :meth:`sparkdl.collective.communicator.Communicator.group`."""
        members = sorted({int(r) for r in ranks})
        right = all(0 <= r < self._size for r in members) and len(members) == len(ranks)
        if not right or self._rank not in members:
            raise ConfigError(
                f"cannot make a group on rank {self._rank}",
                expected=f"different ranks from 0 to {self._size - 1}, this one among them",
                received=f"{list(ranks)!r}",
                hint="only the ranks of a group call group(); each passes the same ranks",
            )

        def work() -> OrderedCommunicator:
            made = self._group(members)
            self._groups.append(made)
            return made

        return self._call(work)

    def explain(self, error: BaseException) -> BaseException:
        """See :meth:`sparkdl.collective.communicator.Communicator.explain`."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.name} communicator, rank {self._rank} of {self._size}>"

    # -- order -------------------------------------------------------------------------------

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
        pending = Pending(work, self._missing, f"{what} on rank {self._rank}")
        with self._turn:
            if not self._closed:
                if self._thread is None:
                    name = f"sparkdl-{self.name}-{self._rank}"
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
                f"the {self.name} communicator of rank {self._rank} is closed",
                expected="an operation before close()",
            )
        if self._failure is not None:
            raise TransportError(
                f"the {self.name} communicator of rank {self._rank} has failed before",
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

    # -- checks ------------------------------------------------------------------------------

    def _reduce_work(
        self, array: npt.ArrayLike, op: str, weight: float, out: Array | None
    ) -> Callable[[], Array]:
        source = self._check(array, "all_reduce")
        weight = self._check_op(source, op, weight, "all_reduce")
        target = np.empty_like(source) if out is None else out
        self._check_out(source, target, source.shape, "all_reduce")
        flat, result = source.reshape(-1), target.reshape(-1)

        def work() -> Array:
            self._all_reduce(flat, result, op, weight)
            return target

        return work

    def _check(self, array: npt.ArrayLike, what: str) -> Array:
        source = np.asarray(array, order="C")
        if source.dtype.name not in DTYPES or not source.dtype.isnative:
            raise ConfigError(
                f"cannot {what} this array",
                expected="a native number type: " + ", ".join(DTYPES),
                received=f"dtype {source.dtype!r}",
            )
        return source

    def _check_op(self, source: Array, op: str, weight: float, what: str) -> float:
        if op not in OPS:
            raise UnknownNameError("op", op, OPS)
        if op in ("mean", "weighted") and source.dtype.name not in FLOATING:
            raise ConfigError(
                f"cannot {what} with op={op!r}",
                expected="floating-point numbers: " + ", ".join(FLOATING),
                received=f"dtype {source.dtype}",
                hint="sum integers, and divide where the result is used",
            )
        if op != "weighted":
            return 1.0
        if not (np.isfinite(weight) and weight >= 0):
            raise ConfigError(
                f"cannot {what} with this weight",
                expected="a finite number of at least 0",
                received=f"weight={weight!r}",
            )
        return float(weight)

    def _check_out(self, source: Array, out: Array, shape: tuple[int, ...], what: str) -> None:
        if (
            out.shape != shape
            or out.dtype != source.dtype
            or not out.flags.c_contiguous
            or not out.flags.writeable
        ):
            raise ConfigError(
                f"cannot {what} into this out",
                expected=f"a writable, contiguous {source.dtype} array of shape {shape}",
                received=f"{out.dtype} of shape {out.shape}, contiguous: {out.flags.c_contiguous}"
                f", writable: {out.flags.writeable}",
            )
        if out.size and np.may_share_memory(source, out):
            same = out.__array_interface__["data"][0] == source.__array_interface__["data"][0]
            if not same or out.shape != source.shape:
                raise ConfigError(
                    f"cannot {what} into this out",
                    expected="the input itself, or memory apart from it",
                    received="memory that overlaps the input in part",
                )

    # -- what a transport implements ---------------------------------------------------------

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
    def _broadcast(self, target: Array, root: int) -> None:
        """Makes flat ``target`` equal to the root's on all ranks."""

    @abc.abstractmethod
    def _barrier(self) -> None:
        """Returns when all ranks have called it."""

    @abc.abstractmethod
    def _group(self, ranks: list[int]) -> OrderedCommunicator:
        """A communicator among ``ranks`` (sorted, this one among them)."""

    def _missing(self) -> list[int]:
        """The ranks that the operation under way waits for, as far as is known."""
        return []

    def _abort(self) -> None:  # noqa: B027  (optional)
        """Makes the other ranks' waits for this one end at once; called from any thread."""

    def _release(self) -> None:  # noqa: B027  (optional)
        """Frees sockets and memory; called once, when no operation runs."""
