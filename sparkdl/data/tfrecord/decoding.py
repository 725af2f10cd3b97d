"""Records -> Arrow record batches of a schema; the messages in records.

A column of Arrow type ``T`` reads the feature of its name: integers and booleans from an
Int64List, ``float``, ``double`` and decimals from a FloatList, strings and binary from a BytesList.
``T`` takes lists of one value, ``list<T>`` of any length, ``list<list<T>>`` the feature lists of a
SequenceExample. A feature that a record lacks, or whose list is of no kind, is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.data.plain_arrow import is_any_list
from sparkdl.data.tfrecord import loops
from sparkdl.data.tfrecord.blocks import Block
from sparkdl.data.tfrecord.framing import broken
from sparkdl.data.tfrecord.loops import Bytes, Fields, MalformedError, Positions
from sparkdl.errors import ConfigError, DataError


class ListKind(IntEnum):
    """The kind of a feature's list, as the number of its field."""

    NONE = 0
    BYTES = 1
    FLOAT = 2
    INT64 = 3


@dataclass(frozen=True)
class ByteSpans:
    """Messages of one kind: which record each is in, where it begins and ends."""

    record: Positions
    start: Positions
    end: Positions

    def __len__(self) -> int:
        return len(self.record)

    def where(self, chosen: npt.NDArray[np.bool_] | Positions) -> ByteSpans:
        return ByteSpans(self.record[chosen], self.start[chosen], self.end[chosen])


@dataclass(frozen=True)
class Entries:
    """The entries of maps from names to messages.

    Args:
        key: Where each one's name is.
        value: Where its message is.
        hashes: A number for each name; equal for equal names.
    """

    key: ByteSpans
    value: ByteSpans
    hashes: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Lists:
    """The values of some features, in the order of their records.

    Args:
        record: Which record (or which feature list) each feature is in.
        kind: What its list holds.
        parts: Pieces of values: spans of bytes; their ``record`` is the number of the feature.
        wire: How each piece is written: 2 packed or a text, 0 and 5 a single number.
    """

    record: Positions
    kind: Positions
    parts: ByteSpans
    wire: Positions


@dataclass(frozen=True)
class Singles:
    """The one number that each record has in a feature.

    Args:
        kinds: The kind of its list; -1 or 0 where there is none.
        values: The numbers; of floats the bits.
    """

    kinds: npt.NDArray[np.int8]
    values: npt.NDArray[np.int64]


