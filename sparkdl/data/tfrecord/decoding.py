"""Records -> Arrow record batches of a schema.

A column of Arrow type ``T`` reads the feature of its name: integers and booleans from an
Int64List, ``float``, ``double`` and decimals from a FloatList, strings and binary from a BytesList.
``T`` takes lists of one value, ``list<T>`` of any length, ``list<list<T>>`` the feature lists of a
SequenceExample. A feature that a record lacks, or whose list is of no kind, is null.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.data.plain_arrow import is_any_list
from sparkdl.data.tfrecord import loops
from sparkdl.data.tfrecord.blocks import Block
from sparkdl.data.tfrecord.framing import broken
from sparkdl.data.tfrecord.loops import MalformedError, Positions
from sparkdl.data.tfrecord.messages import ByteSpans, Entries, FieldReader, ListKind, Lists, Singles
from sparkdl.errors import ConfigError, DataError

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
    batch = pa.RecordBatch.from_arrays([pa.nulls(len(block))], names=["none"])
    return batch.select([])


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
    array, present = _flat(reader, lists, field, value, depth)
    return _checked(reader, array, present, field)


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
    valid = None
    if not present.all():
        valid = pa.py_buffer(np.packbits(present, bitorder="little"))
    kind = pa.large_list(values.type) if is_large else pa.list_(values.type)
    return pa.Array.from_buffers(kind, len(sizes), [valid, stored], children=[values])


def _offsets(sizes: Positions) -> tuple[pa.Buffer, bool]:
    """Where each value begins, and the last one ends; whether that takes 64 bits."""
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
