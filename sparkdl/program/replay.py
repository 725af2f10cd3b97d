"""``ReplayBuffer``: what actors put in and learners draw from, at a bounded ratio of both.

References:
    Schaul et al., Prioritized Experience Replay, 2016. Cassirer et al., Reverb: A Framework for
    Experience Replay, 2021 (samples per insert).
"""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, TransportError, WaitTimeoutError
from sparkdl.program.nodes import CourierNode
from sparkdl.program.running import is_stopping, running, wait_for_stop
from sparkdl.settings.values import require_int, require_name, require_seconds

_LOOK_S = 0.2
"""A waiting caller looks so often whether the program stops."""
Sampler = Literal["uniform", "prioritized", "fifo"]


@dataclass(frozen=True)
class Sample:
    """Items that were drawn.

    Args:
        items: They themselves.
        keys: Their keys, for :meth:`ReplayBuffer.update_priorities`.
        probabilities: With which each was drawn; 1 with ``'fifo'``.
    """

    items: list[Any]
    keys: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]


class ReplayBuffer:
    """Items with priorities, drawn by chance or in order; for any number of threads.

    Args:
        max_size: Items that are kept; a new one takes the place of the oldest. With ``'fifo'``
            an insert waits until there is room instead.
        sampler: ``'uniform'``; ``'prioritized'``: item i with the probability
            p_i^alpha / sum p_j^alpha; ``'fifo'``: the oldest, which leaves the buffer.
        min_size: Items that must be there before the first is drawn.
        samples_per_insert: How many items may be drawn for each that was put in; who is ahead
            waits. None for no limit.
        tolerance: By how many drawn items the ratio may be missed, on either side.
        alpha: Exponent of the priorities.
        seed: Seed of the choice.
    """

    def __init__(
        self,
        max_size: int,
        sampler: Sampler = "uniform",
        *,
        min_size: int = 1,
        samples_per_insert: float | None = None,
        tolerance: float | None = None,
        alpha: float = 0.6,
        seed: int = 0,
    ) -> None:
        require_int("max_size", max_size, 1)
        require_int("min_size", min_size, 1)
        require_name("sampler", sampler, get_args(Sampler))
        if min_size > max_size or (samples_per_insert is not None and samples_per_insert <= 0):
            raise ConfigError(
                "a replay buffer from which nothing could ever be drawn",
                expected="min_size <= max_size, samples_per_insert > 0",
                received=f"{min_size}, {max_size}, {samples_per_insert}",
            )
        self._max_size, self._sampler, self._min_size = max_size, sampler, min_size
        self._ratio, self._alpha = samples_per_insert, alpha
        least = 100.0 * max(1.0, samples_per_insert or 1.0)
        self._tolerance = least if tolerance is None else tolerance
        self._random = np.random.default_rng(seed)
        self._changed = threading.Condition()
        self._items: list[Any] = [None] * max_size
        self._sums = SumTree(max_size)
        self._inserted = self._drawn = self._taken = 0

    def size(self) -> int:
        """Items that are there."""
        with self._changed:
            return self._size()

    def insert(self, item: object, priority: float = 1.0, timeout_s: float | None = 60.0) -> int:
        """Puts an item in; returns its key.

        Raises:
            ConfigError: The priority is not above 0.
            WaitTimeoutError: Nobody drew enough items in time.
            TransportError: The program stops.
        """
        weight = self._weight(np.array([priority]))[0]
        with self._changed:
            self._wait_for(self._may_insert, timeout_s, "room for another item")
            key = self._inserted
            self._items[key % self._max_size] = item
            self._sums.set(np.array([key % self._max_size]), np.array([weight]))
            self._inserted += 1
            self._changed.notify_all()
            return key

    def sample(self, count: int = 1, timeout_s: float | None = 60.0) -> Sample:
        """Draws items, with replacement (but each once with ``'fifo'``).

        Raises:
            WaitTimeoutError: There were not enough items in time.
            TransportError: The program stops.
        """
        require_int("count", count, 1)
        with self._changed:
            self._wait_for(lambda: self._may_draw(count), timeout_s, f"{count} items to draw")
            if self._sampler == "fifo":
                keys = np.arange(self._taken, self._taken + count)
                self._taken += count
                chances = np.ones(count)
            elif self._sampler == "uniform":
                keys = self._random.integers(self._inserted - self._size(), self._inserted, count)
                chances = np.full(count, 1.0 / self._size())
            else:
                slots = self._sums.find(self._random.random(count) * self._sums.total)
                slots = np.minimum(slots, self._size() - 1)
                chances = self._sums.get(slots) / self._sums.total
                oldest = self._inserted - self._size()
                keys = oldest + (slots - oldest) % self._max_size
            items = [self._items[key % self._max_size] for key in keys.tolist()]
            self._drawn += count
            self._changed.notify_all()
            return Sample(items, keys, chances)

    def update_priorities(self, keys: Sequence[int], priorities: Sequence[float]) -> None:
        """Gives items other priorities; those that have left the buffer are passed over.

        Raises:
            ConfigError: A priority is not above 0.
        """
        found, weights = np.asarray(keys, np.int64), self._weight(np.asarray(priorities))
        with self._changed:
            there = (found >= self._inserted - self._size()) & (found < self._inserted)
            self._sums.set(found[there] % self._max_size, weights[there])

    def _weight(self, priorities: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        weights = np.asarray(priorities, np.float64) ** self._alpha
        if not (np.isfinite(weights) & (weights > 0)).all():
            raise ConfigError(
                "a priority of an item cannot be used", expected="finite numbers above 0",
                received=str(priorities)[:100],
            )  # fmt: skip
        return weights

    def _size(self) -> int:
        return min(self._inserted - self._taken, self._max_size)

    def _may_insert(self) -> bool:
        if self._sampler == "fifo" and self._size() >= self._max_size:
            return False
        if self._ratio is None or self._inserted < self._min_size:
            return True
        return (self._inserted + 1) * self._ratio - self._drawn <= self._tolerance

    def _may_draw(self, count: int) -> bool:
        if self._size() < (count if self._sampler == "fifo" else self._min_size):
            return False
        if self._ratio is None:
            return True
        return self._drawn + count - self._inserted * self._ratio <= self._tolerance

    def _wait_for(self, ready: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._changed.wait_for(
            ready, max(0.0, min(_LOOK_S, deadline - time.monotonic()))
        ):
            if is_stopping():
                raise TransportError(
                    f"the program stops; a caller waited for {what}",
                    expected="a program that runs as long as its nodes wait for each other",
                    received="its stop",
                )
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    "a replay buffer waits for the other side",
                    expected=f"{what} within {timeout_s:g} s",
                    received=f"{self._inserted} items put in, {self._drawn} drawn",
                    hint="do the actors (or the learners) still run? samples_per_insert binds them",
                )


class SumTree:
    """Weights of slots, of which one is found by a point in their sum; both in O(log slots).

    >>> tree = SumTree(3)
    >>> tree.set(np.array([0, 1, 2]), np.array([1.0, 2.0, 1.0]))
    >>> tree.find(np.array([0.5, 1.5, 2.9, 3.5])).tolist()
    [0, 1, 1, 2]
    """

    def __init__(self, slots: int) -> None:
        self._leaves = 1 << max(0, (slots - 1).bit_length())
        self._sums = np.zeros(2 * self._leaves)

    @property
    def total(self) -> float:
        return float(self._sums[1])

    def get(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return self._sums[self._leaves + slots]

    def set(self, slots: npt.NDArray[np.int64], weights: npt.NDArray[np.float64]) -> None:
        """Sets weights; of a slot that comes twice the last one counts."""
        nodes = self._leaves + slots
        self._sums[nodes] = weights
        while self._leaves > 1 and len(nodes) and nodes[0] > 1:
            nodes = np.unique(nodes >> 1)
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def find(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """The slots in which points between 0 and :attr:`total` lie."""
        nodes, left = np.ones(len(points), np.int64), points.astype(np.float64)
        while len(nodes) and nodes[0] < self._leaves:
            lower = self._sums[2 * nodes]
            right = left >= lower
            left = np.where(right, left - lower, left)
            nodes = 2 * nodes + right
        return nodes - self._leaves


class ReplayNode(CourierNode):
    """A :class:`ReplayBuffer` as a node; the arguments are the buffer's.

    Those who wait for the other side hold a thread of the node each, so it has many.
    """

    def __init__(self, max_size: int, sampler: Sampler = "uniform", **options: Any) -> None:
        super().__init__(ReplayBuffer, max_size, sampler, threads=256, **options)


class ReverbServing:
    """Runs a server of reverb until the program stops."""

    def __init__(
        self,
        priority_tables_fn: Callable[[], Sequence[Any]],
        checkpoint_ctor: Callable[[], Any] | None,
        checkpoint_minutes: float | None,
        host: str | None,
    ) -> None:
        options = {} if checkpoint_ctor is None else {"checkpointer": checkpoint_ctor()}
        self._server = _reverb().Server(tables=list(priority_tables_fn()), **options)
        self._minutes = checkpoint_minutes
        host = host or running().host
        shown = f"[{host}]" if ":" in host else host
        self._address = f"{shown}:{self._server.port}"

    def address(self) -> str:
        """Host and port, for ``reverb.Client(node.address())``."""
        return self._address

    def run(self) -> None:
        """Serves until the program stops, and writes checkpoints meanwhile."""
        wait_s = None if self._minutes is None else 60 * self._minutes
        while not wait_for_stop(wait_s):
            _reverb().Client(f"localhost:{self._server.port}").checkpoint()
        self._server.stop()


class ReverbNode(CourierNode):
    """A node that runs a server of dm-reverb; other nodes call its ``address()``.

    Reverb has no secret and no encryption: whoever reaches its port may use it. Without reverb,
    :class:`~sparkdl.program.ReplayNode` does the same job.

    Args:
        priority_tables_fn: Called where the node runs; returns a list of ``reverb.Table``.
        checkpoint_ctor: Called where the node runs; returns a checkpointer of reverb, such as
            ``reverb.checkpointers.DefaultCheckpointer(folder)``. None: the server's own.
        checkpoint_time_delta_minutes: Time between two checkpoints; None: only those that a client
            asks for (``reverb.Client(address).checkpoint()``).
        host: The address of the node's machine that others connect to; None: the one that calls of
            this node go to (127.0.0.1 where all nodes are on one machine).

    Raises:
        ConfigError: dm-reverb is not installed here, or a time that is none.
    """

    def __init__(
        self,
        priority_tables_fn: Callable[[], Sequence[Any]],
        checkpoint_ctor: Callable[[], Any] | None = None,
        checkpoint_time_delta_minutes: float | None = None,
        *,
        host: str | None = None,
    ) -> None:
        _reverb()
        minutes = checkpoint_time_delta_minutes
        if minutes is not None:
            require_seconds("checkpoint_time_delta_minutes", minutes)
        super().__init__(ReverbServing, priority_tables_fn, checkpoint_ctor, minutes, host)


def _reverb() -> Any:
    try:
        return importlib.import_module("reverb")
    except ImportError as error:
        raise ConfigError(
            "ReverbNode needs dm-reverb",
            expected="a package 'reverb' that can be imported",
            received=str(error),
            hint="pip install dm-reverb, or ReplayNode: uniform, prioritised and FIFO replay "
            "without it",
        ) from error