class FieldReader:
    """Finds messages in a block; malformed ones are raised with the place of their record."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.buffer: Bytes = block.buffer

    def records(self) -> ByteSpans:
        """The block's records as messages."""
        block = self.block
        return ByteSpans(np.arange(len(block)), block.starts, block.starts + block.lengths)

    def walk(self, messages: ByteSpans) -> Fields:
        """All fields of some messages."""
        try:
            return loops.walk(self.buffer, messages.start, messages.end)
        except MalformedError as error:
            raise self.malformed(int(messages.record[error.index]), error.what) from error

    def children(self, messages: ByteSpans, number: int) -> tuple[ByteSpans, Positions]:
        """Messages in field ``number`` of some messages, and in which of them each one is."""
        fields = self.walk(messages)
        found = fields.where((fields.number == number) & (fields.wire == 2))
        return ByteSpans(messages.record[found.message], found.start, found.end), found.message

    def entries(self, maps: ByteSpans) -> Entries:
        """The entries in field 1 of some messages."""
        entries, _ = self.children(maps, 1)
        fields = self.walk(entries)
        if _alternate(fields, len(entries)):
            key, value = fields.where(slice(0, None, 2)), fields.where(slice(1, None, 2))  # type: ignore[arg-type]
            key_start, key_end = key.start, key.end
            start, end = value.start, value.end
        else:
            key_start, key_end = _last(fields, 1, entries)
            start, end = _last(fields, 2, entries)
            values_of = np.bincount(fields.message[fields.number == 2], minlength=1)
            if values_of.max() > 1:
                row = int(entries.record[np.argmax(values_of > 1)])
                raise self.malformed(row, "a feature whose message is in two parts")
        keys = ByteSpans(entries.record, key_start, key_end)
        values = ByteSpans(entries.record, start, end)
        return Entries(keys, values, hash_spans(self.buffer, key_start, key_end))

    def named(self, entries: Entries, name: str) -> ByteSpans:
        """The message under a name in each map that has it, the last one where there are two."""
        key = name.encode()
        text = np.frombuffer(key + bytes(loops.PADDING), np.uint8)
        wanted = hash_spans(text, np.zeros(1, np.int64), np.full(1, len(key)))[0]
        rows = np.flatnonzero(entries.hashes == wanted)
        start, end = entries.key.start[rows], entries.key.end[rows]
        rows = rows[end - start == len(key)]
        shape = (len(self.buffer) - len(key) + 1, len(key))
        texts = np.ndarray(shape, np.uint8, self.buffer, 0, (1, 1))[entries.key.start[rows]]
        same = (texts == text[: len(key)]).all(axis=1)
        found = entries.value.where(rows if same.all() else rows[same])
        record = found.record
        return found.where(np.append(record[1:] != record[:-1], True)) if len(record) else found

    def lists(self, features: ByteSpans) -> Lists:
        """The content of the lists of features."""
        fields = self.walk(features)
        fields = fields.where((fields.number <= 3) & (fields.wire == 2))
        kind = np.zeros(len(features), np.int64)
        kind[fields.message] = fields.number  # of several kinds the last one counts
        before = np.full(len(features), -1)
        inside = fields.message[1:] == fields.message[:-1]
        changed = np.flatnonzero(inside & (fields.number[1:] != fields.number[:-1]))
        before[fields.message[changed]] = changed
        fields = fields.where(np.arange(len(fields.number)) > before[fields.message])
        parts = self.walk(ByteSpans(features.record[fields.message], fields.start, fields.end))
        parts = parts._replace(message=fields.message[parts.message])
        of = kind[parts.message]
        fits = (parts.wire == 2) | ((of == ListKind.INT64) & (parts.wire == 0))
        fits |= (of == ListKind.FLOAT) & (parts.wire == 5)
        fits &= parts.number == 1
        if not fits.all():
            parts = parts.where(fits)
        spans = ByteSpans(parts.message, parts.start, parts.end)
        return Lists(features.record, kind, spans, parts.wire)

    def indexed(self, single: Mapping[str, bool]) -> dict[str, Lists | Singles] | None:
        """Some features of Examples, found in one pass; None if that cannot be."""
        order = sorted(single)
        records = self.records()
        keys = [name.encode() for name in order]
        are_single = [single[name] for name in order]
        found = loops.index_examples(self.buffer, records.start, records.end, keys, are_single)
        if found is None:
            return None
        return {
            name: Singles(kinds, values)
            if single[name]
            else self._indexed(kinds.astype(np.int64), begins, stops)
            for name, kinds, begins, stops, values in zip(order, *found, strict=True)
        }

    def _indexed(self, kinds: Positions, starts: Positions, ends: Positions) -> Lists:
        record = np.arange(len(kinds))
        if kinds.min(initial=0) < 0:
            record = np.flatnonzero(kinds >= 0)
            kinds, starts, ends = kinds[record], starts[record], ends[record]
        of_texts = kinds == ListKind.BYTES
        if not of_texts.any():
            parts = ByteSpans(np.arange(len(record)), starts, ends)
            return Lists(record, kinds, parts, np.full(len(record), 2))
        if not of_texts.all():
            ends = np.where(of_texts, ends, starts)
        fields = self.walk(ByteSpans(record, starts, ends))
        fields = fields.where((fields.number == 1) & (fields.wire == 2))
        parts = ByteSpans(fields.message, fields.start, fields.end)
        return Lists(record, kinds, parts, fields.wire)

    def counts(self, lists: Lists) -> Positions:
        """How many values each feature has."""
        parts = lists.parts
        lengths = parts.end - parts.start
        counts = np.where(lists.kind[parts.record] == ListKind.FLOAT, lengths // 4, 1)
        packed = np.flatnonzero((lists.kind[parts.record] == ListKind.INT64) & (lists.wire == 2))
        try:
            found = loops.read_varints(self.buffer, parts.start[packed], lengths[packed])
        except MalformedError as error:
            row = int(lists.record[parts.record[packed[error.index]]])
            raise self.malformed(row, error.what) from error
        counts[packed] = found[1]
        return np.bincount(parts.record, counts, len(lists.record)).astype(np.int64)

    def malformed(self, record: int, what: str) -> DataError:
        """The error for a record that is no message of its kind."""
        return broken(
            self.block.place(record), "a protocol buffer of the kind asked for", what,
            "is this the recordType of the file: Example, SequenceExample or ByteArray?",
        )  # fmt: skip


def _alternate(fields: Fields, entries: int) -> bool:
    """Whether each entry has just a key and then a value, as every writer writes them."""
    return bool(
        len(fields.number) == 2 * entries
        and (fields.wire == 2).all()
        and (fields.number[0::2] == 1).all()
        and (fields.number[1::2] == 2).all()
        and (fields.message[0::2] == fields.message[1::2]).all()
    )


def _last(fields: Fields, number: int, messages: ByteSpans) -> tuple[Positions, Positions]:
    """The last value of a field in each message; an empty one where there is none."""
    start, end = messages.start.copy(), messages.start.copy()
    found = fields.where((fields.number == number) & (fields.wire == 2))
    start[found.message], end[found.message] = found.start, found.end
    return start, end


def hash_spans(buffer: Bytes, starts: Positions, ends: Positions) -> npt.NDArray[np.uint64]:
    """A number for the bytes of each span; their length and up to 32 bytes, 8 at a time."""
    lengths = ends - starts
    hashes = lengths.astype(np.uint64)
    longest = int(lengths.max()) if len(lengths) else 0
    at_every_byte = np.ndarray((len(buffer) - 7,), "<u8", buffer, 0, (1,))
    for at in range(0, min(longest, 32), 8):
        words = at_every_byte[np.minimum(starts + at, len(at_every_byte) - 1)]
        left = np.clip(lengths - at, 0, 8).astype(np.uint64)
        words &= np.where(left == 8, ~np.uint64(0), (np.uint64(1) << (8 * left)) - np.uint64(1))
        mixed = (hashes ^ words) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        hashes = np.where(left > 0, mixed, hashes)  # however long the longest name is
    return hashes


RecordType = Literal["Example", "SequenceExample", "ByteArray"]
BYTE_ARRAY_COLUMN = "byteArray"
_MAX_INT32 = 2**31 - 1


def kind_of(value: pa.DataType) -> ListKind:
    """The list whose values a column of this type takes; NONE for a type that no list fits."""
    if pa.types.is_integer(value) or pa.types.is_boolean(value):
        return ListKind.INT64
    if pa.types.is_floating(value) or pa.types.is_decimal(value):
        return ListKind.FLOAT
    if value in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary()):
        return ListKind.BYTES
    return ListKind.NONE


