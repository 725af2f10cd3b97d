"""On the executor: Arrow batches of a model's inputs -> Arrow arrays of its predictions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.config import UseGpu
from sparkdl.data import DataSpec, decode, decode_valid, rows_with_nulls
from sparkdl.data.columns import Ragged, aligned_empty
from sparkdl.launch.devices import DeviceRequest, Resources, start_framework
from sparkdl.launch.task import QueryTask
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.process.closing import Closing
from sparkdl.process.user_warnings import warn_user
from sparkdl.spark.inference.output_columns import OutputColumn, to_arrow, with_nulls
from sparkdl.training.learning import Arrays, Predictor

LENGTHS = "lengths of "
"""Stands before the name of a padded input, where its rows' lengths go beside the inputs."""
AMOUNT = "spark.task.resource.gpu.amount"


def warn_of_shared_gpus(spark: Any, use_gpu: UseGpu) -> None:
    """Warns where Spark runs several tasks on one GPU: each has a model of its own there.

    Args:
        spark: The session, classic or of Spark Connect; None where there is none yet.
    """
    if use_gpu is False or spark is None:
        return
    amount = str(spark.conf.get(AMOUNT, ""))
    with contextlib.suppress(ValueError):
        tasks = int(1 / float(amount)) if 0 < float(amount) < 1 else 1
        if tasks > 1:
            warn_user(
                f"{tasks} workers share each GPU ({AMOUNT}={amount}), and each loads a model of "
                "its own into its memory"
            )


class ForwardTask(QueryTask):
    """The base of tasks that run a model forward: its devices."""

    archive: PredictorArchive
    use_gpu: UseGpu

    @property
    def devices(self) -> DeviceRequest:
        return DeviceRequest(self.archive.archive.backend, self.use_gpu)


@dataclass(frozen=True)
class PredictorTask(ForwardTask):
    """A model, and how its rows are read."""

    archive: PredictorArchive
    spec: DataSpec
    batch_size: int
    use_gpu: UseGpu

    @contextlib.contextmanager
    def predictor(self, resources: Resources) -> Iterator[Predictor]:
        """The model in this process, on the devices that Spark gave.

        The archive is this task's own, and without its file from then on.
        """
        start_framework(self.devices.place(resources))
        from sparkdl.learner.cache import cached_predictor

        with cached_predictor(self.archive) as predictor:
            self.archive.archive.forget_content()
            yield predictor


Mask = npt.NDArray[np.bool_]
HandleInvalid = Literal["error", "skip", "keep"]
"""What happens to rows that no model can take; see :func:`sparkdl.predict`."""
HANDLE_INVALID = ("error", "skip", "keep")
_DECODED_BYTES = 2 << 20
"""Bytes of plain numbers that are decoded at a time, and cut into forward passes as arrays."""
_RETURNED_BYTES = 16 << 20
"""Bytes of predictions that are returned before the rest of their Arrow batch is decoded."""


@dataclass(frozen=True)
class Predicted:
    """Predictions for the next rows, in the order in which they came.

    Args:
        valid: Which of the rows have predictions; None: all.
        columns: One array per output column. With ``handle_invalid='keep'`` a value (or null) per
            row, else a value per row that has one.
    """

    num_rows: int
    valid: Mask | None
    columns: list[pa.Array]


