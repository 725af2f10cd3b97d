"""Arrow record batches -> NumPy arrays, in C, without a copy where the memory layout allows.

And which rows no model can take: nulls, and values that the user's decoder refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.data.columns import Array, Batch, ColumnSpec, DataSpec, Ragged, Stored
from sparkdl.data.conform import (
    ValuePlace,
    cast,
    check_labels,
    compact,
    conform,
    empty_rows,
    is_numeric,
    is_text,
    matches,
    numbers_of,
    shape_error,
)
from sparkdl.data.plain_arrow import bytes_of, is_any_list, unwrapped
from sparkdl.errors import DataError

# OpenCV's codes for 8-bit unsigned pixels with 1, 3 and 4 channels.
_CHANNELS_OF_MODE = {0: 1, 16: 3, 24: 4}
_FIELDS = ("height", "width", "nChannels", "mode", "data")


def decode_images(array: Any, place: ValuePlace) -> Array:
    """Image structs -> uint8 ``(num_rows, height, width, channels)`` in RGB(A) or grey.

    Grey images fill all three channels of a model that wants three; an alpha channel is dropped
    where three are wanted. Sizes must agree within the batch: nothing is resized.

    Raises:
        DataError: No image struct, an image that Spark could not decode, or one of another size
            than the model's input.
    """

    def error(problem: str, row: int | None, expected: str, received: str) -> DataError:
        hint = "a decoder can resize and convert: it gets the struct as a dict"
        return place.error(problem, row=row, expected=expected, received=received, hint=hint)

    spec = place.spec
    kind = array.type
    if not pa.types.is_struct(kind) or not set(_FIELDS) <= {f.name for f in kind}:
        raise error("no image", None, f"a struct with the fields {_FIELDS}", f"Arrow type {kind}")
    if len(spec.value_shape) != 3:
        raise error(
            "a model input that is no image", None, "a shape (height, width, channels)",
            f"shape {spec.value_shape}",
        )  # fmt: skip
    fields = dict(zip([f.name for f in kind], array.flatten(), strict=True))
    for name in _FIELDS:
        if fields[name].null_count:
            raise error(
                f"nulls in field {name!r}", None, "no nulls", f"{fields[name].null_count} nulls"
            )
    heights, widths, channels, modes = (fields[n].to_numpy() for n in _FIELDS[:4])
    rows = len(array)
    if rows == 0:
        return np.empty((0, *(d or 0 for d in spec.value_shape)), np.uint8)
    expected = np.select([modes == m for m in _CHANNELS_OF_MODE], [*_CHANNELS_OF_MODE.values()], 0)
    unknown = (expected != channels) | (expected == 0)
    if unknown.any():
        row = int(np.argmax(unknown))
        raise error(
            "an image of unknown pixel format", row,
            "mode 0, 16 or 24: uint8 with 1, 3 or 4 channels",
            f"mode {modes[row]} with {channels[row]} channels",
        )  # fmt: skip
    height, width, wanted = spec.value_shape
    height = int(heights[0]) if height is None else height
    width = int(widths[0]) if width is None else width
    wanted = int(channels[0]) if wanted is None else wanted
    content, lengths = _content(fields["data"])
    bad = (heights != height) | (widths != width)
    bad |= (channels != wanted) & ~((wanted == 3) & ((channels == 1) | (channels == 4)))
    bad |= lengths != heights.astype(np.int64) * widths * channels
    if bad.any():
        row = int(np.argmax(bad))
        raise error(
            "an image whose size is not the model's", row, f"shape {(height, width, wanted)}",
            f"shape {(int(heights[row]), int(widths[row]), int(channels[row]))}"
            f" in {lengths[row]} bytes",
        )  # fmt: skip
    if (channels == channels[0]).all():
        return _to_rgb(content.reshape(rows, height, width, -1), wanted)
    out = np.empty((rows, height, width, wanted), np.uint8)
    for count in np.unique(channels):
        index = np.flatnonzero(channels == count)
        pixels, _ = _content(fields["data"].take(pa.array(index)))
        out[index] = _to_rgb(pixels.reshape(len(index), height, width, count), wanted)
    return out


def _content(array: Any) -> tuple[Array, Array]:
    """The bytes of all values of a binary array, one after the other, and how many each has."""
    data, offsets = bytes_of(array)
    return data[offsets[0] : offsets[-1]], np.diff(offsets)


def _to_rgb(pixels: Array, wanted: int) -> Array:
    if pixels.shape[-1] == 1:
        return pixels if wanted == 1 else np.repeat(pixels, wanted, axis=-1)
    out = np.empty((*pixels.shape[:-1], wanted), np.uint8)
    for target, source in enumerate([2, 1, 0, 3][:wanted]):
        out[..., target] = pixels[..., source]
    return out


def decode(batch: pa.RecordBatch, spec: DataSpec, first_row: int = 0) -> Batch:
    """Decodes one record batch into what the model gets.

    The arrays may alias the batch's memory: read-only, valid as long as they are referenced.

    Args:
        batch: Rows with at least the columns that ``spec`` names.
        first_row: Number of the batch's first row in its partition, for error messages.

    Raises:
        DataError: A column is missing, has nulls, does not fit in type or width, or a label is
            out of range. The message names the column and the row.
    """
    stored = decode_stored(batch, spec, first_row)
    finished = [entry.finish(array) for entry, array in zip(spec.entries, stored, strict=True)]
    made = spec.assemble(finished, batch.num_rows)
    rows = dict(zip(spec.entries, stored, strict=True))
    for name, entry in spec.features.items():
        found = rows[entry]
        if entry.padding is not None and isinstance(found, Ragged):
            made.lengths[name] = found.lengths
    return made


def decode_stored(batch: pa.RecordBatch, spec: DataSpec, first_row: int = 0) -> list[Stored]:
    """One array (or ragged rows) per ``spec.entries`` in the compact form that partitions keep.

    Labels are not yet one-hot, and values of a narrower type (pixels in uint8) are not yet cast:
    ``ColumnSpec.finish`` does both.
    """
    return [decode_column(batch, entry, first_row) for entry in spec.entries]


def decode_column(batch: pa.RecordBatch, spec: ColumnSpec, first_row: int = 0) -> Stored:
    """The rows of one ColumnSpec in compact form: ``(num_rows, *spec.value_shape)``, or ragged."""
    arrays = [_column(batch, name, first_row) for name in spec.columns]
    place = ValuePlace(spec.label, spec, first_row)
    if spec.kind == "text":
        return _decode_texts(arrays[0], place)
    if spec.padding is not None and spec.kind != "decoded":
        return _decode_sequences(arrays[0], place)
    if spec.kind == "decoded" and spec.padding is not None:
        return _decode_values_of_any_length(arrays[0], spec, place)
    if spec.kind == "decoded":
        return check_labels(_decode_values(arrays[0], spec, place), spec, place)
    if spec.kind == "image":
        return compact(check_labels(decode_images(arrays[0], place), spec, place), spec, place)
    if spec.kind == "binary":
        values = _decode_bytes(arrays[0], spec, place)
    elif spec.kind == "scalars":
        values = _decode_scalars(arrays, spec, first_row)
    elif is_vector(arrays[0].type):
        values = decode_vectors(arrays[0], place)
    else:
        values = _decode_lists(arrays[0], place)
    return conform(values, spec, first_row)


def read_column(batch: pa.RecordBatch, name: str, first_row: int = 0) -> Array:
    """One plain numeric column without nulls as it is, e.g. the role of each row."""
    array = _column(batch, name, first_row)
    return numbers_of(
        array, ValuePlace(repr(name), ColumnSpec((name,), (), kind="scalars"), first_row)
    )


def _column(batch: pa.RecordBatch, name: str, first_row: int) -> Any:
    index = batch.schema.get_field_index(name)
    if index < 0:
        raise DataError(
            f"no column {name!r} in the data", expected=f"a column {name!r}",
            received=f"the columns {batch.schema.names}",
            hint="a name that stands twice in the data counts as missing",
        )  # fmt: skip
    array = unwrapped(batch.column(index))
    if pa.types.is_duration(array.type):  # of Parquet, of which Spark reads the integers
        array = array.view(pa.int64())
    ValuePlace(repr(name), ColumnSpec((name,), (), kind="scalars"), first_row).check_nulls(array)
    return array


def _decode_scalars(arrays: Sequence[Any], spec: ColumnSpec, first_row: int) -> Array:
    places = [ValuePlace(repr(name), spec, first_row) for name in spec.columns]
    columns = [numbers_of(array, place) for array, place in zip(arrays, places, strict=True)]
    if len(columns) == 1:
        return columns[0]
    dtype = np.result_type(*{column.dtype for column in columns})
    if np.dtype(spec.dtype).kind == "f" and dtype.itemsize > np.dtype(spec.dtype).itemsize:
        dtype = np.dtype(spec.dtype)
    values = np.empty((len(columns[0]), len(columns)), dtype)
    with np.errstate(over="ignore"):
        for j, column in enumerate(columns):
            values[:, j] = cast(column, dtype, places[j]) if column.dtype.kind in "iu" else column
    return values


def _decode_lists(array: Any, place: ValuePlace) -> Array:
    """Nested lists of any depth -> ``(num_rows, width, width, ...)``."""
    dims: list[int] = [len(array)]
    per_row = 1
    while is_any_list(array.type):
        place.check_nulls(array, per_row)
        width = _common_width(array, place, per_row)
        dims.append(width)
        per_row *= width
        # flatten() respects the offset of a sliced array, .values would not.
        array = array.flatten()
    if len(dims) == 1 and not is_numeric(array.type):
        raise place.error(
            "a column that holds no arrays",
            expected=f"an array or vector of shape {place.spec.value_shape}",
            received=f"Arrow type {array.type}",
            hint="strings need StringIndexer, structs and files a decoder",
        )
    return numbers_of(array, place, per_row).reshape(dims)


def _decode_texts(array: Any, place: ValuePlace) -> Ragged:
    """Strings -> their bytes in UTF-8."""
    if not is_text(array.type):
        raise place.error(
            "values that are no text", expected="strings", received=f"Arrow type {array.type}"
        )
    return Ragged(*_content(array.cast(pa.large_string())))


def _decode_sequences(array: Any, place: ValuePlace) -> Ragged:
    spec = place.spec
    if not is_any_list(array.type):
        raise place.error(
            "a column that holds no arrays", expected=f"arrays of shape {spec.shape}",
            received=f"Arrow type {array.type}",
        )  # fmt: skip
    if pa.types.is_fixed_size_list(array.type):
        lengths = np.full(len(array), array.type.list_size, np.int64)
    else:
        lengths = np.diff(array.offsets.to_numpy()).astype(np.int64)
    if spec.kind == "mask":
        if spec.padding is not None and not is_any_list(array.type.value_type):
            lengths = lengths // spec.padding.numbers
        return Ragged(np.ones(int(lengths.sum()), np.uint8), lengths)
    place = replace(place, lengths=lengths)
    inner = array.flatten()
    dims = [len(inner)]
    while is_any_list(inner.type):
        place.check_nulls(inner, 1)
        dims.append(_common_width(inner, place, 1))
        inner = inner.flatten()
    values = numbers_of(inner, place, max(1, math.prod(dims[1:])))
    size = math.prod(spec.position_shape)
    if len(dims) == 1 and size != 1:  # flat arrays: several numbers make up a position
        odd = lengths % size
        if odd.any():
            row = int(np.argmax(odd != 0))
            raise replace(place, lengths=None).error(
                "an array whose length does not fit the shape", row=row,
                expected=f"a multiple of {size} values, for positions of shape "
                f"{spec.position_shape}",
                received=f"{lengths[row]}",
            )  # fmt: skip
        lengths = lengths // size
        place = replace(place, lengths=lengths)
    elif math.prod(dims[1:]) != size:
        raise shape_error((None, *dims[1:]), place, None, "values whose shape does not fit")
    values = compact(values.reshape(-1, *spec.position_shape), spec, place)
    return Ragged(values, lengths)


def _common_width(array: Any, place: ValuePlace, per_row: int) -> int:
    if pa.types.is_fixed_size_list(array.type):
        return int(array.type.list_size)
    if len(array) == 0:
        return 0
    widths = np.diff(array.offsets.to_numpy())
    if (widths != widths[0]).any():
        size = math.prod(d or 0 for d in place.spec.value_shape)
        common, index = _odd_one(widths, size // max(per_row, 1))
        raise place.error(
            "arrays of unequal length", row=index // max(per_row, 1),
            expected=f"shape {place.spec.value_shape}; other rows have length {common}",
            received=f"length {widths[index]}",
            hint="pad=0 (of SparkModel, predict, the stages) pads rows for a model with "
            "keras.Input((None,)); else cut them to one length, or drop the odd rows",
        )  # fmt: skip
    return int(widths[0])


def _odd_one(widths: Array, wanted: int) -> tuple[int, int]:
    common = wanted if (widths == wanted).any() else int(widths[0])
    return common, int(np.argmax(widths != common))


def _decode_bytes(array: Any, spec: ColumnSpec, place: ValuePlace) -> Array:
    """Raw little-endian bytes -> ``(num_rows, elements)``, as a view of Arrow's memory."""
    dtype = np.dtype(spec.source_dtype or spec.dtype).newbyteorder("<")
    rows = len(array)
    data, width = _raw_bytes(array, place, dtype.itemsize)
    known = [d for d in spec.value_shape if d is not None]
    unit = dtype.itemsize * (math.prod(known) or 1)
    exact = len(known) == len(spec.value_shape)
    if rows and (width % dtype.itemsize or (exact and width != dtype.itemsize * math.prod(known))):
        raise place.error(
            "bytes whose length does not fit the shape",
            expected=f"{'' if exact else 'a multiple of '}{unit} bytes: shape "
            f"{spec.value_shape} of {dtype.name}",
            received=f"{width} bytes", hint="encoded images (JPEG, PNG) need a decoder",
        )  # fmt: skip
    values = np.frombuffer(data, dtype).reshape(rows, width // dtype.itemsize)
    return values if values.flags.aligned else values.copy()


def _raw_bytes(array: Any, place: ValuePlace, itemsize: int) -> tuple[Any, int]:
    """A binary array of equally long values as one buffer, and the length of a value."""
    kind = array.type
    if pa.types.is_fixed_size_binary(kind):
        width, data = int(kind.byte_width), array.buffers()[1]
        start, size = array.offset * width, len(array) * width
        return b"" if data is None or not size else data.slice(start, size), width
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise place.error(
            "a column that holds no bytes",
            expected=f"binary values for shape {place.spec.value_shape}",
            received=f"Arrow type {kind}",
        )
    if len(array) == 0:
        return b"", 0
    content, widths = _content(array)
    if (widths != widths[0]).any():
        wanted = math.prod(d or 0 for d in place.spec.value_shape) * itemsize
        common, index = _odd_one(widths, wanted)
        raise place.error(
            "bytes of unequal length", row=index,
            expected=f"shape {place.spec.value_shape}; other rows have {common} bytes",
            received=f"{widths[index]} bytes", hint="encoded images (JPEG, PNG) need a decoder",
        )  # fmt: skip
    return content, int(widths[0])


def _decode_values(array: Any, spec: ColumnSpec, place: ValuePlace) -> Array:
    """Passes every value through the user's decoder: the only loop over rows in Python."""
    out: Array | None = None
    for row, result in enumerate(_decoded(array, spec, place)):
        if out is None:
            out = np.empty((len(array), *result.shape), spec.value_dtype)
        elif result.shape != out.shape[1:]:
            raise shape_error(result.shape, place, row, "the decoder gave another shape")
        out[row] = cast(result, spec.value_dtype, place, row)
    return empty_rows(spec) if out is None else out


def _decode_values_of_any_length(array: object, spec: ColumnSpec, place: ValuePlace) -> Ragged:
    """The same for values whose first dimension may differ, to be padded."""
    rows = [
        cast(result, spec.value_dtype, place, row)
        for row, result in enumerate(_decoded(array, spec, place))
    ]
    none = np.empty((0, *spec.position_shape), spec.value_dtype)
    return Ragged(np.concatenate([none, *rows]), np.array([len(row) for row in rows], np.int64))


def _decoded(array: Any, spec: ColumnSpec, place: ValuePlace) -> Iterator[Array]:
    decoder = spec.decoder
    if decoder is None:  # ColumnSpec refuses this; mypy cannot know
        raise place.error("no decoder", expected="a decoder", received="None")
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
                "the decoder gave no numbers", row=row,
                expected=f"an array of shape {spec.value_shape} and dtype {spec.dtype}",
                received=f"{type(result).__name__} of dtype {result.dtype}",
            )  # fmt: skip
        if not matches(result.shape, spec.value_shape):
            raise shape_error(result.shape, place, row, "the decoder gave another shape")
        yield result