def depth_of(value: pa.DataType) -> tuple[int, pa.DataType]:
    """How many lists are around a type's values, and the type of these."""
    depth = 0
    while is_any_list(value):
        depth, value = depth + 1, value.value_type
    return depth, value


def check_schema(schema: pa.Schema, record_type: RecordType) -> None:
    """Raises ConfigError if records of this type cannot hold a column."""
    most = {"Example": 1, "SequenceExample": 2}.get(record_type)
    if most is None:
        if len(schema) != 1 or not (
            pa.types.is_binary(schema[0].type) or pa.types.is_large_binary(schema[0].type)
        ):
            raise ConfigError(
                "records of type ByteArray have one column",
                expected=f"one binary column ({BYTE_ARRAY_COLUMN!r})",
                received=", ".join(f"{field.name} {field.type}" for field in schema) or "none",
            )
        return
    for field in schema:
        depth, value = depth_of(field.type)
        if depth > most or kind_of(value) == ListKind.NONE:
            raise ConfigError(
                f"column {field.name!r} does not fit into records of type {record_type}",
                expected="integers, floats, booleans, decimals, strings or binary, or arrays of "
                + ("them" if most == 1 else "them, or arrays of such arrays"),
                received=str(field.type),
                hint="SequenceExample has arrays of arrays"
                if depth == 2
                else "select the columns to write, or cast them",
            )


def decode_block(block: Block, schema: pa.Schema, record_type: RecordType) -> pa.RecordBatch:
    """The records of a block as one record batch of exactly this schema.

    Raises:
        DataError: A record is malformed, or does not fit the schema; it names file and byte.
    """
    reader = FieldReader(block)
    if record_type == "ByteArray":
        records = reader.records()
        data = _binary(reader, records.start, records.end)
        return pa.record_batch([data.cast(schema[0].type)], schema=schema)
    numbers = (ListKind.INT64, ListKind.FLOAT)
    single = {field.name: kind_of(field.type) in numbers for field in schema}
    if record_type == "Example" and (indexed := reader.indexed(single)) is not None:
        arrays = [_indexed_column(reader, indexed[field.name], field) for field in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema) if arrays else _no_columns(block)
    maps, _ = reader.children(reader.records(), 1)
    context = reader.entries(maps)
    lists: Entries | None = None
    if record_type == "SequenceExample" and any(depth_of(f.type)[0] for f in schema):
        maps, _ = reader.children(reader.records(), 2)
        lists = reader.entries(maps)
    arrays = [_column(reader, context, lists, field) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema) if arrays else _no_columns(block)


