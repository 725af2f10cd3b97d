"""The ranks of ``FTRLClassifier``: they train weights that are spread over them, and score rows.

A rank owns the weights of a range of hashed ids. Before the first step the ranks tell each other
which weights they will read in each batch. A step then has two exchanges of all ranks: weights come
from their owners, and gradients go back; an owner sums them in the order of the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.collective.arithmetic import Array
from sparkdl.collective.communicator import Communicator
from sparkdl.errors import DataError, ModelError
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.function import FunctionTask, connected
from sparkdl.launch.task import QueryTask, RankContext, Result
from sparkdl.linear.sparse_rows import Indices, Numbers, SparseRows, SparseVectors
from sparkdl.process import payload
from sparkdl.settings import values
from sparkdl.settings.values import Check, UserSettings, ValueKind, setting
from sparkdl.spark.forms.wire import wire_names
from sparkdl.tables.hashing import Ids
from sparkdl.tables.index import RowIndex, Slots, by_owner, grown

if TYPE_CHECKING:
    from pyspark.sql import types as T


def _number(check: Check) -> ValueKind:
    def checked(name: str, value: float) -> float:
        check("ftrl", name, value)
        return float(value)

    return ValueKind(checked, float)


ABOVE_ZERO, NOT_NEGATIVE = _number(values.require_positive), _number(values.require_not_negative)


@dataclass(frozen=True)
class Ftrl(UserSettings):
    """FTRL-Proximal, one step of a coordinate with the gradient g of the loss::

        σ = (√(n + g²) - √n) / alpha;  z += g - σ w;  n += g²
        w = 0                                            where |z| <= lambda1
        w = -(z - sign(z) lambda1) / ((beta + √n) / alpha + lambda2)     elsewhere

    z, n and w begin at 0. All are float64, so that the order in which gradients are summed shows in
    the last digits alone; :class:`sparkdl.tables.rules.FtrlRows` has the same step in float32, with
    Keras' constants (``lambda2`` is twice its l2, and its n begins at 0.1).

    Args:
        lambda1: Strength of L1: a weight is exactly 0 until the sum of its gradients passes it.
        lambda2: Strength of L2.
        alpha: The learning rate: no step changes a weight by much more than this.
        beta: Slows down the first steps of a weight, until √n has passed it.

    Raises:
        ConfigError: A value that is not of its kind.

    References:
        McMahan et al., 2013: Ad Click Prediction: a View from the Trenches, algorithm 1.
    """

    lambda1: float = setting(0.0, NOT_NEGATIVE)
    lambda2: float = setting(0.0, NOT_NEGATIVE)
    alpha: float = setting(0.1, ABOVE_ZERO)
    beta: float = setting(1.0, NOT_NEGATIVE)

    def weights(self, z: Numbers, n: Numbers) -> Numbers:
        """The weights of coordinates, from their state."""
        pull = np.clip(z, -self.lambda1, self.lambda1)
        pull -= z
        step = np.sqrt(n)
        step += self.beta
        step /= self.alpha
        step += self.lambda2
        # Without a gradient, n and the divisor may be 0; z, and so the numerator, is 0 then.
        return np.divide(pull, step, out=pull, where=pull != 0)

    def step(self, z: Numbers, n: Numbers, w: Numbers, gradients: Numbers) -> None:
        """One step of coordinates.

        Args:
            z: It is changed, as ``n`` is.
            n: See ``z``.
            w: What :meth:`weights` gives for them.
            gradients: Gradients of the same shape.
        """
        more = n + gradients * gradients
        moved = np.sqrt(more)
        moved -= np.sqrt(n)
        moved /= self.alpha
        moved *= w
        z += gradients
        z -= moved
        n[:] = more


class FtrlTable:
    """State of the coordinates that one rank owns: 16 bytes each, beside 15 to 25 of the index.

    Not thread-safe.
    """

    def __init__(self, rule: Ftrl) -> None:
        self.rule = rule
        self._index = RowIndex()
        self._z, self._n = np.zeros(1024), np.zeros(1024)

    def __len__(self) -> int:
        return len(self._index)

    def slots(self, ids: Ids) -> Slots:
        """The place of each id; one that is new begins with zeros."""
        slots = self._index.add(ids)
        if self._index.end > len(self._z):
            size = grown(len(self._z), self._index.end)
            self._z.resize(size, refcheck=False)
            self._n.resize(size, refcheck=False)
        return slots

    def weights(self, slots: Slots) -> Numbers:
        """The weights at some places."""
        return self.rule.weights(self._z.take(slots), self._n.take(slots))

    def step(self, slots: Slots, weights: Numbers, gradients: Numbers) -> None:
        """One step of the weights at some places, each of them once."""
        z, n = self._z.take(slots), self._n.take(slots)
        self.rule.step(z, n, weights, gradients)
        self._z[slots], self._n[slots] = z, n

    def export(self) -> tuple[Ids, Numbers]:
        """The ids whose weight is not 0, ascending, and these weights."""
        live = self._index.live()
        ids, weights = self._index.ids(live), self.weights(live)
        kept = np.flatnonzero(weights)
        kept = kept[np.argsort(ids[kept])]
        return ids[kept], weights[kept]


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
        mean = (losses / self._weight if self._weight else losses).tolist()
        ids, weights = self.table.export()
        return LinearPart(ids, weights, self.intercept, self._size, self._rows, tuple(mean))

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
        counts = [np.array([len(ids) for ids in asked], np.int64) for asked in asks]
        came = self._exchange(
            [np.concatenate([c, *asked]) for c, asked in zip(counts, asks, strict=True)]
        )
        number = len(batches)
        ids, entries = _ids_of(np.concatenate([part[number:] for part in came]), self._size)
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
    """Each index once, ascending, and the place of each of ``indices`` among them."""
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


_DENSE_BYTES = 64 << 20
"""Up to this size, scoring has the weights in an array by index, which is the fastest."""


@dataclass(frozen=True)
class LinearTask(FunctionTask):
    """Trains a linear model on the ranks' rows; see :class:`sparkdl.launch.task.Task`.

    The rows come as columns: vectors, labels, and weights if there are any. Each rank returns a
    :class:`~sparkdl.linear.rank_task.LinearPart`.

    Args:
        training: How the model is trained.
    """

    training: LinearSettings = field(default_factory=LinearSettings)

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Reads the rows, meets the other ranks, and trains."""
        rows = _read(batches)
        session = self.opened_session(rank)
        try:
            with connected(self, rank, session) as (communicator, exit_barrier):
                if isinstance(rows, DataError):  # a rank that fails before all have met ends others
                    raise rows
                rows = rows.ordered(self.training.seed)
                training = LinearTraining(communicator, rows, self.training)
                del rows
                part, name = training.train(), communicator.name
                exit_barrier.barrier()
        finally:
            if session is not None:
                session.close()
        yield from Result(rank.rank, "communicator", name).batches()
        yield from Result(rank.rank, "result", "", payload.dump(part)).batches()


