"""On the executor: Arrow batches of a model's inputs -> Arrow arrays of its predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.closing import Closing
from sparkdl.data import DataSpec, decode, decode_valid, rows_with_nulls
from sparkdl.learner.predictor_archive import PredictorArchive
from sparkdl.protocols import Arrays, Predictor
from sparkdl.spark.inference.output_columns import OutputColumn, to_arrow, with_nulls

Mask = npt.NDArray[np.bool_]
HandleInvalid = Literal["error", "skip", "keep"]
"""What becomes of rows that no model can take; see :func:`sparkdl.predict`."""
HANDLE_INVALID = ("error", "skip", "keep")
_DECODED_BYTES = 2 << 20
"""Plain numbers are decoded so many bytes at a time, and cut into forward passes as arrays."""
_RETURNED_BYTES = 16 << 20
"""Predictions of so many bytes are returned before the rest of their Arrow batch is decoded."""


@dataclass(frozen=True)
class Predicted:
    """Predictions for consecutive rows of an Arrow batch.

    Args:
        start: First of the rows.
        stop: The row after the last of them.
        valid: Which of the rows have predictions; None: all.
        columns: One array per output column. With ``handle_invalid='keep'`` a value (or null) per
            row, else a value per row that has one.
    """

    start: int
    stop: int
    valid: Mask | None
    columns: list[pa.Array]


@dataclass
class ForwardPass(Closing):
    """Runs a predictor over Arrow batches; the model comes up when the first rows fit.

    Args:
        spec: How the columns are read.
        batch_size: Rows per forward pass.
        outputs: The output columns.
        archive: What is known about the model.
        handle_invalid: What becomes of rows that no model can take.
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
    _first_row: int = field(default=0, init=False)

    def close(self) -> None:
        """Lets the model go."""
        self._opened.close()

    def predict(self, batch: pa.RecordBatch) -> Iterator[Predicted]:
        """The predictions for one Arrow batch, in order, in pieces of a limited size.

        Args:
            batch: The columns of ``spec`` by name.

        Raises:
            DataError: The rows do not fit the model.
        """
        self._refuse_nulls(batch)
        step = self._rows_at_once()
        begun = size_bytes = 0
        parts: list[list[Any]] = []
        masks: list[Mask] = []
        for start in range(0, batch.num_rows, step):
            x, num_rows, valid = self._read(batch.slice(start, step), self._first_row + start)
            masks.append(valid)
            for outputs in self._forward(x, num_rows):
                parts.append(self._columns(outputs))
                size_bytes += sum(part.nbytes for part in parts[-1])
            stop = min(start + step, batch.num_rows)
            if size_bytes >= _RETURNED_BYTES or stop == batch.num_rows:
                yield self._predicted(begun, stop, np.concatenate(masks), parts)
                begun, size_bytes, parts, masks = stop, 0, [], []
        self._first_row += batch.num_rows

    def _refuse_nulls(self, batch: pa.RecordBatch) -> None:
        """Looks at the whole batch before any of it goes to the model, and before that is up."""
        if self.handle_invalid == "error":
            nulls = rows_with_nulls(batch, self.spec)
            if nulls.any():
                row = int(np.argmax(nulls))
                decode(batch.slice(row, 1), self.spec, self._first_row + row)  # raises

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
            return decode(rows, self.spec, first_row).x, rows.num_rows, np.ones(len(rows), bool)
        inputs, valid = decode_valid(rows, self.spec, first_row)
        return inputs.x, inputs.num_rows, valid

    def _forward(self, x: Arrays, num_rows: int) -> Iterator[Arrays]:
        """The model's outputs by name, one or several forward passes at a time."""
        if num_rows and self._predictor is None:
            self._predictor = self._opened.enter_context(self.open_predictor())
        start = 0
        while start < num_rows and self._predictor is not None:
            several = self._predictor.passes * self.batch_size
            stop = start + (several if start + several <= num_rows else self.batch_size)
            part = {name: array[start:stop] for name, array in x.items()}
            yield self._predictor.predict(part, self.batch_size)
            start = stop

    def _columns(self, outputs: Arrays) -> list[Any]:
        known = self.archive.signature.outputs
        if (
            not outputs.keys() >= known.keys()
        ):  # a subclassed model, of which only the order is known
            outputs = dict(zip(known, outputs.values(), strict=True))
        scores = self.archive.scores
        return [
            column.values(np.asarray(outputs[column.output]), scores.get(column.output))
            for column in self.outputs
        ]

    def _predicted(self, start: int, stop: int, valid: Mask, parts: list[list[Any]]) -> Predicted:
        keep = self.handle_invalid == "keep"
        types = [column.arrow_type(self.archive) for column in self.outputs]
        if not parts:
            columns = [pa.nulls(stop - start if keep else 0, kind) for kind in types]
        else:
            of_columns = zip(*parts, strict=True)
            columns = [to_arrow(of, kind) for of, kind in zip(of_columns, types, strict=True)]
            if keep and not valid.all():
                columns = [with_nulls(column, valid) for column in columns]
        return Predicted(start, stop, None if keep or valid.all() else valid, columns)
