"""``LinearTraining``: a logistic regression whose weights are spread over the ranks.

A rank owns the weights of a range of hashed ids. Before the first step the ranks tell each other
which weights they will read in each batch. A step then has two exchanges of all ranks: weights come
from their owners, and gradients go back; an owner sums them in the order of the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sparkdl.collective.arithmetic import Array
from sparkdl.collective.communicator import Communicator
from sparkdl.errors import ModelError
from sparkdl.linear.ftrl import Ftrl, FtrlTable
from sparkdl.linear.sparse_rows import Indices, Numbers, SparseRows
from sparkdl.tables.hashing import Ids
from sparkdl.tables.index import Slots, by_owner

_LARGEST = 500.0
"""Margin beyond which a float64 cannot be more certain."""
_FEW = 4
"""If the range of ids is at most this many times the number of entries, unique ids are found with a
bitmap, else by sorting."""


@dataclass(frozen=True)
class LinearSettings:
    """How a linear model is trained.

    Args:
        rule: The step of a weight.
        batch_size: Rows of a step, on all ranks together.
        epochs: How often a rank goes over its rows.
        fit_intercept: Whether the model has an intercept, which is not regularized.
        seed: Seed of the order of the rows.
    """

    rule: Ftrl = field(default_factory=Ftrl)
    batch_size: int = 10_000
    epochs: int = 1
    fit_intercept: bool = True
    seed: int = 0


@dataclass(frozen=True)
class LinearPart:
    """The part of a trained model that one rank owns.

    Args:
        ids: Ids of the weights that are not 0, ascending: int64.
        weights: These: float64.
        intercept: The same on all ranks.
        size: The largest size that a vector on any rank had.
        rows: Rows of all ranks.
        losses: After each epoch, the mean log loss of the rows, each taken before its step.
    """

    ids: Ids
    weights: Numbers
    intercept: float
    size: int
    rows: int
    losses: tuple[float, ...]


@dataclass(frozen=True)
class _Batch:
    """A batch of this rank, and what this rank owns of the batches of all.

    ``places``: of each entry, that of its id among the ids of the batch. ``edges``: which of these
    ids each rank owns. ``slots``: the weights that this rank owns and any rank reads, each once.
    ``asked``: of what each rank asks for, one after another, the place in ``slots``; None: as they
    are. ``parts``: how many of them are each rank's.
    """

    rows: SparseRows
    places: npt.NDArray[np.intp]
    edges: Sequence[slice]
    slots: Slots
    asked: npt.NDArray[np.intp] | None
    parts: Sequence[slice]


class LinearTraining:
    """One rank's part in the training; all ranks make one and call the same methods.

    Args:
        settings: The same on all ranks.
    """

    def __init__(
        self, communicator: Communicator, rows: SparseRows, settings: LinearSettings
    ) -> None:
        self._communicator, self._settings = communicator, settings
        self.table = FtrlTable(settings.rule)
        """The weights that this rank owns."""
        # Spark's users know an intercept as free: a penalty would pull the mean towards one half.
        self._free = Ftrl(alpha=settings.rule.alpha, beta=settings.rule.beta)
        self._z, self._n = np.zeros(1), np.zeros(1)
        self.intercept = 0.0
        """The intercept, the same on all ranks."""
        weight = len(rows) if rows.weights is None else rows.weights.sum()
        totals = communicator.all_reduce(np.array([len(rows), weight], np.float64), "sum")
        self._rows, self._weight = int(totals[0]), float(totals[1])
        sizes = communicator.all_reduce(np.array([rows.vectors.size], np.int64), "max")
        self._size = int(sizes[0])
        steps = -(-self._rows // settings.batch_size)
        cuts = [len(rows) * step // max(1, steps) for step in range(steps + 1)]
        self._batches = self._plan([rows.cut(a, b) for a, b in itertools.pairwise(cuts)])

    def train(self) -> LinearPart:
        """All epochs, and what this rank owns of the model then.

        Raises:
            ModelError: Numbers have become too large for a float64; on all ranks.
        """
        losses = np.zeros(self._settings.epochs)
        with np.errstate(over="ignore", invalid="ignore"):
            for epoch in range(self._settings.epochs):
                losses[epoch] = sum(self.step(number) for number in range(len(self._batches)))
        losses = self._communicator.all_reduce(losses, "sum")
        if not np.isfinite(losses).all():
            raise ModelError(
                "the weights have become too large for their numbers",
                expected="features, weights of rows and alpha whose products fit a float64",
                received=f"a loss of {losses[~np.isfinite(losses)][0]} in epoch "
                f"{int(np.argmin(np.isfinite(losses))) + 1}",
                hint="scale the features: MaxAbsScaler keeps sparse vectors sparse",
            )
        mean = losses / self._weight if self._weight else losses
        ids, weights = self.table.export()
        return LinearPart(
            ids, weights, self.intercept, self._size, self._rows, tuple(mean.tolist())
        )

    def step(self, number: int) -> float:
        """One step of all ranks with their batches of a number; returns this rank's loss.

        The gradient is that of the sum of the log losses of all rows, each times its weight.
        """
        batch, table = self._batches[number], self.table
        owned = table.weights(batch.slots)
        asked = owned if batch.asked is None else owned.take(batch.asked)
        weights = np.concatenate(self._exchange([asked[part] for part in batch.parts]))
        rows = batch.rows
        margins = rows.vectors.dot(weights.take(batch.places)) + self.intercept
        residuals, loss = _logistic(margins, rows)
        entries = np.repeat(residuals, rows.vectors.lengths)
        if rows.vectors.values is not None:
            entries *= rows.vectors.values
        gradient = np.bincount(batch.places, entries, minlength=len(weights))
        own = [float(residuals.sum())]
        came = self._exchange([np.concatenate([gradient[edge], own]) for edge in batch.edges])
        gradients = np.concatenate([part[:-1] for part in came])
        if batch.asked is not None:
            gradients = np.bincount(batch.asked, gradients, minlength=len(batch.slots))
        table.step(batch.slots, owned, gradients)
        if self._settings.fit_intercept:
            total = np.array([sum(float(part[-1]) for part in came)])
            self._free.step(self._z, self._n, np.array([self.intercept]), total)
            self.intercept = float(self._free.weights(self._z, self._n)[0])
        return loss

    def _exchange(self, parts: Sequence[Array]) -> list[Array]:
        """The parts that all ranks have for this one, in their order."""
        return list(parts) if len(parts) == 1 else self._communicator.all_to_all(parts)

    def _plan(self, batches: Sequence[SparseRows]) -> list[_Batch]:
        """Agrees on which weights each rank reads in each batch."""
        ranks = self._communicator.size
        read = [_ids_of(rows.vectors.indices, rows.vectors.size) for rows in batches]
        asks: list[list[Ids]] = [[] for _ in range(ranks)]
        edges: list[Sequence[slice]] = []
        places: list[npt.NDArray[np.intp]] = []
        for ids, entries in read:
            if ranks == 1:  # as below, and sooner
                edges.append([slice(0, len(ids))])
                asks[0].append(ids)
                places.append(entries)
                continue
            order, ranges = by_owner(ids, ranks)
            edges.append(ranges)
            sorted_ids = ids[order]
            for rank, edge in enumerate(edges[-1]):
                asks[rank].append(sorted_ids[edge])
            moved = np.empty(len(ids), np.intp)
            moved[order] = np.arange(len(ids))
            places.append(moved.take(entries))
        none = np.empty(0, np.int64)
        counts = [np.array([len(ids) for ids in asked], np.int64) for asked in asks]
        came = self._exchange(
            [np.concatenate([c, none, *asked]) for c, asked in zip(counts, asks, strict=True)]
        )
        number = len(batches)
        every = np.concatenate([part[number:] for part in came])
        ids, entries = _ids_of(every, self._size)
        slots = self.table.slots(ids).take(entries)
        ends = [np.cumsum([0, *part[:number]]) for part in came]
        firsts = np.cumsum([0, *(len(part) - number for part in came)])
        found = []
        for at, rows in enumerate(batches):
            of_ranks = [
                slots[first + end[at] : first + end[at + 1]]
                for first, end in zip(firsts[:-1], ends, strict=True)
            ]
            bounds = np.cumsum([0, *map(len, of_ranks)]).tolist()
            parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
            owned, asked = of_ranks[0], None
            if ranks > 1:
                owned, asked = _ids_of(np.concatenate(of_ranks), len(self.table))
            found.append(_Batch(rows, places[at], edges[at], owned, asked, parts))
        return found


def _logistic(margins: Numbers, rows: SparseRows) -> tuple[Numbers, float]:
    """The derivative of each row's weighted log loss by its margin, and the sum of the losses."""
    np.clip(margins, -_LARGEST, _LARGEST, out=margins)
    residuals = 1 / (1 + np.exp(-margins)) - rows.labels
    losses = np.logaddexp(0, margins) - rows.labels * margins
    if rows.weights is not None:
        residuals *= rows.weights
        losses *= rows.weights
    return residuals, float(losses.sum())


def _ids_of(indices: Indices | Slots, size: int) -> tuple[Ids, npt.NDArray[np.intp]]:
    """Each index once, ascending, and the place of each of ``indices`` among them.

    Args:
        indices: From 0 on, below 2^31.
        size: All are below it.
    """
    if size <= _FEW * len(indices):
        seen = np.zeros(size, bool)
        seen[indices] = True
        ids = np.flatnonzero(seen)
        place = np.empty(size, np.intp)
        place[ids] = np.arange(len(ids))
        return ids, place.take(indices)
    # An index and its place in one number: NumPy sorts numbers several times as fast as it finds
    # the order that sorts them.
    packed = indices.astype(np.uint64) << np.uint64(32)
    packed |= np.arange(len(indices), dtype=np.uint64)
    packed.sort()
    ordered = (packed >> np.uint64(32)).astype(np.int64)
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    places = np.empty(len(ordered), np.intp)
    places[(packed & np.uint64(0xFFFFFFFF)).astype(np.intp)] = np.cumsum(first) - 1
    return ordered[first], places