def _read(batches: Iterator[pa.RecordBatch]) -> SparseRows | DataError:
    """The rows of a rank, all of which are read; what is wrong with them is returned."""
    parts, problem = [], None
    for batch in batches:
        if problem is None and pa.types.is_struct(batch.column(0).type):
            try:
                vectors, labels, *weights = batch.columns
                parts.append(SparseRows.from_arrow(vectors, labels, *weights or (None,)))
            except DataError as error:
                problem = error
    return problem or SparseRows.joined(parts)


@dataclass(frozen=True)
class LinearModel:
    """The weights of a linear model that gives the logarithm of the odds of class 1.

    Args:
        size: Indices are below it: the largest size of the vectors that it was trained on.
        ids: Indices whose weight is not 0, ascending: int64.
        weights: Theirs: float64.
        intercept: The weight that all rows have.
    """

    size: int
    ids: npt.NDArray[np.int64] = field(repr=False)
    weights: Numbers = field(repr=False)
    intercept: float

    def margins(self, vectors: SparseVectors) -> Numbers:
        """The logarithm of the odds of each row. An index without a weight counts nothing."""
        return _Lookup(self).margins(vectors)


class _Lookup:
    def __init__(self, model: LinearModel) -> None:
        self._model, self._index = model, RowIndex()
        self._end = int(model.ids[-1]) + 1 if len(model.ids) else 0
        self._dense: Numbers | None = None
        if 8 * self._end <= _DENSE_BYTES:
            self._dense = np.zeros(self._end + 1)  # the last is for indices that are too large
            self._dense[model.ids] = model.weights
        else:
            self._index.insert(model.ids)

    def margins(self, vectors: SparseVectors) -> Numbers:
        if self._dense is not None:
            found = self._dense.take(np.minimum(vectors.indices, self._end))
        else:
            slots = self._index.find(vectors.indices.astype(np.int64))
            found = np.where(slots < 0, 0.0, self._model.weights.take(slots, mode="clip"))
        return vectors.dot(found) + self._model.intercept