VECTOR_FIELDS = {"type", "size", "indices", "values"}


def is_vector(kind: Any) -> bool:
    """Whether an Arrow type is the storage of ``pyspark.ml.linalg.VectorUDT``."""
    return bool(pa.types.is_struct(kind)) and {f.name for f in kind} == VECTOR_FIELDS


def decode_vectors(array: Any, place: ValuePlace) -> Array:
    """The struct of an ML vector, dense and sparse rows mixed -> ``(num_rows, width)``."""
    fields = dict(zip([f.name for f in array.type], array.flatten(), strict=True))
    values = fields["values"]
    place.check_nulls(values)
    if len(array) == 0:
        return np.empty((0, 0), np.float64)
    dense = numbers_of(fields["type"], place) == 1
    lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
    sizes = pc.fill_null(fields["size"], 0).to_numpy(zero_copy_only=False).astype(np.int64)
    widths = np.where(dense, lengths, sizes)
    if (widths != widths[0]).any():
        index = int(np.argmax(widths != widths[0]))
        raise place.error(
            "vectors of unequal length", row=index,
            expected=f"shape {place.spec.value_shape}; the rows before have length {widths[0]}",
            received=f"length {widths[index]}",
        )  # fmt: skip
    width = int(widths[0])
    numbers = numbers_of(values.flatten(), place)
    if dense.all():
        return numbers.reshape(len(array), width)
    counts = pc.fill_null(pc.list_value_length(fields["indices"]), 0).to_numpy(zero_copy_only=False)
    positions = np.arange(len(numbers)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    indices = numbers_of(fields["indices"].flatten(), place)
    sparse = np.repeat(~dense, lengths)
    unequal = (~dense & (counts != lengths)).any() or (dense & (counts != 0)).any()
    if unequal or (len(indices) and (indices.min() < 0 or indices.max() >= width)):
        raise place.error(
            "a malformed sparse vector", expected=f"as many indices as values, all in [0, {width})",
            received="indices that do not fit",
        )  # fmt: skip
    positions[sparse] = indices
    wanted = place.spec.value_dtype
    out = np.zeros((len(array), width), wanted if wanted.kind == "f" else np.float64)
    out[np.repeat(np.arange(len(array)), lengths), positions] = numbers
    return out


Mask = npt.NDArray[np.bool_]


def decode_valid(batch: pa.RecordBatch, spec: DataSpec, first_row: int = 0) -> tuple[Batch, Mask]:
    """Decodes the rows that can be decoded; see :func:`sparkdl.data.decode.decode`.

    Args:
        batch: Rows with at least the columns that ``spec`` names.
        first_row: Number of the batch's first row in its partition, for error messages.

    Returns:
        The valid rows, and for each row of ``batch`` whether it is among them. Invalid are rows
        with a null in a column of ``spec`` (or inside an array or struct there), and those whose
        value ``ColumnSpec.decoder`` or its encoder raises on or makes an array of another shape of.

    Raises:
        DataError: All else that does not fit: a type, a width.
    """
    valid = ~rows_with_nulls(batch, spec)
    rows = batch if valid.all() else batch.filter(pa.array(valid))
    try:
        return decode(rows, spec, first_row), valid
    except DataError:
        if not any(entry.kind == "decoded" or entry.encoder for entry in spec.entries):
            raise
    valid[valid] = [_decodes(rows.slice(row, 1), spec) for row in range(rows.num_rows)]
    return decode(batch.filter(pa.array(valid)), spec, first_row), valid


def rows_with_nulls(batch: pa.RecordBatch, spec: DataSpec) -> Mask:
    """For each row whether a column of ``spec`` has a null there, or inside its value."""
    found = np.zeros(batch.num_rows, bool)
    for entry in spec.entries:
        for name in entry.columns:
            array = batch.column(batch.schema.get_field_index(name))
            found |= _has_null(array, inside=entry.kind != "decoded")
    return found


def _has_null(array: Any, inside: bool) -> Mask:
    """For each value whether it is null, or (``inside``) has a null in it."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    found: Mask = np.zeros(len(array), bool)
    if array.null_count:
        found = pc.is_null(array).to_numpy(zero_copy_only=False)
    if not inside or len(array) == 0:
        return found
    if is_any_list(array.type):
        if not _null_free(array):
            inside_of = pc.list_parent_indices(array).to_numpy()
            found = found.copy()
            found[inside_of[_has_null(array.flatten(), inside=True)]] = True
    elif pa.types.is_struct(array.type) and not is_vector(array.type):
        for number in range(array.type.num_fields):
            found = found | _has_null(pc.struct_field(array, [number]), inside=False)
    return found


def _null_free(array: Any) -> bool:
    while is_any_list(array.type) and not array.null_count:
        array = array.flatten()
    return not array.null_count


def _decodes(row: pa.RecordBatch, spec: DataSpec) -> bool:
    try:
        decode(row, spec)
    except DataError:
        return False
    return True
