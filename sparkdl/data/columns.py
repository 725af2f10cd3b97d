"""Which DataFrame columns become which model inputs, labels and sample weights.

``Ragged`` holds rows of different lengths: sequences to be padded, and texts. The specs are made
and validated on the driver, pickled, and read by ``decode`` on the executors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, UnknownNameError

Array = npt.NDArray[Any]
IndexArray = npt.NDArray[np.int64]

ALIGNMENT = 64
"""Bytes: of a cache line, where TensorFlow's own tensors begin."""


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array of undefined numbers whose memory begins at a multiple of :data:`ALIGNMENT`.

    One of objects (texts) lies anywhere: no framework takes its memory.
    """
    kind = np.dtype(dtype)
    if kind.hasobject:
        return np.empty(shape, kind)
    size_bytes = math.prod(shape) * kind.itemsize
    memory = np.empty(size_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size_bytes].view(kind).reshape(shape)


def as_aligned(array: npt.NDArray[Any], dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """The numbers of ``array`` as ``dtype``: the same object if nothing changes, else a copy.

    Args:
        array: Numbers.
        dtype: Of the result; that of ``array`` by default.
    """
    if (dtype is None or array.dtype == dtype) and is_aligned(array):
        return array
    copy = aligned_empty(array.shape, array.dtype if dtype is None else dtype)
    np.copyto(copy, array, casting="unsafe")
    return copy


def is_aligned(array: npt.NDArray[Any]) -> bool:
    """Whether the memory is one piece, may be written to, and begins where a cache line does."""
    flags = array.flags
    return flags.c_contiguous and flags.writeable and array.ctypes.data % ALIGNMENT == 0


@dataclass(frozen=True)
class Padding:
    """How rows of different length become one array, batch by batch.

    Args:
        value: What stands behind the end of a shorter row.
        few_lengths: Round the length of a batch up to a power of two, for frameworks that compile
            the step anew for each length.
        numbers: How many numbers of a flat array are a position; only a mask needs to know.
    """

    value: float = 0.0
    few_lengths: bool = False
    numbers: int = 1

    def length(self, longest: int) -> int:
        """The length of a batch whose longest row has ``longest`` positions; at least 1.

        >>> Padding(few_lengths=True).length(37), Padding().length(37)
        (64, 37)
        """
        longest = max(1, longest)
        return 1 << (longest - 1).bit_length() if self.few_lengths else longest


class Ragged:
    """Rows of different lengths, one after the other in one array.

    Args:
        values: All positions of all rows, ``(positions, ...)``.
        lengths: Positions of each row.
    """

    def __init__(self, values: Array, lengths: IndexArray) -> None:
        self.values, self.lengths = values, lengths
        self._starts: IndexArray | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.lengths.nbytes)

    @property
    def starts(self) -> IndexArray:
        """The first position of each row, and behind them the end of the last."""
        if self._starts is None:
            self._starts = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        return self._starts

    def take(self, indices: IndexArray) -> Ragged:
        """The rows at ``indices``, in that order."""
        lengths = self.lengths[indices]
        ends = np.cumsum(lengths)
        shift = np.repeat(self.starts[indices] - (ends - lengths), lengths)
        return Ragged(self.values[shift + np.arange(len(shift))], lengths)

    def slice(self, start: int, stop: int) -> Ragged:
        """The rows from ``start`` to ``stop``, without a copy."""
        values = self.values[self.starts[start] : self.starts[stop]]
        return Ragged(values, self.lengths[start:stop])

    def padded(self, padding: Padding, dtype: npt.DTypeLike) -> Array:
        """The rows as one array, ``(rows, length, ...)``."""
        width = padding.length(int(self.lengths.max(initial=0)))
        rows = np.full((len(self), width, *self.values.shape[1:]), padding.value, dtype)
        rows[np.arange(width) < self.lengths[:, None]] = self.values
        return rows

    def texts(self) -> Array:
        """The rows, which are texts in UTF-8, as an array of bytes objects."""
        content, starts = self.values.tobytes(), self.starts
        return np.array([content[a:b] for a, b in itertools.pairwise(starts)], object)


Stored = Array | Ragged
"""The rows of a column as they are kept."""

Shape = tuple[int | None, ...]
ColumnKind = Literal["array", "scalars", "binary", "image", "decoded", "text", "mask"]

COLUMN_KINDS: tuple[str, ...] = get_args(ColumnKind)


class ColumnEncoder(Protocol):
    """Makes numbers of the texts of a batch, such as a ``StringLookup``; can be pickled."""

    def encode(self, texts: Array, spec: ColumnSpec) -> Array:
        """``(rows, *spec.value_shape)`` of ``(rows,)`` bytes objects; DataError if that fails."""


@dataclass(frozen=True)
class ColumnSpec:
    """One model input, label or sample weight: where it comes from and what it must look like.

    Args:
        columns: DataFrame column names: one, or several for kind ``'scalars'``.
        shape: Per-row shape that the model gets. ``None`` is a free dimension: any size, but the
            same for all rows of a partition.
        dtype: NumPy dtype that the model gets.
        kind: How a value becomes an array. ``'array'``: (nested) lists of numbers, or an ML
            vector's struct. ``'scalars'``: one or several numeric columns, stacked along the last
            axis. ``'binary'``: raw little-endian bytes. ``'image'``: Spark's image struct, given
            as RGB(A) or grey ``(height, width, channels)``. ``'decoded'``: ``decoder`` makes the
            array. ``'text'``: strings, as bytes objects. ``'mask'``: for lists of numbers, True
            where a position of the row is no padding.
        decoder: For kind ``'decoded'``: a picklable function from one value (``bytes``, or a
            ``dict`` for a struct) to one array of ``shape``.
        one_hot: ``C`` turns integer labels in ``[0, C)`` into one-hot vectors; the last dimension
            of ``shape`` is then ``C``. Stored as integers, widened batch by batch.
        classes: ``C`` demands integer labels in ``[0, C)`` and leaves them integers.
        ignored: Beside ``classes``: one more label, which the loss leaves out; None for none.
        encoder: For kind ``'text'``: makes what the model gets of the texts, batch by batch.
        bounds: The least and the greatest value that a label may have; None for any.
        is_weight: The values are sample weights, which are not below 0; DataSpec sets it.
        source_dtype: For kind ``'binary'``: the dtype of the raw bytes if it is not ``dtype``.
        padding: For kinds ``'array'``, ``'decoded'`` and ``'mask'``: rows differ in length, the
            first dimension of ``shape``, and each batch is padded to its longest row.

    Raises:
        ConfigError: The arguments contradict each other.

    >>> ColumnSpec(('pixels',), (28, 28, 1)).label
    "'pixels'"
    """

    columns: tuple[str, ...]
    shape: Shape
    dtype: str = "float32"
    kind: ColumnKind = "array"
    decoder: Callable[[Any], Any] | None = None
    one_hot: int | None = None
    classes: int | None = None
    source_dtype: str | None = None
    bounds: tuple[float, float] | None = field(default=None, compare=False)
    is_weight: bool = field(default=False, compare=False)
    padding: Padding | None = None
    ignored: int | None = None
    encoder: ColumnEncoder | None = None

    def __post_init__(self) -> None:
        if isinstance(self.columns, str):
            object.__setattr__(self, "columns", (self.columns,))
        for name in ("columns", "shape"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if any(d is not None and d < 1 for d in self.shape):
            self._refuse("dimensions of at least 1, or None", f"shape {self.shape}")
        if self.kind not in COLUMN_KINDS:
            raise UnknownNameError("kind of column", self.kind, COLUMN_KINDS)
        if not self.columns or (len(self.columns) > 1 and self.kind != "scalars"):
            self._refuse(
                "one column, or several of kind 'scalars'",
                f"{len(self.columns)} columns of kind {self.kind!r}",
            )
        if self.kind != "text" or self.encoder is not None:
            for dtype in (self.dtype, self.source_dtype):
                _check_dtype(dtype, self)
        elif self.shape not in ((), (1,)):
            self._refuse("one text per row", f"shape {self.shape}")
        if self.padding is not None and (
            self.kind not in ("array", "mask", "decoded")
            or self.shape[:1] != (None,)
            or None in self.shape[1:]
        ):
            self._refuse(
                "padding of arrays whose first dimension is free",
                f"kind {self.kind!r}, shape {self.shape}",
            )
        if (self.decoder is not None) != (self.kind == "decoded"):
            self._refuse(
                "a decoder exactly when the kind is 'decoded'",
                f"kind {self.kind!r}, decoder {self.decoder!r}",
            )
        if self.source_dtype is not None and self.kind != "binary":
            self._refuse("source_dtype only with kind 'binary'", f"kind {self.kind!r}")
        if self.one_hot is not None and (
            self.one_hot < 1 or not self.shape or self.shape[-1] != self.one_hot
        ):
            self._refuse(
                "a shape whose last dimension is the number of classes",
                f"shape {self.shape}, one_hot={self.one_hot}",
            )
        if self.classes is not None and (self.classes < 1 or self.one_hot is not None):
            self._refuse(
                "classes >= 1, and not together with one_hot",
                f"classes={self.classes}, one_hot={self.one_hot}",
            )

    def _refuse(self, expected: str, received: str) -> None:
        raise ConfigError(
            f"the spec of column {self.label} contradicts itself", expected=expected,
            received=received,
        )  # fmt: skip

    @property
    def label(self) -> str:
        """The column names as an error message shows them."""
        return ", ".join(repr(name) for name in self.columns)

    @property
    def value_shape(self) -> Shape:
        """Per-row shape as stored: ``shape`` before the one-hot dimension."""
        return self.shape if self.one_hot is None else self.shape[:-1]

    @property
    def value_dtype(self) -> np.dtype[Any]:
        """Widest dtype as stored; a narrower source dtype stays as it is until the batch."""
        if self.kind == "text":
            return np.dtype(np.uint8)
        return np.dtype(self.dtype) if self.one_hot is None else np.dtype(np.int32)

    @property
    def is_ragged(self) -> bool:
        """Whether rows are stored with their own lengths."""
        return self.kind == "text" or self.padding is not None

    @property
    def position_shape(self) -> tuple[int, ...]:
        """The shape of one position of a ragged row."""
        return () if self.kind == "text" else tuple(d or 0 for d in self.shape[1:])

    @property
    def num_classes(self) -> int | None:
        """Number of classes among the labels, or None if the values are no labels."""
        return self.classes if self.one_hot is None else self.one_hot

    def finish(self, stored: Stored) -> Array:
        """Turns stored rows into what the model gets; the same object where nothing changes."""
        if isinstance(stored, Ragged) and self.encoder is not None:
            stored = self.encoder.encode(stored.texts(), self)
        if isinstance(stored, Ragged):
            if self.padding is None:
                return stored.texts().reshape(len(stored), *(d or 0 for d in self.shape))
            return stored.padded(self.padding, self.dtype)
        if self.one_hot is None:
            return stored if stored.dtype == self.dtype else as_aligned(stored, self.dtype)
        flat = np.zeros(stored.size * self.one_hot, self.dtype)
        flat[np.arange(stored.size) * self.one_hot + stored.ravel()] = 1
        return flat.reshape(*stored.shape, self.one_hot)


def _check_dtype(dtype: str | None, spec: ColumnSpec) -> None:
    try:
        known = dtype is None or np.dtype(dtype).kind in "biufc"
    except TypeError:
        known = False
    if not known:
        raise ConfigError(
            f"the spec of column {spec.label} has a dtype that is no number",
            expected="a numeric NumPy dtype", received=f"dtype {dtype!r}",
            hint="strings and categories become numbers before training (StringIndexer)",
        )  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Rows as the model gets them, by the names of its inputs and outputs.

    Args:
        x: Input name -> array of shape ``(num_rows, ...)``.
        y: Output name -> array.
        sample_weight: Output name -> array, or None.
        num_rows: Rows in every array.
        lengths: Name of a padded input -> positions of each row before it was padded.
    """

    x: dict[str, Array]
    y: dict[str, Array]
    sample_weight: dict[str, Array] | None
    num_rows: int
    lengths: dict[str, IndexArray] = field(default_factory=dict)


