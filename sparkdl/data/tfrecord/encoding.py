"""Arrow record batches -> frames of Example, SequenceExample or ByteArray records.

The bytes are those that TensorFlow writes (with the features ordered by name, which is what
``SerializeToString(deterministic=True)`` does). A null leaves its feature out; an empty list is
written as one. Doubles and decimals are rounded to float32, as the format has no wider ones.

A message is put together without a loop over rows: the sizes of all rows are computed from the
inside out, then the bytes are written from the outside in, each kind of byte for all rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.data.plain_arrow import bytes_of, is_any_list
from sparkdl.data.tfrecord import loops
from sparkdl.data.tfrecord.decoding import ListKind, RecordType, depth_of, kind_of
from sparkdl.data.tfrecord.framing import MAX_RECORD_BYTES, varint
from sparkdl.data.tfrecord.loops import PADDING, Bytes, Positions
from sparkdl.errors import DataError


def encode_batch(batch: pa.RecordBatch, record_type: RecordType) -> memoryview:
    """The rows as frames, ready to be written to a file.

    Args:
        batch: Rows, of columns that :func:`~sparkdl.data.tfrecord.decoding.check_schema` allows.

    Raises:
        DataError: A value has no place in a record: a null in a list, a record of 2 GiB.
    """
    number = batch.num_rows
    if record_type == "ByteArray":
        body: _Part = _Texts(*_spans_of(batch.column(0)))
    else:
        body = _record(batch, record_type == "SequenceExample")
    if number and body.sizes.max() >= MAX_RECORD_BYTES:
        raise DataError(
            "a row is too long for a record", expected=f"fewer than {MAX_RECORD_BYTES} bytes",
            received=f"{int(body.sizes.max())} bytes",
        )  # fmt: skip
    ends = np.cumsum(body.sizes + 16)
    total = int(ends[-1]) if number else 0
    loops.count_bytes(total)
    out = np.zeros(total + PADDING, np.uint8)
    starts = ends - body.sizes - 4
    _put(out, starts - 12, body.sizes.astype("<u8").view(np.uint8).reshape(-1, 8))
    body.write(out, starts)
    eight = np.full(number, 8, np.int64)
    _put(out, starts - 4, _four_bytes(loops.masked_crcs(out, starts - 12, eight)))
    _put(out, ends - 4, _four_bytes(loops.masked_crcs(out, starts, body.sizes)))
    return memoryview(out.data)[:total]


def _four_bytes(numbers: npt.NDArray[np.uint32]) -> Bytes:
    return numbers.astype("<u4").view(np.uint8).reshape(-1, 4)


def _put(out: Bytes, starts: Positions, rows: Bytes) -> None:
    width = rows.shape[1]
    if width and len(starts):
        np.ndarray((len(out) - width + 1, width), np.uint8, out, 0, (1, 1))[starts] = rows


class _Part:
    """Some bytes of each message: their sizes, and how they are written."""

    sizes: Positions

    def write(self, out: Bytes, starts: Positions) -> None:
        """Writes the bytes of message ``i`` from ``starts[i]`` on."""
        raise NotImplementedError


@dataclass
class _Fixed(_Part):
    """The same bytes in each of ``number`` messages."""

    text: bytes
    number: int

    def __post_init__(self) -> None:
        self.sizes = np.full(self.number, len(self.text), np.int64)

    def write(self, out: Bytes, starts: Positions) -> None:
        rows = np.broadcast_to(np.frombuffer(self.text, np.uint8), (len(starts), len(self.text)))
        _put(out, starts, rows)


class _Texts(_Part):
    """Bytes that lie somewhere in memory: one span for each message."""

    def __init__(self, source: Bytes, starts: Positions, lengths: Positions) -> None:
        self.source, self.starts, self.sizes = source, starts, lengths

    def write(self, out: Bytes, starts: Positions) -> None:
        loops.copy_spans(self.source, self.starts, self.sizes, out, starts)


class _Varints(_Part):
    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values.astype(np.uint64)
        self.sizes = loops.varint_sizes(self.values)

    def write(self, out: Bytes, starts: Positions) -> None:
        loops.write_varints(self.values, out, starts)


class _Chain(_Part):
    def __init__(self, *parts: _Part) -> None:
        self.parts = parts
        self.sizes = np.sum([part.sizes for part in parts], axis=0).astype(np.int64)

    def write(self, out: Bytes, starts: Positions) -> None:
        for part in self.parts:
            part.write(out, starts)
            starts = starts + part.sizes


class _Present(_Part):
    """A part of some of the messages; the others have nothing in its place."""

    def __init__(self, part: _Part, rows: Positions, number: int) -> None:
        self.part, self.rows = part, rows
        self.sizes = np.zeros(number, np.int64)
        self.sizes[rows] = part.sizes

    def write(self, out: Bytes, starts: Positions) -> None:
        self.part.write(out, starts[self.rows])


class _Repeated(_Part):
    """Several parts for each message, one after the other."""

    def __init__(self, part: _Part, counts: Positions) -> None:
        self.part, self.counts = part, counts
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(part.sizes)])
        self._begins = sums[:-1]
        ends = np.cumsum(counts)
        self._bases = sums[ends - counts]
        self.sizes = sums[ends] - self._bases

    def write(self, out: Bytes, starts: Positions) -> None:
        self.part.write(out, np.repeat(starts - self._bases, self.counts) + self._begins)


def _message(tag: int, part: _Part) -> _Part:
    return _Chain(_Fixed(bytes([tag]), len(part.sizes)), _Varints(part.sizes), part)


def _record(batch: pa.RecordBatch, sequence: bool) -> _Part:
    number = batch.num_rows
    context: list[_Part] = []
    lists: list[_Part] = []
    for name, field, column in sorted(
        (field.name.encode(), field, batch.column(i)) for i, field in enumerate(batch.schema)
    ):
        depth, _ = depth_of(field.type)
        nested = sequence and depth == 2
        rows = np.arange(number)
        if column.null_count:
            rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
            column = column.drop_null()
        value = _feature_list(column, field.name) if nested else _feature(column, field.name)
        key = _Fixed(b"\x0a" + varint(len(name)) + name, len(rows))
        entry = _message(0x0A, _Chain(key, _message(0x12, value)))
        part = entry if len(rows) == number else _Present(entry, rows, number)
        (lists if nested else context).append(part)
    nothing = _Fixed(b"", number)
    parts = []
    if context or not sequence:
        parts.append(_message(0x0A, _Chain(nothing, *context)))
    if lists:
        parts.append(_message(0x12, _Chain(nothing, *lists)))
    return _Chain(nothing, *parts)


def _feature_list(column: pa.Array, name: str) -> _Part:
    counts, inner = _unnested(column)
    if inner.null_count:
        raise _null_inside(name)
    return _Repeated(_message(0x0A, _feature(inner, name)), counts)


def _feature(column: pa.Array, name: str) -> _Part:
    """The feature message of each row; no row is null."""
    if is_any_list(column.type):
        counts, values = _unnested(column)
    else:
        counts, values = np.ones(len(column), np.int64), column
    if values.null_count:
        raise _null_inside(name)
    kind = kind_of(values.type)
    if kind == ListKind.BYTES:
        return _message(0x0A, _Repeated(_message(0x0A, _Texts(*_spans_of(values))), counts))
    rows = np.flatnonzero(counts)  # an empty list has no packed field
    some = counts[rows]
    if kind == ListKind.FLOAT:
        source = _floats(values, name).view(np.uint8)
        ends = np.cumsum(some) * 4
        packed: _Part = _Texts(source, ends - some * 4, some * 4)
    else:
        values = values.cast(pa.uint8()) if pa.types.is_boolean(values.type) else values
        packed = _Repeated(_Varints(_numbers(values).astype(np.int64).view(np.uint64)), some)
    message = _message(0x0A, packed)
    if len(rows) < len(counts):
        message = _Present(message, rows, len(counts))
    return _message(0x12 if kind == ListKind.FLOAT else 0x1A, message)


def _floats(values: pa.Array, name: str) -> npt.NDArray[np.float32]:
    wide = _numbers(values.cast(pa.float64()) if pa.types.is_decimal(values.type) else values)
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(wide, "<f4")
    if wide.dtype != np.float32 and (lost := np.isinf(floats) & np.isfinite(wide)).any():
        raise DataError(
            f"column {name!r}: a number too large for the float32 of a TFRecord",
            expected="numbers of at most 3.4e38", received=str(wide[np.argmax(lost)]),
        )  # fmt: skip
    return floats


def _numbers(values: pa.Array) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return found


def _unnested(column: pa.Array) -> tuple[Positions, pa.Array]:
    """How many values each list has, and all values; no list is null."""
    return _numbers(pc.list_value_length(column)).astype(np.int64), column.flatten()


def _spans_of(column: pa.Array) -> tuple[Bytes, Positions, Positions]:
    if column.null_count:
        raise _null_inside("")
    data, offsets = bytes_of(column)
    return data, offsets[:-1], np.diff(offsets)


def _null_inside(name: str) -> DataError:
    return DataError(
        f"column {name!r}: a null that no record can hold" if name else "a record that is null",
        expected="values; only a whole column's value may be null, which leaves its feature out",
        received="a null", hint="drop or fill it before writing",
    )  # fmt: skip
