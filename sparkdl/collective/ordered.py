"""The part that all communicators share: one operation at a time, in the order of the calls.

Collective operations only work when all ranks call the same ones in the same order.
:class:`OrderedCommunicator` keeps that order for synchronous and asynchronous calls alike, and
checks arguments before anything is sent. After the first failure every further operation fails: the
ranks may be at different places of an operation, so the communicator cannot be used again. A
communicator of one kind (TCP and shared memory, Horovod, threads) is a subclass that implements the
methods with an underscore at the end of the class.
"""

from __future__ import annotations

import abc
import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

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
from sparkdl.errors import ConfigError, TransportError, WaitTimeoutError
from sparkdl.process.closing import Closing

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
            missing = self._missing()
            raise WaitTimeoutError(
                f"{self._what} is not done; missing {name_ranks(missing)}",
                expected=f"an end within {timeout_s:g} s",
                received="it still runs",
                hint="wait again, or close the communicator",
            )
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


class OrderedCommunicator(Closing):
    """Base of the communicators: checks, order, asynchronous handles, lasting failure.

    One operation runs at a time, in the order of the calls. A synchronous call runs in the caller's
    thread when no operation is queued (the fast path), else it is queued behind the others. Calls
    from several threads are safe only if all ranks issue them in the same order.

    Args:
        timeout_s: Limit for one operation, after which the communicator has failed.
    """

    name = "communicator"
    in_graph = False

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
        return self._call(self._reduce_work(array, op, weight, out))

    def all_reduce_async(
        self,
        array: npt.ArrayLike,
        op: str = "sum",
        weight: float = 1.0,
        out: Array | None = None,
    ) -> Pending[Array]:
        return self._submit(self._reduce_work(array, op, weight, out), "all_reduce")

    def reduce_scatter(
        self,
        array: npt.ArrayLike,
        op: str = "sum",
        weight: float = 1.0,
        out: Array | None = None,
    ) -> Array:
        source = check_array(array, "reduce_scatter")
        weight = check_op(source, op, weight, "reduce_scatter")
        edges = shard_edges(source.size, self._size)
        shape = (edges[self._rank + 1] - edges[self._rank],)
        target = np.empty(shape, source.dtype) if out is None else out
        check_out(source, target, shape, "reduce_scatter", edges[self._rank])
        flat, result = source.reshape(-1), target.reshape(-1)

        def work() -> Array:
            self._reduce_scatter(flat, result, op, weight)
            return target

        return self._call(work)

    def all_gather(self, array: npt.ArrayLike) -> list[Array]:
        source = check_array(array, "all_gather")
        check_gathered(source)
        return self._call(lambda: self._all_gather(source))

    def all_to_all(self, parts: Sequence[npt.ArrayLike]) -> list[Array]:
        sources = check_parts(parts, self._size)
        return self._call(lambda: self._all_to_all(sources))

    def broadcast(self, array: npt.ArrayLike, root: int = 0, out: Array | None = None) -> Array:
        source = check_array(array, "broadcast")
        check_root(root, self._size)
        target = np.empty_like(source) if out is None else out
        check_out(source, target, source.shape, "broadcast")
        flat, result = source.reshape(-1), target.reshape(-1)

        def work() -> Array:
            if self._rank == root and target is not source:
                np.copyto(result, flat)
            self._broadcast(result, root)
            return target

        return self._call(work)

    def barrier(self) -> None:
        self._call(self._barrier)

    def group(self, ranks: Sequence[int]) -> OrderedCommunicator:
        members = check_group(ranks, self._rank, self._size)

        def work() -> OrderedCommunicator:
            made = self._group(members)
            self._groups.append(made)
            return made

        return self._call(work)

    def explain(self, error: BaseException) -> BaseException:
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
        return f"<{self.name} communicator, rank {self._rank} of {self._size}>"

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
                received="one after it",
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

    # -- what a communicator of one kind implements -----------------------------------------

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
    def _group(self, ranks: list[int]) -> OrderedCommunicator:
        """A communicator among ``ranks`` (sorted, this one among them)."""

    def _missing(self) -> list[int]:
        """The ranks that the operation under way waits for, as far as is known."""
        return []

    def _abort(self) -> None:
        """Makes the other ranks' waits for this one end at once; called from any thread."""

    def _release(self) -> None:
        """Frees sockets and memory; called once, when no operation runs."""