def _no_columns(block: Block) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(len(block))], names=["none"]).select([])


def _column(
    reader: FieldReader, context: Entries, lists: Entries | None, field: pa.Field
) -> pa.Array:
    depth, value = depth_of(field.type)
    features = reader.named(context, field.name)
    if lists is None or not depth or (depth == 1 and len(features)):
        return _feature_column(reader, reader.lists(features), field)
    array, present = _nested(reader, reader.named(lists, field.name), field, depth, value)
    return _checked(reader, array, present, field)


def _indexed_column(reader: FieldReader, found: Lists | Singles, field: pa.Field) -> pa.Array:
    if isinstance(found, Lists):
        return _feature_column(reader, found, field)
    present = found.kinds > 0
    kind = kind_of(field.type)
    _check_kind(reader, np.arange(len(reader.block)), found.kinds, kind, field)
    numbers: npt.NDArray[Any] = found.values
    if kind == ListKind.FLOAT:
        numbers = numbers.astype(np.int32).view(np.float32)
    values = pa.array(numbers, mask=None if present.all() else ~present)
    return _checked(reader, _cast(reader, values, field, field.type), present, field)


def _feature_column(reader: FieldReader, lists: Lists, field: pa.Field) -> pa.Array:
    depth, value = depth_of(field.type)
    if depth == 2:
        raise ConfigError(
            f"column {field.name!r}: Example has no arrays of arrays",
            expected="recordType SequenceExample", received=str(field.type),
        )  # fmt: skip
    return _checked(reader, *_flat(reader, lists, field, value, depth), field)


def _checked(
    reader: FieldReader, array: pa.Array, present: npt.NDArray[np.bool_], field: pa.Field
) -> pa.Array:
    if not field.nullable and not present.all():
        raise broken(
            reader.block.place(int(np.argmin(present))),
            f"a value of {field.name!r}, which the schema says is never null", "no such feature",
            "declare the column as nullable",
        )  # fmt: skip
    return array if array.type == field.type else array.cast(field.type)


def _flat(
    reader: FieldReader, lists: Lists, field: pa.Field, value: pa.DataType, depth: int
) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """The column of a feature: one value or one list per record."""
    number = len(reader.block)
    values, counts = _values(reader, lists, field, value)
    present = np.zeros(number, np.bool_)
    filled = lists.kind != ListKind.NONE
    if depth == 0:
        filled &= counts > 0
        _check_single(reader, lists.record, counts, field)
    present[lists.record[filled]] = True
    if depth == 0:
        if len(values) == number:
            return values, present
        rows = np.full(number, -1, np.int64)
        rows[lists.record[filled]] = np.arange(len(values))
        return values.take(pa.array(rows, mask=~present)), present
    sizes = np.zeros(number, np.int64)
    sizes[lists.record] = counts
    return _list_array(values, sizes, present), present


def _nested(
    reader: FieldReader, messages: ByteSpans, field: pa.Field, depth: int, value: pa.DataType
) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """The column of a feature list: one list (of lists, or of single values) per record."""
    number = len(reader.block)
    features, of = reader.children(messages, 1)
    found = reader.lists(features)
    values, counts = _values(reader, found, field, value)
    present = np.zeros(number, np.bool_)
    present[messages.record] = True
    sizes = np.zeros(number, np.int64)
    sizes[messages.record] = np.bincount(of, minlength=len(messages))
    if depth == 1:
        _check_single(reader, features.record, np.where(counts == 0, 2, counts), field)
        return _list_array(values, sizes, present), present
    inner = _list_array(values, counts, np.ones(len(counts), np.bool_))
    return _list_array(inner, sizes, present), present


def _check_single(
    reader: FieldReader, record: Positions, counts: Positions, field: pa.Field
) -> None:
    if len(counts) and counts.max() > 1:
        row = int(np.argmax(counts > 1))
        raise broken(
            reader.block.place(int(record[row])),
            f"one value of {field.name!r}, as the schema's {field.type} says",
            "another number of values", "declare the column as an array",
        )  # fmt: skip