@dataclass(frozen=True)
class LinearScores(QueryTask):
    """Scores rows; see :class:`sparkdl.launch.task.Task`.

    Args:
        threshold: Class 1 is what has a greater probability.
        columns: Which columns of the result are wanted: ``rawPrediction``, ``probability``,
            ``prediction``, in this order.
        kept: How many columns of a batch come back before the new ones; the vectors are at
            ``place``. None: the vectors are all that comes, and a column of structs goes back.
        place: See ``kept``.
    """

    model: LinearModel
    threshold: float
    columns: tuple[str, ...]
    kept: int | None = None
    place: int = 0
    use_gpu = False

    @property
    def devices(self) -> DeviceRequest:
        """None but the processor."""
        return DeviceRequest(None, unscheduled=True)

    @property
    def result(self) -> T.StructType:
        """The columns of the result, under wire names."""
        from pyspark.sql import types as T

        names = wire_names(len(self.columns))
        kinds = [column_type(kind) for kind in self.columns]
        return T.StructType([T.StructField(n, k) for n, k in zip(names, kinds, strict=True)])

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The new columns of each batch."""
        lookup = _Lookup(self.model)
        for batch in batches:
            vectors = SparseVectors.from_arrow(batch.column(self.place))
            made = self._columns(lookup.margins(vectors))
            if self.kept is None:
                structs = pa.StructArray.from_arrays(made, names=wire_names(len(made)))
                yield pa.RecordBatch.from_arrays([structs], names=["scores"])
            else:
                every = [*batch.columns[: self.kept], *made]
                yield pa.RecordBatch.from_arrays(every, names=wire_names(len(every)))

    def _columns(self, margins: Numbers) -> list[pa.Array]:
        probability = probabilities(margins)
        made = {
            "rawPrediction": lambda: _pairs(-margins, margins),
            "probability": lambda: _pairs(1 - probability, probability),
            "prediction": lambda: pa.array((probability > self.threshold).astype(np.float64)),
        }
        return [made[name]() for name in self.columns]


def column_type(kind: str) -> T.DataType:
    """The type of a column of :class:`LinearScores`."""
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import types as T

    return T.DoubleType() if kind == "prediction" else VectorUDT()


def probabilities(margins: Numbers) -> Numbers:
    """The probability of class 1, from the logarithm of its odds, of each row."""
    return 1 / (1 + np.exp(-np.clip(margins, -500, 500)))


def _pairs(first: Numbers, second: Numbers) -> pa.Array:
    """Dense vectors of two numbers, as Spark stores them."""
    rows = len(first)
    offsets = pa.array(np.arange(0, 2 * rows + 1, 2, dtype=np.int32))
    numbers = pa.array(np.column_stack([first, second]).reshape(-1))
    kinds = [
        pa.field("type", pa.int8(), False), pa.field("size", pa.int32()),
        pa.field("indices", pa.list_(pa.field("element", pa.int32(), False))),
        pa.field("values", pa.list_(pa.field("element", pa.float64(), False))),
    ]  # fmt: skip
    values = pa.ListArray.from_arrays(offsets, numbers).cast(kinds[3].type)
    columns = [
        pa.array(np.ones(rows, np.int8)), pa.nulls(rows, pa.int32()),
        pa.nulls(rows, kinds[2].type), values,
    ]  # fmt: skip
    return pa.StructArray.from_arrays(columns, fields=kinds)
