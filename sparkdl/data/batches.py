"""Rows -> shuffled batches, stacked for one compiled call each, one stack ahead of the training."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.data.columns import Array, Batch, DataSpec, IndexArray
from sparkdl.data.rows import Rows
from sparkdl.data.storage import Storage
from sparkdl.settings.values import require_int
from sparkdl.training.learning import BatchStack

Random = np.random.Generator


class ClassWeights:
    """Weighs the rows of a batch by their class, as ``class_weight`` of Keras' ``fit`` does.

    The class of a row is its label, rounded; of a label with several values (one-hot) the place
    of the largest. Where the loss takes class numbers, an array of them has a weight for each.

    Args:
        weights: Class -> weight; other classes weigh 1.
        spec: Of the rows; it has one output and no sample weights.
    """

    def __init__(self, weights: Mapping[int, float], spec: DataSpec) -> None:
        ((self._output, label),) = spec.labels.items()
        self._numbers = label.classes is not None
        self._classes = np.array(sorted(weights), np.int64)
        self._weights = np.array([weights[int(c)] for c in self._classes], np.float32)

    def weigh(self, batch: Batch) -> Batch:
        """The same rows with the weights of their classes as sample weights."""
        return replace(batch, sample_weight={self._output: self._of(batch.y[self._output])})

    def _of(self, labels: Array) -> Array:
        if labels.ndim > 1 and labels.shape[-1] == 1:
            labels = labels[..., 0]
        elif labels.ndim > 1 and not self._numbers:
            labels = labels.argmax(-1)
        classes = np.round(labels).astype(np.int64)
        places = np.searchsorted(self._classes, classes).clip(max=len(self._classes) - 1)
        known = self._classes[places] == classes
        found: Array = np.where(known, self._weights[places], np.float32(1))
        return found


@dataclass(frozen=True)
class EpochPlan:
    """How an epoch falls into batches: every row once, a smaller last batch where need be.

    Args:
        batch_size: Rows in a full batch.

    >>> plan = EpochPlan(num_rows=10, batch_size=4)
    >>> plan.steps_per_epoch, plan.full_batches, plan.tail_rows
    (3, 2, 2)
    >>> list(plan.stacks(8))
    [(0, 2), (2, 1)]
    """

    num_rows: int
    batch_size: int

    def __post_init__(self) -> None:
        require_int("batch_size", self.batch_size, 1)
        require_int("num_rows", self.num_rows, 0)

    @property
    def full_batches(self) -> int:
        """Batches of exactly ``batch_size`` rows."""
        return self.num_rows // self.batch_size

    @property
    def tail_rows(self) -> int:
        """Rows in the smaller last batch, or 0."""
        return self.num_rows % self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """All batches, the smaller last one included."""
        return -(-self.num_rows // self.batch_size)

    def stacks(self, most_batches: int, start_batch: int = 0) -> Iterator[tuple[int, int]]:
        """``(first batch, number of batches)`` for each stack from ``start_batch`` on.

        Stacks end where they would in an epoch from its start, so the first one may be shorter.
        The smaller last batch is a stack of its own, since its shape differs.
        """
        require_int("most_batches", most_batches, 1)
        require_int("start_batch", start_batch, 0)
        first = start_batch
        while first < self.full_batches:
            count = min(most_batches - first % most_batches, self.full_batches - first)
            yield first, count
            first += count
        if self.tail_rows and start_batch <= self.full_batches:
            yield self.full_batches, 1


def grouped(groups: npt.NDArray[Any], batch_size: int, random: Random | None) -> list[IndexArray]:
    """The rows of batches in which all rows of a group are together, in their order.

    A batch gets the next groups as long as they fit; a larger group is a batch of its own.

    Args:
        batch_size: Rows of a batch, at most, unless one group has more.
        random: Draws the order of the groups; None: that of their first rows.

    >>> [rows.tolist() for rows in grouped(np.array([7, 3, 7, 3, 5]), 3, None)]
    [[0, 2], [1, 3, 4]]
    """
    _, first, number = np.unique(groups, return_index=True, return_inverse=True)
    ranks = np.argsort(first) if random is None else random.permutation(len(first))
    number = np.argsort(ranks)[number]
    ends, start, end = [0][:0], 0, 0
    for size in np.bincount(number).tolist():
        if start < end and end + size - start > batch_size:
            ends.append(end)
            start = end
        end += size
    return np.split(np.argsort(number, kind="stable"), ends) if len(groups) else []


class Batches:
    """Batches of some rows, in a new random order each epoch.

    The order depends on ``(seed, rank, epoch)`` alone, so a retried task continues an epoch at
    any batch. Rows in memory get a uniform permutation. Spilled rows are shuffled in two stages:
    the file's blocks are permuted and grouped, as many as fit the memory budget, and the rows
    of each group are permuted, so that every page is read once.

    With ``repeat`` an epoch is a number of batches, not a pass over the rows: each epoch goes on
    where the one before ended, pass after pass. All batches are full then, as a batch may hold the
    end of one pass and the beginning of the next (as ``tf.data``'s ``repeat().batch()``).

    Iterators of one object may run at the same time; each has its own thread.

    Args:
        batch_size: Rows in a full batch.
        shuffle: Whether to permute; otherwise the rows come in their order, without a copy.
        rank: Number of the worker; workers get different orders.
        prefetch: Stacks to gather ahead in a background thread; 0 gathers without a thread.
        steps: Batches in an epoch; None for all rows. Without ``repeat`` at most this number, the
            first ones.
        repeat: Whether epochs go on where the one before ended; only with ``steps``.
        class_weight: Class -> weight of its rows, see :class:`ClassWeights`.
        prepare: Makes of each batch of rows what the model takes; batches come alone then.
        by_content: Begin with the order that the rows' content decides, where the rows have one,
            and not with the order in which they came.
    """

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        prefetch: int = 1,
        steps: int | None = None,
        repeat: bool = False,
        class_weight: Mapping[int, float] | None = None,
        by_content: bool = False,
        prepare: Callable[[BatchStack], BatchStack] | None = None,
    ) -> None:
        self._begin = rows.order if by_content else None
        self.rows, self.shuffle, self.seed, self.rank = rows, shuffle, seed, rank
        self.prefetch, self._prepare = prefetch, prepare
        self.repeats = repeat and steps is not None and len(rows) > 0
        self._weights = None if class_weight is None else ClassWeights(class_weight, rows.spec)
        num_rows = len(rows)
        if steps is not None:
            num_rows = steps * batch_size if self.repeats else min(num_rows, steps * batch_size)
        self.plan = EpochPlan(num_rows, batch_size)
        self.num_rows, self._grouped = num_rows, list[IndexArray]()
        groups = rows.groups()
        if groups is not None:  # a batch is the unit, whatever rows it has
            random = generator(seed, (rank, 0, 0)) if shuffle else None
            self._grouped, self.repeats = grouped(groups, batch_size, random), False
            count = len(self._grouped) if steps is None else min(steps, len(self._grouped))
            self.num_rows = sum(map(len, self._grouped[:count]))
            self.plan = EpochPlan(count, 1)

    @property
    def batch_size(self) -> int:
        return self.plan.batch_size

    @property
    def full_batches(self) -> int:
        return self.plan.full_batches

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch

    @property
    def stackable(self) -> bool:
        """Whether all full batches have the same shape; padded ones have not, others may not."""
        spec = self.rows.spec
        return self._prepare is None and not spec.is_padded and spec.group is None

    @property
    def batch_bytes(self) -> int:
        """Bytes of a full batch, features, labels and weights; 0 without rows."""
        return self.batch_size * self.rows.row_bytes

    def stacks(self, epoch: int, most_batches: int, start_batch: int = 0) -> Generator[BatchStack]:
        """The batches of an epoch in stacks, gathered ahead in a background thread.

        The thread ends with the iterator: at the end of the epoch, on ``close()``, on an
        exception, or when the iterator is dropped. What a gather raises is raised here.

        Args:
            epoch: Number of the epoch; each has its own order.
            most_batches: Batches in a stack at most; batches that are not ``stackable`` come alone.
            start_batch: Batches at the start of the epoch to skip.
        """
        jobs = self.plan.stacks(most_batches if self.stackable else 1, start_batch)
        order = self._order(epoch)
        if self.prefetch < 1:
            for first, count in jobs:
                yield self._gather(order, first, count)
            return
        pending: deque[Future[BatchStack]] = deque()
        pool = ThreadPoolExecutor(1, thread_name_prefix="sparkdl-batches")
        try:
            for first, count in jobs:
                pending.append(pool.submit(self._gather, order, first, count))
                if len(pending) > self.prefetch:
                    yield _first_of(pending)
            while pending:
                yield _first_of(pending)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _order(self, epoch: int) -> _Order | None:
        if self._grouped:
            order = np.arange(len(self._grouped))
            if self.shuffle:
                order = generator(self.seed, (self.rank, epoch)).permutation(order)
            batches = self._grouped
            return lambda start, stop: np.concatenate([batches[n] for n in order[start:stop]])
        if self.repeats:
            return _Passes(self._order_of_pass, len(self.rows), epoch * self.plan.num_rows)
        plain = not self.shuffle and self._begin is None
        return None if plain else self._order_of_pass(epoch)

    def _order_of_pass(self, number: int) -> _Order:
        if not self.shuffle:
            begin = self._begin
            if begin is None:
                return lambda start, stop: np.arange(start, stop, dtype=np.int64)
            return lambda start, stop: begin[start:stop]
        key = (self.rank, number)
        storage = self.rows.storage
        if storage.block_rows is None:
            rows = len(self.rows) if self._begin is None else self._begin
            return _full_order(rows, self.seed, key)
        return _BlockOrder(storage, storage.block_rows, self.seed, key)

    def _gather(self, order: _Order | None, first: int, count: int) -> BatchStack:
        start = first * self.batch_size
        stop = min(start + count * self.batch_size, self.plan.num_rows)
        rows = self.rows
        batch = rows.slice(start, stop) if order is None else rows.take(order(start, stop))
        if self._weights is not None:
            batch = self._weights.weigh(batch)
        stack = stack_of(batch, count, grouped=bool(self._grouped))
        return stack if self._prepare is None else self._prepare(stack)


def _first_of(pending: deque[Future[BatchStack]]) -> BatchStack:
    stack = pending.popleft().result()
    return replace(stack, following=pending[0].result) if pending else stack


def stack_of(batch: Batch, count: int, *, grouped: bool = False) -> BatchStack:
    """The rows as ``count`` batches of equally many, without a copy."""

    def stacked(arrays: dict[str, Array]) -> dict[str, Array]:
        return {n: a.reshape(count, len(a) // count, *a.shape[1:]) for n, a in arrays.items()}

    weight = None if batch.sample_weight is None else stacked(batch.sample_weight)
    x, y = stacked(batch.x), stacked(batch.y)
    return BatchStack(x, y, weight, count, batch.num_rows, grouped=grouped)


_Order = Callable[[int, int], IndexArray]
"""Row numbers at the positions from a first one to a last one (exclusive) of the epoch."""


def _joined(start: int, stop: int, rows_from: _Order) -> IndexArray:
    """Row numbers from several parts of an order; ``rows_from`` gives those of the first part."""
    parts = [np.empty(0, np.int64)]
    while start < stop:
        parts.append(rows_from(start, stop))
        start += len(parts[-1])
    return np.concatenate(parts)


class _Passes:
    """One pass over the rows after the other, from position ``first`` of all passes on."""

    def __init__(self, order_of: Callable[[int], _Order], num_rows: int, first: int) -> None:
        self._order_of, self._num_rows, self._first = order_of, num_rows, first
        self._current: tuple[int, _Order] | None = None

    def __call__(self, start: int, stop: int) -> IndexArray:
        return _joined(start + self._first, stop + self._first, self._rows_from)

    def _rows_from(self, start: int, stop: int) -> IndexArray:
        number, begin = divmod(start, self._num_rows)
        if self._current is None or self._current[0] != number:
            self._current = number, self._order_of(number)
        return self._current[1](begin, min(begin + stop - start, self._num_rows))


def generator(seed: int, key: tuple[int, ...]) -> Random:
    """Random numbers that a seed and a key (rank, epoch, ...) decide."""
    sequence = np.random.SeedSequence(seed % 2**64, spawn_key=key)
    return np.random.Generator(np.random.Philox(sequence))


def _full_order(rows: int | IndexArray, seed: int, key: tuple[int, ...]) -> _Order:
    """A uniform permutation of all rows, drawn when first asked for.

    Args:
        rows: How many there are, or their numbers in the order that is permuted.
    """
    order = functools.cache(lambda: generator(seed, key).permutation(rows))
    return lambda start, stop: order()[start:stop]


class _BlockOrder:
    """Blocks permuted and grouped, then rows permuted within each group of blocks."""

    def __init__(self, storage: Storage, block_rows: int, seed: int, key: tuple[int, ...]) -> None:
        self._storage, self._block_rows, self._seed, self._key = storage, block_rows, seed, key
        num_blocks = -(-storage.num_rows // block_rows)
        blocks = generator(seed, key).permutation(num_blocks)
        self._groups = [
            blocks[i : i + storage.group_blocks] for i in range(0, num_blocks, storage.group_blocks)
        ]
        self._sizes = np.full(num_blocks, block_rows, np.int64)
        if num_blocks:
            self._sizes[-1] = storage.num_rows - (num_blocks - 1) * block_rows
        counts = [int(self._sizes[group].sum()) for group in self._groups]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._current: tuple[int, IndexArray] = (-1, np.empty(0, np.int64))

    def __call__(self, start: int, stop: int) -> IndexArray:
        return _joined(start, stop, self._rows_from)

    def _rows_from(self, start: int, stop: int) -> IndexArray:
        group = int(np.searchsorted(self._ends, start, side="right"))
        begin = 0 if group == 0 else int(self._ends[group - 1])
        return self._rows(group)[start - begin : stop - begin]

    def _rows(self, group: int) -> IndexArray:
        if self._current[0] != group:
            blocks = self._groups[group]
            # A stack may begin in the group before; the group after is read ahead.
            self._storage.focus(np.concatenate(self._groups[max(group - 1, 0) : group + 2]))
            rows = np.concatenate(
                [np.arange(self._sizes[b], dtype=np.int64) + b * self._block_rows for b in blocks]
            )
            generator(self._seed, (*self._key, 1 + group)).shuffle(rows)
            self._current = group, rows
        return self._current[1]