@dataclass
class ForwardPass(Closing):
    """Runs a predictor over Arrow batches; the model comes up when the first rows fit.

    Args:
        open_predictor: Brings the model up in this process.
    """

    spec: DataSpec
    batch_size: int
    outputs: Sequence[OutputColumn]
    archive: PredictorArchive
    handle_invalid: HandleInvalid
    open_predictor: Callable[[], AbstractContextManager[Predictor]]
    _opened: ExitStack = field(default_factory=ExitStack, init=False)
    _predictor: Predictor | None = field(default=None, init=False)
    _waiting: list[Arrays] = field(default_factory=list, init=False)
    _made: list[list[Any]] = field(default_factory=list, init=False)
    _masks: list[Mask] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.outputs = [column.typed(self.archive, self.spec.features) for column in self.outputs]

    def close(self) -> None:
        self._opened.close()

    def over(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Predicted]:
        """The predictions for all rows, in order, in pieces of a limited size.

        Rows that are too few for a forward pass wait for those of the next Arrow batch, of which
        the first are read together with them. Only the last pass may have fewer rows. A small
        partition's predictions come in one piece: where Spark wants only the first rows it stops
        reading after the first piece, and who writes more loses its process.

        Args:
            batches: The columns of ``spec`` by name.

        Raises:
            DataError: The rows do not fit the model.
        """
        step, first_row = self._rows_at_once(), 0
        for batch in batches:
            if self.spec.encodes:
                self._model()
            yield from self._predicted()  # of the batch before, which was not the last
            self._refuse_nulls(batch, first_row)
            start = 0
            while start < batch.num_rows:
                wanted = self.batch_size - self._num_waiting if self._waiting else step
                stop = min(start + wanted, batch.num_rows)
                x, num_rows, valid = self._read(batch.slice(start, wanted), first_row + start)
                self._masks.append(valid)
                self._made += map(self._columns, self._forward(x, num_rows))
                if self._size_bytes >= _RETURNED_BYTES:
                    yield from self._predicted()
                start = stop
            first_row += batch.num_rows
        if self._waiting:
            self._made.append(self._columns(self._pass_of_waiting()))
        yield from self._predicted()

    def _refuse_nulls(self, batch: pa.RecordBatch, first_row: int) -> None:
        """Looks at the whole batch before any of it goes to the model, and before that is up."""
        if self.handle_invalid == "error":
            nulls = rows_with_nulls(batch, self.spec)
            if nulls.any():
                row = int(np.argmax(nulls))
                decode(batch.slice(row, 1), self.spec, first_row + row)  # raises

    def _rows_at_once(self) -> int:
        """Rows to decode at a time: one forward pass of images, several of plain numbers."""
        size_bytes = 0
        for entry in self.spec.entries:
            if entry.kind in ("decoded", "image", "text") or None in entry.shape:
                return self.batch_size
            size_bytes += math.prod(d or 1 for d in entry.shape) * np.dtype(entry.dtype).itemsize
        return self.batch_size * max(1, _DECODED_BYTES // (size_bytes * self.batch_size))

    def _read(self, rows: pa.RecordBatch, first_row: int) -> tuple[Arrays, int, Mask]:
        """The inputs, the number of their rows, and which of ``rows`` these are."""
        if self.handle_invalid == "error":
            inputs, valid = decode(rows, self.spec, first_row), np.ones(len(rows), bool)
        else:
            inputs, valid = decode_valid(rows, self.spec, first_row)
        lengths = {LENGTHS + name: inputs.lengths[name] for name in self._positions.values()}
        return {**inputs.x, **lengths}, inputs.num_rows, valid

    def _forward(self, x: Arrays, num_rows: int) -> Iterator[Arrays]:
        start = 0
        if num_rows and self._waiting:
            if _row_shapes(x) != _row_shapes(self._waiting[0]):  # free dimensions
                yield self._pass_of_waiting()
            else:
                start = min(self.batch_size - self._num_waiting, num_rows)
                self._waiting.append({name: array[:start].copy() for name, array in x.items()})
                if self._num_waiting == self.batch_size:
                    yield self._pass_of_waiting()
        while start + self.batch_size <= num_rows:
            predictor = self._model()
            several = predictor.passes * self.batch_size
            stop = start + (several if start + several <= num_rows else self.batch_size)
            yield self._predict(predictor, {name: array[start:stop] for name, array in x.items()})
            start = stop
        if start < num_rows:  # a copy: a view would hold the whole Arrow batch
            self._waiting.append({name: array[start:].copy() for name, array in x.items()})

    def _pass_of_waiting(self) -> Arrays:
        x = {name: _joined([part[name] for part in self._waiting]) for name in self._waiting[0]}
        self._waiting.clear()
        return self._predict(self._model(), x)

    def _predict(self, predictor: Predictor, x: Arrays) -> Arrays:
        lengths = {name: array for name, array in x.items() if name.startswith(LENGTHS)}
        inputs = {name: array for name, array in x.items() if name not in lengths}
        return {**predictor.predict(inputs, self.batch_size), **lengths}

    @property
    def _positions(self) -> dict[str, str]:
        """Output -> the padded input whose positions it keeps."""
        features = self.spec.features
        return {
            output: name
            for output, name in self.archive.positions.items()
            if name in features and features[name].padding is not None
        }

    def _model(self) -> Predictor:
        """The model, which comes up with its first pass."""
        if self._predictor is None:
            self._predictor = self._opened.enter_context(self.open_predictor())
        return self._predictor

    @property
    def _num_waiting(self) -> int:
        return sum(len(next(iter(part.values()))) for part in self._waiting)

    @property
    def _size_bytes(self) -> int:
        """Bytes of the predictions that were not returned yet."""
        return sum(array.nbytes for arrays in self._made for array in arrays)

    def _columns(self, outputs: Arrays) -> list[Any]:
        known = self.archive.signature.outputs
        lengths = {name: outputs.pop(name) for name in list(outputs) if name.startswith(LENGTHS)}
        if not outputs.keys() >= known.keys():  # of a subclassed model: only the order is known
            outputs = dict(zip(known, outputs.values(), strict=True))
        scores, positions = self.archive.scores, self._positions
        columns: list[Any] = []
        for column in self.outputs:
            made = column.values(np.asarray(outputs[column.output]), scores.get(column.output))
            is_cut = column.output in positions and made.ndim > 1
            columns.append(
                cut(made, lengths[LENGTHS + positions[column.output]]) if is_cut else made
            )
        return columns

    def _predicted(self) -> Iterator[Predicted]:
        """The outputs that are made and not returned: the rows before the first that waits."""
        valid = np.concatenate([*self._masks, np.ones(0, bool)])
        num_made = sum(len(arrays[0]) for arrays in self._made)
        stop = int(np.flatnonzero(valid)[num_made]) if self._waiting else len(valid)
        made, self._made, self._masks = self._made, [], [valid[stop:]]
        if not stop:
            return
        valid = valid[:stop]
        keep = self.handle_invalid == "keep"
        types = [column.arrow_type(self.archive) for column in self.outputs]
        if not made:
            columns = [pa.nulls(stop if keep else 0, kind) for kind in types]
        else:
            of_columns = zip(*made, strict=True)
            columns = [to_arrow(of, kind) for of, kind in zip(of_columns, types, strict=True)]
            if keep and not valid.all():
                columns = [with_nulls(column, valid) for column in columns]
        yield Predicted(stop, None if keep or valid.all() else valid, columns)


def cut(rows: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> Ragged:
    """The first ``lengths`` positions of each row, ``(rows, positions, ...)``.

    >>> cut(np.array([[1, 2], [3, 4]]), np.array([1, 2])).values
    array([1, 3, 4])
    """
    return Ragged(rows[np.arange(rows.shape[1]) < lengths[:, None]], lengths)


def _row_shapes(x: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape[1:] for name, array in x.items()}


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    if len(parts) == 1:
        return parts[0]
    joined = aligned_empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    return np.concatenate(parts, out=joined)