_Weights = Mapping[str, ColumnSpec] | ColumnSpec | None


def _as_weights(specs: _Weights) -> _Weights:
    if isinstance(specs, Mapping):
        return {name: replace(spec, is_weight=True) for name, spec in specs.items()}
    return None if specs is None else replace(specs, is_weight=True)


@dataclass(frozen=True)
class DataSpec:
    """All columns of a fit: inputs, labels, sample weights and the role of a row.

    Args:
        features: Model input name -> its columns.
        labels: Model output name -> its columns; empty to predict.
        sample_weight: Output name -> its columns, or one spec that serves all outputs.
        role_column: An integer column that is 0 in rows to train on and 1 in rows to validate on;
            -1, which is refused, where the user's column has null.
        group: Numbers of groups of rows: those of one lie together in a batch.

    Equal specs (an autoencoder's input and label, one weight for all outputs) are read, stored
    and gathered once.
    """

    features: Mapping[str, ColumnSpec]
    labels: Mapping[str, ColumnSpec] = field(default_factory=dict)
    sample_weight: _Weights = None
    role_column: str | None = None
    group: ColumnSpec | None = None

    def __post_init__(self) -> None:
        if not self.features:
            raise ConfigError(
                "no features are given", expected="a column for every model input", received="none"
            )
        unknown = [name for name in self.weights if name not in self.labels]
        if unknown or (self.sample_weight is not None and not self.labels):
            raise ConfigError(
                "sample weights that belong to no label",
                expected=f"names among the labels {sorted(self.labels)}",
                received=f"{unknown or 'sample weights without labels'}",
            )
        object.__setattr__(self, "sample_weight", _as_weights(self.sample_weight))

    @property
    def weights(self) -> dict[str, ColumnSpec]:
        """Output name -> the spec of its sample weight."""
        if self.sample_weight is None:
            return {}
        if isinstance(self.sample_weight, ColumnSpec):
            return dict.fromkeys(self.labels, self.sample_weight)
        return dict(self.sample_weight)

    @property
    def entries(self) -> tuple[ColumnSpec, ...]:
        """Every distinct spec once, in a fixed order; storage has one array for each."""
        found: dict[ColumnSpec, ColumnSpec] = {}
        group = () if self.group is None else (self.group,)
        used = (*self.features.values(), *self.labels.values(), *self.weights.values(), *group)
        for spec in used:
            known = found.get(spec, spec)
            if known is not spec:  # an input that is a label, too: one that is a weight
                spec = replace(
                    spec, bounds=spec.bounds or known.bounds,
                    is_weight=spec.is_weight or known.is_weight,
                )  # fmt: skip
            found[spec] = spec
        return tuple(found.values())

    def form(self, named: Collection[str] = ()) -> str:
        """A text that specs share whose batches have equal names, shapes and dtypes.

        Args:
            named: The names of single arrays that count; those of several always do.
        """
        groups = (self.features, self.labels, self.weights)
        return str([
            [
                (name if name in named or len(group) > 1 else "")
                + str((c.shape, c.dtype, c.one_hot, c.kind, c.padding))
                for name, c in group.items()
            ]
            for group in groups
        ])  # fmt: skip

    @property
    def is_padded(self) -> bool:
        """Whether batches have arrays of different length."""
        return any(e.padding is not None or (e.encoder and None in e.shape) for e in self.entries)

    @property
    def encodes(self) -> bool:
        """Whether Keras' layers make numbers of texts, so that the framework must be up before."""
        return any(entry.encoder is not None for entry in self.entries)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every DataFrame column that is read, once: what to select before sending the data."""
        names = [name for entry in self.entries for name in entry.columns]
        if self.role_column is not None:
            names.append(self.role_column)
        return tuple(dict.fromkeys(names))

    def assemble(self, arrays: Sequence[Array], num_rows: int) -> Batch:
        """One finished array per entry -> a Batch by input and output name."""
        found = dict(zip(self.entries, arrays, strict=True))
        weights = {name: found[entry] for name, entry in self.weights.items()}
        return Batch(
            {name: found[entry] for name, entry in self.features.items()},
            {name: found[entry] for name, entry in self.labels.items()}, weights or None, num_rows,
        )  # fmt: skip
