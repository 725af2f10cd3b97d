"""Arrow columns in the types that Spark and NumPy know: one typing for all forms of data."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.errors import DataError

_WIDER = {8: pa.int16(), 16: pa.int32(), 32: pa.int64(), 64: pa.decimal128(20, 0)}
"""Bits of an unsigned integer -> the type of Spark's for it, as its reader of Parquet has it."""
_WIDEST_DECIMAL = 38
_NO_TYPES = pa.schema([])
_CASTS_HALVES = int(pa.__version__.split(".")[0]) >= 20
"""Whether pyarrow casts half floats; of older ones not all do (15 does not)."""


@dataclass(frozen=True)
class FileColumns:
    """The columns to read of files, and how they are found in each.

    Args:
        names: What they are called here.
        schema: The types of some of them; a file with a type that these do not hold is refused.
        exact: Whether ``a`` in a file is not the column ``A`` (``spark.sql.caseSensitive``).
    """

    names: Sequence[str]
    schema: pa.Schema = _NO_TYPES
    exact: bool = True

    def found_in(self, path: str, there: pa.Schema) -> list[str]:
        """The names of the columns in a file.

        Raises:
            DataError: It lacks a column, or has one of another type.
        """
        found = []
        for name in self.names:
            like = [n for n in there.names if not self.exact and n.lower() == name.lower()]
            same = [n for n in there.names if n == name] or like
            if len(same) != 1:
                raise DataError(
                    f"{path} has other columns than the files before",
                    expected=f"the column {name!r}" + (", once" if same else ""),
                    received=f"the columns {there.names}",
                )
            found += same
            wanted = self.schema.field(name).type if name in self.schema.names else None
            kind = there.field(same[0]).type
            if wanted is not None and not holds(wanted, kind):
                raise DataError(
                    f"{path} has column {name!r} in another type than the files before",
                    expected=f"{wanted}, or what it holds without a loss", received=str(kind),
                    hint="write the files with one type for each column",
                )  # fmt: skip
        return found


def holds(wanted: pa.DataType, found: pa.DataType) -> bool:
    """Whether a column of one type can be read as one of another, as Spark's reader can.

    >>> holds(pa.int64(), pa.uint8()), holds(pa.int32(), pa.int64())
    (True, False)
    """
    types, kind = pa.types, plain_type(found)
    if kind in (wanted, pa.null()):
        return True
    if is_any_list(wanted) and is_any_list(kind):
        return holds(wanted.value_type, kind.value_type)
    if types.is_duration(kind) or kind == pa.bool_() != found:
        kind = pa.int64() if types.is_duration(kind) else pa.int8()  # as Parquet stores them
    if types.is_integer(kind) and not types.is_integer(wanted):
        return bool(types.is_decimal(wanted) or (wanted == pa.float64() and kind.bit_width < 64))
    if types.is_decimal(kind) and types.is_decimal(wanted):
        whole = kind.precision - kind.scale, wanted.precision - wanted.scale
        return bool(kind.scale <= wanted.scale and whole[0] <= whole[1])
    for is_number in (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal):
        if is_number(kind) or is_number(wanted):
            return bool(
                is_number(kind) and is_number(wanted) and kind.bit_width <= wanted.bit_width
            )
    return True


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type without views, dictionaries, runs, extensions, half floats and unsigned integers."""
    types, name = pa.types, str(kind)
    if isinstance(kind, pa.BaseExtensionType):
        return pa.bool_() if kind.extension_name == "arrow.bool8" else plain_type(kind.storage_type)
    if types.is_dictionary(kind) or name.startswith("run_end_encoded"):
        return plain_type(kind.value_type)
    if is_any_list(kind):
        return pa.list_(plain_type(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    if types.is_string(kind) or name in ("large_string", "string_view"):
        return pa.string()
    if name in ("large_binary", "binary_view"):  # views have a name from pyarrow 16 on
        return pa.binary()
    if kind == pa.float16():
        return pa.float32()
    if types.is_unsigned_integer(kind):
        return _WIDER[kind.bit_width]
    if types.is_date64(kind):
        return pa.date32()
    if types.is_time(kind):
        return pa.time64("us")
    if types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if types.is_duration(kind):
        return pa.duration("us")
    if types.is_decimal(kind):  # Spark's have from 0 to all of their digits behind the point
        scale = max(kind.scale, 0)
        digits = max(kind.precision - min(kind.scale, 0), scale)
        return (
            pa.decimal128(digits, scale) if digits <= _WIDEST_DECIMAL else pa.decimal256(76, scale)
        )
    return kind


def is_any_list(kind: pa.DataType) -> bool:
    """Whether a type is a list in one of Arrow's layouts."""
    fixed = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    return fixed or pa.types.is_large_list(kind) or "list_view<" in str(kind).split(" ")[0]


