"""Which rows no model can take: nulls, and values that the user's decoder refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.data.columns import Batch, DataSpec
from sparkdl.data.decode import decode, is_vector
from sparkdl.data.plain_arrow import is_any_list
from sparkdl.errors import DataError

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