def _list_array(values: pa.Array, sizes: Positions, present: npt.NDArray[np.bool_]) -> pa.ListArray:
    stored, is_large = _offsets(sizes)
    valid = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
    kind = pa.large_list(values.type) if is_large else pa.list_(values.type)
    return pa.Array.from_buffers(kind, len(sizes), [valid, stored], children=[values])


def _offsets(sizes: Positions) -> tuple[pa.Buffer, bool]:
    """The begin of each value and the end of the last one; whether these take 64 bits."""
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    is_large = bool(offsets[-1] > _MAX_INT32)
    return pa.py_buffer(offsets if is_large else offsets.astype(np.int32)), is_large


def _check_kind(
    reader: FieldReader, record: Positions, kinds: npt.NDArray[Any], kind: ListKind, field: pa.Field
) -> None:
    wrong = (kinds != kind) & (kinds > 0)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise broken(
            reader.block.place(int(record[row])),
            f"a list of {kind.name} in the feature {field.name!r}, for a column of {field.type}",
            f"a list of {ListKind(int(kinds[row])).name}",
            "give the schema that fits, or none to have it inferred",
        )


def _values(
    reader: FieldReader, lists: Lists, field: pa.Field, value: pa.DataType
) -> tuple[pa.Array, Positions]:
    """All values of some features, one after the other, and how many each one has."""
    kind = kind_of(value)
    _check_kind(reader, lists.record, lists.kind, kind, field)
    parts, number = lists.parts, len(lists.record)
    if kind == ListKind.BYTES:
        counts = np.bincount(parts.record, minlength=number)
        return _texts(reader, parts, lists.record, field, value), counts
    lengths = parts.end - parts.start
    if kind == ListKind.FLOAT:
        if (lengths % 4).any():
            row = int(np.argmax(lengths % 4 != 0))
            raise reader.malformed(
                int(lists.record[parts.record[row]]), "floats of other than 4 bytes"
            )
        found: Any = loops.gather_spans(reader.buffer, parts.start, lengths).view("<f4")
        counts = lengths // 4
    else:
        try:
            found, counts = loops.read_varints(reader.buffer, parts.start, lengths)
        except MalformedError as error:
            row = int(lists.record[parts.record[error.index]])
            raise reader.malformed(row, error.what) from error
    if len(parts) != number or not np.array_equal(parts.record, np.arange(number)):
        counts = np.bincount(parts.record, weights=counts, minlength=number).astype(np.int64)
    return _cast(reader, pa.array(found), field, value), counts


def _cast(reader: FieldReader, values: pa.Array, field: pa.Field, value: pa.DataType) -> pa.Array:
    try:
        if pa.types.is_decimal(value):
            return values.cast(pa.float64()).cast(value)
        return values.cast(value)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{reader.block.name}: values of {field.name!r} do not fit the column's type",
            expected=f"values of {value}", received=str(error),
            hint=f"one of the records from number {reader.block.first} on",
        ) from error  # fmt: skip


def _texts(
    reader: FieldReader, parts: ByteSpans, record: Positions, field: pa.Field, value: pa.DataType
) -> pa.Array:
    data = _binary(reader, parts.start, parts.end)
    try:
        return data.cast(value)
    except pa.ArrowInvalid as error:
        texts = (parts.start.tolist(), parts.end.tolist(), parts.record.tolist())
        for start, stop, feature in zip(*texts, strict=True):
            try:
                reader.buffer[start:stop].tobytes().decode()
            except UnicodeDecodeError as reason:
                raise broken(
                    reader.block.place(int(record[feature])),
                    f"UTF-8 in the feature {field.name!r}, as the column's {field.type} says",
                    str(reason), "declare the column as binary (option binaryFeatures)",
                ) from error  # fmt: skip
        raise


def are_texts(reader: FieldReader, parts: ByteSpans) -> bool:
    """Whether all of these values are UTF-8."""
    try:
        _binary(reader, parts.start, parts.end).cast(pa.large_string())
    except pa.ArrowInvalid:
        return False
    return True


def _binary(reader: FieldReader, starts: Positions, ends: Positions) -> pa.Array:
    lengths = ends - starts
    data = loops.gather_spans(reader.buffer, starts, lengths)
    stored, is_large = _offsets(lengths)
    kind = pa.large_binary() if is_large else pa.binary()
    return pa.Array.from_buffers(kind, len(starts), [None, stored, pa.py_buffer(data)])