def unwrapped(array: pa.Array) -> pa.Array:
    """An array whose values lie in the usual layout; the same one if they do.

    Tensors become flat lists in the order of their logical shape.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        order = getattr(kind, "permutation", None)
        if order is not None and list(order) != sorted(order):
            rows, size = array.storage, array.storage.type.list_size
            values = rows.values[rows.offset * size : (rows.offset + len(rows)) * size]
            axes = [0, *(1 + axis for axis in order)]  # pyarrow 15 shows no permuted tensors
            values = values.to_numpy(zero_copy_only=False).reshape(-1, *kind.shape)
            values = values.transpose(axes).reshape(-1)
            mask = {"mask": rows.is_null()} if rows.null_count else {}
            return pa.FixedSizeListArray.from_arrays(pa.array(values), size, **mask)
        return unwrapped(array.storage)
    if pa.types.is_dictionary(kind):  # pyarrow 26 decodes none of views
        values = unwrapped(array.dictionary)
        return unwrapped(pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode())
    if str(kind).startswith("run_end_encoded"):
        return unwrapped(pc.run_end_decode(array))
    if is_any_list(kind) and not _is_usual(kind):
        return _listed(array)
    if pa.types.is_struct(kind) and not _is_usual(kind):
        parts = [unwrapped(part) for part in array.flatten()]
        return pa.StructArray.from_arrays(parts, [f.name for f in kind], mask=array.is_null())
    if kind == pa.float16() and not _CASTS_HALVES:
        wide = array.to_numpy(zero_copy_only=False).astype(np.float32)
        return pa.array(wide, mask=array.is_null().to_numpy(zero_copy_only=False))
    return array.cast(plain_type(kind)) if "_view" in str(kind) else array


def _listed(array: pa.Array) -> pa.Array:
    """A list of any layout as a plain one; pyarrow 26 casts list views without their last end."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    ends = np.concatenate([[0], np.cumsum(lengths)])
    cls = pa.ListArray if ends[-1] < 2**31 else pa.LargeListArray
    offsets = pa.array(ends, pa.int32() if cls is pa.ListArray else pa.int64())
    return cls.from_arrays(offsets, unwrapped(array.flatten()), mask=array.is_null())


def bytes_of(array: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The memory of the values of a binary array or of texts, and where in it each value begins;
    behind them where the last one ends."""
    if not len(array):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    _, positions, data = array.buffers()
    large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    offsets = np.frombuffer(positions, np.int64 if large else np.int32)[array.offset :]
    return np.frombuffer(data or b"", np.uint8), offsets[: len(array) + 1].astype(np.int64)


def plain(array: pa.Array) -> pa.Array:
    """An array with its :func:`plain_type`; ``uint64`` as ``int64`` where that holds all values.

    Raises:
        pa.ArrowInvalid: It cannot hold a value, such as a part of a microsecond.
    """
    kind = plain_type(array.type)
    if "uint64" in str(array.type):
        with contextlib.suppress(pa.ArrowInvalid):
            return unwrapped(array).cast(_signed(kind))
    array = unwrapped(array)
    return array if array.type == kind else array.cast(kind)


def _signed(kind: pa.DataType) -> pa.DataType:
    if is_any_list(kind):
        return pa.list_(_signed(kind.value_type))
    return pa.int64() if kind == _WIDER[64] else kind


def _is_usual(kind: pa.DataType) -> bool:
    if "_view" in str(kind):
        return False
    if is_any_list(kind):
        return _is_usual(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_usual(field.type) for field in kind)
    wrapped = isinstance(kind, pa.BaseExtensionType) or pa.types.is_dictionary(kind)
    wrapped |= kind == pa.float16() and not _CASTS_HALVES
    return not wrapped and not str(kind).startswith("run_end_encoded")
