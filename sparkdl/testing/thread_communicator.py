"""Ranks as threads of one process, for tests and for trying out an algorithm.

Arrays pass by reference through a table under one lock; nothing is copied but results. The
arithmetic, and so the result's bits, are those of the built-in communicator's small path.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sparkdl.collective.arithmetic import (
    Array,
    reduce_in_order,
    reduction_factors,
    reduction_ufunc,
    shard_edges,
)
from sparkdl.collective.ordered import OrderedCommunicator
from sparkdl.collective.pending import name_ranks
from sparkdl.errors import ConfigError, ProtocolError, TransportError, WaitTimeoutError


class _Board:
    """Where the threads of one world lay down what they contribute."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.rounds: dict[int, dict[int, Any]] = {}
        self.gone: set[int] = set()
        self.groups: dict[tuple[tuple[int, ...], int], _Board] = {}

    def group(self, ranks: tuple[int, ...], count: int) -> _Board:
        with self.changed:
            return self.groups.setdefault((ranks, count), _Board(len(ranks)))


class ThreadCommunicator(OrderedCommunicator):
    """One thread's rank; made by :func:`connect_threads`."""

    name = "threads"

    def __init__(self, rank: int, board: _Board, timeout_s: float) -> None:
        super().__init__(
            rank, board.size, local_rank=rank, local_size=board.size, timeout_s=timeout_s
        )
        self._board = board
        self._round = 0
        self._made: dict[tuple[int, ...], int] = {}

    def _meet(self, label: tuple[Any, ...], item: Any, read: Callable[[list[Any]], None]) -> None:
        """Lays down ``item``, waits until all have, and reads."""
        number, self._round = self._round, self._round + 1
        board = self._board
        with board.changed:
            board.rounds.setdefault(number, {})[self._rank] = (label, item)
            board.changed.notify_all()
        self._wait(lambda: set(range(board.size)) - set(board.rounds[number]))
        laid = [board.rounds[number][r] for r in range(board.size)]
        for rank, (other, _) in enumerate(laid):
            if other != label:
                raise ProtocolError(
                    f"the ranks disagree about the operation on rank {self._rank}",
                    expected=f"{label} on all ranks",
                    received=f"{other} on rank {rank}",
                )
        read([entry for _, entry in laid])
        with board.changed:
            board.rounds.pop(number - 1, None)  # who is in this round has read the one before

    def _wait(self, absent: Callable[[], set[int]]) -> None:
        deadline = time.monotonic() + self._timeout_s
        board = self._board
        with board.changed:
            while missing := absent():
                if gone := missing & board.gone:
                    raise TransportError(
                        f"{name_ranks(sorted(gone))} closed the threads communicator",
                        expected="all ranks to go on",
                        received=f"rank {self._rank} waits",
                    )
                rest = deadline - time.monotonic()
                if rest <= 0:
                    raise WaitTimeoutError(
                        f"rank {self._rank} waited in vain; missing {name_ranks(sorted(missing))}",
                        expected=f"all ranks within {self._timeout_s:g} s",
                        received=f"nothing from {name_ranks(sorted(missing))}",
                    )
                self._absent = missing
                board.changed.wait(rest)
            self._absent = set()

    _absent: set[int] = set()  # noqa: RUF012  (replaced, never changed)

    def _missing(self) -> list[int]:
        return sorted(self._absent)

    def _all_reduce(self, source: Array, target: Array, op: str, weight: float) -> None:
        result = np.empty_like(target)

        def read(entries: list[tuple[Array, float]]) -> None:
            factors = reduction_factors(op, [w for _, w in entries])
            reduce_in_order([a for a, _ in entries], factors, reduction_ufunc(op), result)

        label = ("all_reduce", op, source.dtype.name, source.size)
        self._meet(label, (source, weight), read)
        self._meet(("read",), None, lambda _: None)  # nobody overwrites what others still read
        np.copyto(target, result)

    def _reduce_scatter(self, source: Array, target: Array, op: str, weight: float) -> None:
        whole = np.empty_like(source)
        self._all_reduce(source, whole, op, weight)
        edges = shard_edges(source.size, self._size)
        np.copyto(target, whole[edges[self._rank] : edges[self._rank + 1]])

    def _all_gather(self, source: Array) -> list[Array]:
        result: list[Array] = []

        def read(entries: list[Array]) -> None:
            result.extend(np.array(a) for a in entries)

        self._meet(("all_gather",), source, read)
        self._meet(("read",), None, lambda _: None)
        return result

    def _broadcast(self, target: Array, root: int) -> None:
        def read(entries: list[Array]) -> None:
            if self._rank != root:
                np.copyto(target, entries[root])

        self._meet(("broadcast", root, target.dtype.name, target.size), target, read)
        self._meet(("read",), None, lambda _: None)

    def _barrier(self) -> None:
        self._meet(("barrier",), None, lambda _: None)

    def _group(self, ranks: list[int]) -> OrderedCommunicator:
        key = tuple(ranks)
        count = self._made[key] = self._made.get(key, 0) + 1
        board = self._board.group(key, count)
        return ThreadCommunicator(ranks.index(self._rank), board, self._timeout_s)

    def _abort(self) -> None:
        with self._board.changed:
            self._board.gone.add(self._rank)
            self._board.changed.notify_all()

    def _release(self) -> None:
        self._abort()


def connect_threads(size: int, *, timeout_s: float = 60.0) -> list[ThreadCommunicator]:
    """The communicators of ``size`` ranks; use each from a thread of its own.

    Raises:
        ConfigError: ``size`` is not positive.
    """
    if size < 1:
        raise ConfigError(
            "cannot connect threads", expected="a size of at least 1", received=f"size={size!r}"
        )
    board = _Board(size)
    return [ThreadCommunicator(rank, board, timeout_s) for rank in range(size)]
