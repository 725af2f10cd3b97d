"""Arrow record batches -> NumPy arrays, in C, without a copy where the memory layout allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.data.columns import Array, Batch, ColumnSpec, DataSpec, Shape
from sparkdl.data.images import decode_images
from sparkdl.errors import DataError

_VECTOR_FIELDS = {"type", "size", "indices", "values"}


def decode(batch: pa.RecordBatch, spec: DataSpec, first_row: int = 0) -> Batch:
    """Decodes one record batch into what the model gets.

    The arrays may alias the batch's memory: read-only, valid as long as they are referenced.

    Args:
        batch: Rows with at least the columns that ``spec`` names.
        spec: What to read.
        first_row: Number of the batch's first row in its partition, for error messages.

    Raises:
        DataError: A column is missing, has nulls, a wrong type or width, or a label is out of
            range. The message names the column and the row.
    """
    stored = decode_stored(batch, spec, first_row)
    finished = [entry.finish(array) for entry, array in zip(spec.entries, stored, strict=True)]
    return spec.assemble(finished, batch.num_rows)


def decode_stored(batch: pa.RecordBatch, spec: DataSpec, first_row: int = 0) -> list[Array]:
    """One array per ``spec.entries`` in the compact form that partitions keep.

    Labels are not yet one-hot, and values of a narrower type (pixels in uint8) are not yet cast:
    ``ColumnSpec.finish`` does both.
    """
    return [decode_column(batch, entry, first_row) for entry in spec.entries]


def decode_column(batch: pa.RecordBatch, spec: ColumnSpec, first_row: int = 0) -> Array:
    """The rows of one ColumnSpec in compact form: ``(num_rows, *spec.value_shape)``."""
    arrays = [_column(batch, name, first_row) for name in spec.columns]
    place = _Place(spec.columns[0], spec, first_row)
    if spec.kind == "decoded":
        return _check_labels(_decode_values(arrays[0], spec, place), spec, place)
    if spec.kind == "image":
        return _compact(decode_images(arrays[0], spec, first_row), spec, place)
    if spec.kind == "binary":
        values = _decode_bytes(arrays[0], spec, place)
    elif spec.kind == "scalars":
        values = _decode_scalars(arrays, spec, first_row)
    elif _is_vector(arrays[0].type):
        values = _decode_vectors(arrays[0], place)
    else:
        values = _decode_lists(arrays[0], place)
    return conform(values, spec, first_row)


def conform(values: Array, spec: ColumnSpec, first_row: int = 0) -> Array:
    """Gives decoded rows the shape of ``spec`` and its dtype in compact form; checks labels."""
    place = _Place(spec.columns[0], spec, first_row)
    return _compact(_check_labels(_fit(values, place), spec, place), spec, place)


def read_column(batch: pa.RecordBatch, name: str, first_row: int = 0) -> Array:
    """One plain numeric column without nulls as it is, e.g. the role of each row."""
    array = _column(batch, name, first_row)
    return _numbers(array, _Place(name, ColumnSpec((name,), (), kind="scalars"), first_row))


@dataclass(frozen=True)
class _Place:
    """Where a value stands, for error messages."""

    column: str
    spec: ColumnSpec
    first_row: int

    def error(
        self, problem: str, *, expected: str, received: str, row: int | None = None, hint: str = ""
    ) -> DataError:
        where = "" if row is None else f", row {self.first_row + row} of the partition"
        return DataError(
            f"column {self.column!r}{where}: {problem}",
            expected=expected,
            received=received,
            hint=hint,
        )

    def check_nulls(self, array: Any, width: int = 1) -> None:
        if array.null_count:
            first = int(np.argmax(pc.is_null(array).to_numpy(zero_copy_only=False)))
            raise self.error(
                "nulls cannot be trained on",
                row=first // max(width, 1),
                expected="no nulls",
                received=f"{array.null_count} nulls in this batch of rows",
                hint="df.dropna() removes such rows, df.fillna() or an Imputer fills them",
            )


def _column(batch: pa.RecordBatch, name: str, first_row: int) -> Any:
    index = batch.schema.get_field_index(name)
    if index < 0:
        raise DataError(
            f"no column {name!r} in the data",
            expected=f"a column {name!r}",
            received=f"the columns {batch.schema.names}",
            hint="a name that stands twice in the data counts as missing",
        )
    array = batch.column(index)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    _Place(name, ColumnSpec((name,), (), kind="scalars"), first_row).check_nulls(array)
    return array


def _numbers(array: Any, place: _Place, width: int = 1) -> Array:
    """A primitive Arrow array without nulls as a flat NumPy array of its own dtype."""
    place.check_nulls(array, width)
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    if pa.types.is_boolean(array.type):
        flags: Array = array.to_numpy(zero_copy_only=False)
        return flags
    if pa.types.is_integer(array.type) or pa.types.is_floating(array.type):
        numbers: Array = array.to_numpy(zero_copy_only=True)
        return numbers
    raise place.error(
        "values that are not numbers",
        expected=f"numbers for shape {place.spec.shape} and dtype {place.spec.dtype}",
        received=f"Arrow type {array.type}",
        hint="StringIndexer or a hash makes numbers of strings; images need a decoder",
    )


def _is_list(kind: Any) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _is_vector(kind: Any) -> bool:
    return bool(pa.types.is_struct(kind)) and {f.name for f in kind} == _VECTOR_FIELDS


def _decode_scalars(arrays: Sequence[Any], spec: ColumnSpec, first_row: int) -> Array:
    columns = [
        _numbers(array, _Place(name, spec, first_row))
        for array, name in zip(arrays, spec.columns, strict=True)
    ]
    if len(columns) == 1:
        return columns[0]
    dtypes = {column.dtype for column in columns}
    dtype = np.result_type(*dtypes)
    if np.dtype(spec.dtype).kind == "f" and dtype.itemsize > np.dtype(spec.dtype).itemsize:
        dtype = np.dtype(spec.dtype)
    values = np.empty((len(columns[0]), len(columns)), dtype)
    with np.errstate(over="ignore"):
        for j, column in enumerate(columns):
            values[:, j] = column
    return values


def _decode_lists(array: Any, place: _Place) -> Array:
    """Nested lists of any depth -> ``(num_rows, width, width, ...)``."""
    dims: list[int] = [len(array)]
    per_row = 1
    while _is_list(array.type):
        place.check_nulls(array, per_row)
        width = _common_width(array, place, per_row)
        dims.append(width)
        per_row *= width
        # flatten() respects the offset of a sliced array, .values would not.
        array = array.flatten()
    if len(dims) == 1 and not _is_numeric(array.type):
        raise place.error(
            "a column that holds no arrays",
            expected=f"an array or vector of shape {place.spec.value_shape}",
            received=f"Arrow type {array.type}",
            hint="strings need StringIndexer, structs and files a decoder",
        )
    return _numbers(array, place, per_row).reshape(dims)


def _is_numeric(kind: Any) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def _common_width(array: Any, place: _Place, per_row: int) -> int:
    if pa.types.is_fixed_size_list(array.type):
        return int(array.type.list_size)
    if len(array) == 0:
        return 0
    widths = np.diff(array.offsets.to_numpy())
    if (widths != widths[0]).any():
        index = int(np.argmax(widths != widths[0]))
        raise place.error(
            "arrays of unequal length",
            row=index // max(per_row, 1),
            expected=f"shape {place.spec.value_shape}; the rows before have length {widths[0]}",
            received=f"length {widths[index]}",
            hint="pad or truncate sequences to one length, or drop the odd rows",
        )
    return int(widths[0])


def _decode_bytes(array: Any, spec: ColumnSpec, place: _Place) -> Array:
    """Raw little-endian bytes -> ``(num_rows, elements)``, as a view of Arrow's memory."""
    dtype = np.dtype(spec.source_dtype or spec.dtype).newbyteorder("<")
    rows = len(array)
    data, width = raw_bytes(array, place)
    known = [d for d in spec.value_shape if d is not None]
    unit = dtype.itemsize * (math.prod(known) or 1)
    exact = len(known) == len(spec.value_shape)
    if rows and (width % dtype.itemsize or (exact and width != dtype.itemsize * math.prod(known))):
        raise place.error(
            "bytes of a wrong length",
            expected=f"{'' if exact else 'a multiple of '}{unit} bytes: shape "
            f"{spec.value_shape} of {dtype.name}",
            received=f"{width} bytes",
            hint="encoded images (JPEG, PNG) need a decoder",
        )
    values = np.frombuffer(data, dtype).reshape(rows, width // dtype.itemsize)
    return values if values.flags.aligned else values.copy()


def raw_bytes(array: Any, place: _Place) -> tuple[Any, int]:
    """A binary array of equally long values as one buffer, and the length of a value."""
    kind = array.type
    if pa.types.is_fixed_size_binary(kind):
        width = int(kind.byte_width)
        data = array.buffers()[1]
        return _part(data, array.offset * width, len(array) * width), width
    if kind == pa.binary_view():
        array = array.cast(pa.large_binary())
        kind = array.type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise place.error(
            "a column that holds no bytes",
            expected=f"binary values for shape {place.spec.value_shape}",
            received=f"Arrow type {kind}",
        )
    if len(array) == 0:
        return b"", 0
    _, positions, data = array.buffers()
    size = np.int64 if pa.types.is_large_binary(kind) else np.int32
    offsets = np.frombuffer(positions, size)[array.offset : array.offset + len(array) + 1]
    widths = np.diff(offsets)
    if (widths != widths[0]).any():
        index = int(np.argmax(widths != widths[0]))
        raise place.error(
            "bytes of unequal length",
            row=index,
            expected=f"shape {place.spec.value_shape}; the rows before have {widths[0]} bytes",
            received=f"{widths[index]} bytes",
            hint="encoded images (JPEG, PNG) need a decoder",
        )
    start, stop = int(offsets[0]), int(offsets[-1])
    return _part(data, start, stop - start), int(widths[0])


def _part(data: Any, start: int, size: int) -> Any:
    return b"" if data is None or size == 0 else data.slice(start, size)


def _decode_vectors(array: Any, place: _Place) -> Array:
    """The struct of an ML vector, dense and sparse rows mixed -> ``(num_rows, width)``."""
    names = [f.name for f in array.type]
    fields = dict(zip(names, array.flatten(), strict=True))
    values = fields["values"]
    place.check_nulls(values)
    if len(array) == 0:
        return np.empty((0, 0), np.float64)
    dense = _numbers(fields["type"], place) == 1
    lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
    sizes = pc.fill_null(fields["size"], 0).to_numpy(zero_copy_only=False).astype(np.int64)
    widths = np.where(dense, lengths, sizes)
    if (widths != widths[0]).any():
        index = int(np.argmax(widths != widths[0]))
        raise place.error(
            "vectors of unequal length",
            row=index,
            expected=f"shape {place.spec.value_shape}; the rows before have length {widths[0]}",
            received=f"length {widths[index]}",
        )
    width = int(widths[0])
    numbers = _numbers(values.flatten(), place)
    if dense.all():
        return numbers.reshape(len(array), width)
    counts = pc.fill_null(pc.list_value_length(fields["indices"]), 0).to_numpy(zero_copy_only=False)
    positions = np.arange(len(numbers)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    indices = _numbers(fields["indices"].flatten(), place)
    sparse = np.repeat(~dense, lengths)
    wrong = (~dense & (counts != lengths)).any() or (dense & (counts != 0)).any()
    if wrong or (len(indices) and (indices.min() < 0 or indices.max() >= width)):
        raise place.error(
            "a malformed sparse vector",
            expected=f"as many indices as values, all in [0, {width})",
            received="indices that do not fit",
        )
    positions[sparse] = indices
    out = np.zeros((len(array), width), np.dtype(place.spec.value_dtype))
    out[np.repeat(np.arange(len(array)), lengths), positions] = numbers
    return out


def _decode_values(array: Any, spec: ColumnSpec, place: _Place) -> Array:
    """Passes every value through the user's decoder; the one loop in Python."""
    decoder = spec.decoder
    if decoder is None:  # ColumnSpec refuses this; mypy cannot know
        raise place.error("no decoder", expected="a decoder", received="None")
    out: Array | None = None
    for row, value in enumerate(array):
        try:
            result = np.asarray(decoder(value.as_py()))
        except Exception as error:
            raise place.error(
                f"the decoder {getattr(decoder, '__name__', decoder)!r} failed",
                row=row,
                expected=f"an array of shape {spec.value_shape}",
                received=f"{type(error).__name__}: {error}",
            ) from error
        if result.dtype.kind not in "biufc":
            raise place.error(
                "the decoder gave no numbers",
                row=row,
                expected=f"an array of shape {spec.value_shape} and dtype {spec.dtype}",
                received=f"{type(result).__name__} of dtype {result.dtype}",
            )
        if out is None:
            if not _matches(result.shape, spec.value_shape):
                raise _shape_error(result.shape, place, row, "the decoder gave a wrong shape")
            out = np.empty((len(array), *result.shape), spec.value_dtype)
        elif result.shape != out.shape[1:]:
            raise _shape_error(result.shape, place, row, "the decoder gave a wrong shape")
        out[row] = _cast(result, spec.value_dtype, place, row)
    return empty_rows(spec) if out is None else out


def empty_rows(spec: ColumnSpec) -> Array:
    """No rows, in the shape and dtype of the spec; free dimensions are 0."""
    return np.empty((0, *(d or 0 for d in spec.value_shape)), spec.value_dtype)


def _matches(shape: Sequence[int], wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(
        w is None or d == w for d, w in zip(shape, wanted, strict=True)
    )


def _shape_error(shape: Sequence[int], place: _Place, row: int | None, problem: str) -> DataError:
    return place.error(
        problem,
        row=row,
        expected=f"shape {place.spec.value_shape} per row",
        received=f"shape {tuple(shape)}",
        hint="the shape comes from the model's input or output; reshape the column or the model",
    )


def _fit(values: Array, place: _Place) -> Array:
    """Gives ``(num_rows, ...)`` the per-row shape of the spec if the sizes agree."""
    rows, dims, wanted = len(values), values.shape[1:], place.spec.value_shape
    if rows == 0:
        return empty_rows(place.spec).astype(values.dtype)
    if _matches(dims, wanted):
        return values
    size = math.prod(dims)
    known = math.prod(d for d in wanted if d is not None)
    free = sum(d is None for d in wanted)
    if free == 0 and size == known:
        return values.reshape(rows, *(d or 0 for d in wanted))
    if free == 1 and len(dims) == 1 and known and size % known == 0:
        return values.reshape(rows, *(size // known if d is None else d for d in wanted))
    raise _shape_error(dims, place, None, "values of a wrong shape")


def _compact(values: Array, spec: ColumnSpec, place: _Place) -> Array:
    """Casts to the dtype wanted, unless the values are narrower and widen without loss."""
    target = spec.value_dtype
    native = values.dtype.newbyteorder("=")
    values = values.astype(native, copy=False)
    narrower = native.itemsize < target.itemsize and np.can_cast(native, target, "safe")
    return values if narrower else _cast(values, target, place)


def _cast(values: Array, target: np.dtype[Any], place: _Place, row: int | None = None) -> Array:
    """Casts, and refuses what an integer dtype cannot hold instead of cutting it off."""
    source = values.dtype
    if target.kind in "iu" and source.kind in "iuf" and not np.can_cast(source, target, "safe"):
        limits = np.iinfo(target)
        bad = (values < limits.min) | (values > limits.max)
        if source.kind == "f":
            bad |= values != np.floor(values)
        if bad.any():
            index = np.unravel_index(int(np.argmax(bad)), bad.shape)
            raise place.error(
                f"a value that {target} cannot hold",
                row=int(index[0]) if row is None and index else row,
                expected=f"whole numbers in [{limits.min}, {limits.max}]",
                received=str(values[index]),
            )
    with np.errstate(over="ignore"):
        return values.astype(target, copy=False)


def _check_labels(values: Array, spec: ColumnSpec, place: _Place) -> Array:
    classes = spec.num_classes
    if classes is None or values.size == 0:
        return values
    low, high = values.min(), values.max()
    whole = values.dtype.kind != "f" or bool((values == np.floor(values)).all())
    if low >= 0 and high < classes and whole:
        return values
    bad = (values < 0) | (values >= classes) | (values != np.floor(values))
    index = np.unravel_index(int(np.argmax(bad)), bad.shape)
    raise place.error(
        "a label out of range",
        row=int(index[0]),
        expected=f"integers from 0 to {classes - 1}: the model has {classes} classes",
        received=str(values[index]),
        hint="labels start at 0; the model's last layer needs one unit per class",
    )
