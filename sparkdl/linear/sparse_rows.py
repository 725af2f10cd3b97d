"""``SparseRows``: labelled sparse vectors in memory, one array for each part of all rows (CSR)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.errors import DataError
from sparkdl.tables.hashing import GOLDEN, mix64

Numbers = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]
N = TypeVar("N", np.float64, np.uint64)

_DENSE = 1
"""The number of dense vectors in the field ``type`` of Spark's vectors."""
_SHOWN = 5
"""Entries of a vector that an error shows."""


@dataclass(frozen=True)
class SparseVectors:
    """Vectors, one after another.

    Args:
        starts: The place of each vector's first entry, and the number of all entries: int64, of
            shape (rows + 1).
        indices: Indices of all entries, from 0 on: int32, of shape (entries).
        values: Values of all entries: float64, of shape (entries). None: all are 1.
        size: The largest size that a vector says it has.
    """

    starts: Places
    indices: Indices
    values: Numbers | None
    size: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Places:
        """The number of each vector's entries."""
        return np.diff(self.starts)

    @classmethod
    def from_arrow(cls, array: pa.Array) -> SparseVectors:
        """The vectors of a column of ``pyspark.ml``'s vectors, dense and sparse ones mixed.

        Zeros are left out, those of dense vectors and those that a sparse vector stores.

        Args:
            array: The structs in which Spark stores vectors.

        Raises:
            DataError: A vector is null, malformed, or has NaN or infinity.
        """
        fields = dict(zip([field.name for field in array.type], array.flatten(), strict=True))
        kinds = fields["type"]
        if kinds.null_count:
            raise DataError(
                "a row has no features", expected="a vector in each row",
                received=f"null in {kinds.null_count} of {len(array)} rows",
                hint="df.dropna() removes such rows",
            )  # fmt: skip
        values, lengths = _entries(fields["values"], np.float64)
        indices, counts = _entries(fields["indices"], np.int32)
        dense = kinds.to_numpy(zero_copy_only=False) == _DENSE
        sizes = pc.fill_null(fields["size"], 0).to_numpy(zero_copy_only=False).astype(np.int64)
        sizes = np.where(dense, lengths, sizes)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        if dense.any():
            inside = np.repeat(dense, lengths)
            whole = np.arange(len(values)) - np.repeat(starts[:-1], lengths)
            if len(indices) == (~inside).sum():
                whole[~inside] = indices
                counts = np.where(dense, lengths, counts)
            indices = whole.astype(np.int32)
        found = cls(starts, indices, values, int(sizes.max(initial=0)))
        wrong = counts != lengths
        if not wrong.any() and len(indices):
            wrong = found._rows_with((indices < 0) | (indices >= np.repeat(sizes, lengths)))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise DataError(
                "a row has a malformed vector",
                expected="as many indices as values, all of them from 0 to the size",
                received=f"size {sizes[row]}, {counts[row]} indices and {lengths[row]} values",
            )
        infinite = ~np.isfinite(values)
        if infinite.any():
            row = int(np.argmax(found._rows_with(infinite)))
            raise DataError(
                "a row has a feature that is no finite number", expected="finite values",
                received=found.text_of(row),
                hint="df.filter(...), or fill such values before they are assembled to a vector",
            )  # fmt: skip
        return found._without_zeros()

    def _rows_with(self, entries: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        rows = np.repeat(np.arange(len(self)), self.lengths)
        return np.bincount(rows[entries], minlength=len(self)) > 0

    def text_of(self, row: int) -> str:
        """The beginning of a vector, for messages."""
        part = slice(int(self.starts[row]), int(self.starts[row + 1]))
        indices = self.indices[part]
        values = np.ones(len(indices)) if self.values is None else self.values[part]
        odd = np.flatnonzero(~np.isfinite(values))[:1]  # what is wrong is shown
        chosen = np.union1d(np.arange(min(_SHOWN, len(indices))), odd).astype(int)
        entries = ", ".join(f"{indices[at]}: {values[at]:g}" for at in chosen)
        more = ", ..." if len(indices) > len(chosen) else ""
        return f"features {{{entries}{more}}}"

    def _without_zeros(self) -> SparseVectors:
        values = self.values
        assert values is not None
        kept, starts, indices = values != 0, self.starts, self.indices
        if not kept.all():
            starts = np.concatenate([[0], np.cumsum(kept)])[starts]
            values, indices = values[kept], indices[kept]
        return SparseVectors(starts, indices, None if (values == 1).all() else values, self.size)

    def dot(self, weights: Numbers) -> Numbers:
        """The product of each vector with weights, one for each entry.

        Args:
            weights: Weights of shape (entries); it is changed.
        """
        if self.values is not None:
            weights *= self.values
        return summed(weights, self.starts)


def summed(entries: npt.NDArray[N], starts: Places) -> npt.NDArray[N]:
    """The sum of the entries of each row, 0 of a row without any; see :class:`SparseVectors`."""
    filled = np.flatnonzero(starts[1:] > starts[:-1])
    sums = np.zeros(len(starts) - 1, entries.dtype)
    if len(filled):
        sums[filled] = np.add.reduceat(entries, starts[filled])
    return sums


def _entries(lists: pa.Array, kind: type[Any]) -> tuple[npt.NDArray[Any], Places]:
    """The values of all lists, and the length of each; a null is an empty list."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    if not lengths.any():  # Spark 3.5 may send no offsets then, and pyarrow crashes without
        return np.empty(0, kind), lengths.astype(np.int64)
    values = lists.flatten().to_numpy(zero_copy_only=False)
    return values.astype(kind, copy=False), lengths.astype(np.int64)


@dataclass(frozen=True)
class SparseRows:
    """Rows to train on.

    Args:
        labels: 0 or 1: float64, of shape (rows).
        weights: Weights of the rows, at least 0: float64, of shape (rows). None: all are 1.
    """

    vectors: SparseVectors
    labels: Numbers
    weights: Numbers | None

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def from_arrow(
        cls, vectors: pa.Array, labels: pa.Array, weights: pa.Array | None
    ) -> SparseRows:
        """The rows of a batch of Spark's.

        Args:
            vectors: See :meth:`SparseVectors.from_arrow`.
            labels: Numbers of float64.
            weights: Numbers of float64; None for no weights.

        Raises:
            DataError: A vector, a label or a weight that cannot be trained on; the row is shown.
        """
        features = SparseVectors.from_arrow(vectors)
        found = _numbers(labels)
        _check(
            (found == 0) | (found == 1), found, features, "label", "0 or 1",
            "StringIndexer numbers two classes 0 and 1; F.when(F.col('label') > 0, 1).otherwise(0) "
            "makes such labels of -1 and 1",
        )  # fmt: skip
        if weights is None:
            return cls(features, found, None)
        given = _numbers(weights)
        _check((given >= 0) & np.isfinite(given), given, features, "weight", "a number >= 0", "")
        return cls(features, found, given)

    @classmethod
    def joined(cls, parts: Iterable[SparseRows]) -> SparseRows:
        """The rows of all parts, one after another."""
        rows = list(parts)
        vectors = [part.vectors for part in rows]
        counts = np.cumsum([0, *(len(v.indices) for v in vectors)])
        starts = [v.starts[1:] + first for v, first in zip(vectors, counts[:-1], strict=True)]
        ones = all(v.values is None for v in vectors)
        weighted = any(part.weights is not None for part in rows)
        together = SparseVectors(
            np.concatenate([np.zeros(1, np.int64), *starts]),
            np.concatenate([np.empty(0, np.int32), *(v.indices for v in vectors)]),
            None if ones else np.concatenate([_values_of(v) for v in vectors]),
            max((v.size for v in vectors), default=0),
        )
        return cls(
            together, np.concatenate([np.empty(0), *(part.labels for part in rows)]),
            np.concatenate([_weights_of(part) for part in rows]) if weighted else None,
        )  # fmt: skip

    def ordered(self, seed: int) -> SparseRows:
        """The rows in an order that follows from what they hold and from ``seed`` alone.

        It is as good as random, and the same in whatever order Spark brings the rows.
        """
        vectors = self.vectors
        keys = vectors.indices.astype(np.uint64)
        if vectors.values is not None:
            keys += vectors.values.view(np.uint64) * GOLDEN
        hashes = summed(mix64(keys), vectors.starts)
        hashes += mix64(self.labels.view(np.uint64))
        if self.weights is not None:
            hashes += mix64(self.weights.view(np.uint64) + GOLDEN)
        start = mix64(np.array([seed], np.int64))
        return self.taken(np.argsort(mix64(hashes ^ start)))

    def taken(self, order: Places) -> SparseRows:
        """The rows at some places."""
        vectors = self.vectors
        lengths = vectors.lengths[order]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        entries = np.repeat(vectors.starts[order] - starts[:-1], lengths)
        entries += np.arange(len(entries))
        values = None if vectors.values is None else vectors.values[entries]
        weights = None if self.weights is None else self.weights[order]
        taken = SparseVectors(starts, vectors.indices[entries], values, vectors.size)
        return SparseRows(taken, self.labels[order], weights)

    def cut(self, start: int, stop: int) -> SparseRows:
        """The rows from ``start`` to ``stop``, views of these."""
        vectors = self.vectors
        first, end = vectors.starts[start], vectors.starts[stop]
        values = None if vectors.values is None else vectors.values[first:end]
        weights = None if self.weights is None else self.weights[start:stop]
        starts, indices = vectors.starts[start : stop + 1] - first, vectors.indices[first:end]
        cut = SparseVectors(starts, indices, values, vectors.size)
        return SparseRows(cut, self.labels[start:stop], weights)


def _values_of(vectors: SparseVectors) -> Numbers:
    return np.ones(len(vectors.indices)) if vectors.values is None else vectors.values


def _weights_of(rows: SparseRows) -> Numbers:
    return np.ones(len(rows)) if rows.weights is None else rows.weights


def _numbers(column: pa.Array) -> Numbers:
    """A column as float64; NaN for null."""
    found: Numbers = np.array(column.to_numpy(zero_copy_only=False), np.float64)
    return found


def _check(
    sound: npt.NDArray[np.bool_],
    found: Numbers,
    vectors: SparseVectors,
    what: str,
    expected: str,
    hint: str,
) -> None:
    """Raises DataError with the first row that is not sound."""
    if not sound.all():
        row = int(np.argmin(sound))
        value = "null or NaN" if np.isnan(found[row]) else f"{found[row]:g}"
        raise DataError(
            f"a row has a {what} that cannot be trained on",
            expected=expected,
            received=f"{what} {value} in the row with {vectors.text_of(row)}; "
            f"{int((~sound).sum())} such rows among {len(sound)}",
            hint=hint,
        )
