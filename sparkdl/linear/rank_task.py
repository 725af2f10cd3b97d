"""The tasks of ``FTRLClassifier``: one trains on a rank's rows, the other scores rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.errors import DataError
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.function import FunctionTask, connected
from sparkdl.launch.task import QueryTask, RankContext, Result
from sparkdl.linear.sparse_rows import Numbers, SparseRows, SparseVectors
from sparkdl.linear.spread_weights import LinearSettings, LinearTraining
from sparkdl.process import payload
from sparkdl.spark.forms.wire import wire_names
from sparkdl.tables.index import RowIndex

if TYPE_CHECKING:
    from pyspark.sql import types as T

_DENSE_BYTES = 64 << 20
"""Up to this size, scoring has the weights in an array by index, which is the fastest."""


@dataclass(frozen=True)
class LinearTask(FunctionTask):
    """Trains a linear model on the ranks' rows; see :class:`sparkdl.launch.task.Task`.

    The rows come as columns: vectors, labels, and weights if there are any. Each rank returns a
    :class:`~sparkdl.linear.spread_weights.LinearPart`.

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
    """Finds the weights of indices."""

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
