"""The struct of a Spark ML vector -> arrays.

Executors get the struct where Spark's ``vector_to_array`` was not applied before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.data.conform import ValuePlace, numbers_of
from sparkdl.data.ragged import Array

VECTOR_FIELDS = {"type", "size", "indices", "values"}


def is_vector(kind: Any) -> bool:
    """Whether an Arrow type is the storage of ``pyspark.ml.linalg.VectorUDT``."""
    return bool(pa.types.is_struct(kind)) and {f.name for f in kind} == VECTOR_FIELDS


def decode_vectors(array: Any, place: ValuePlace) -> Array:
    """The struct of an ML vector, dense and sparse rows mixed -> ``(num_rows, width)``."""
    names = [f.name for f in array.type]
    fields = dict(zip(names, array.flatten(), strict=True))
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
            "vectors of unequal length",
            row=index,
            expected=f"shape {place.spec.value_shape}; the rows before have length {widths[0]}",
            received=f"length {widths[index]}",
        )
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
            "a malformed sparse vector",
            expected=f"as many indices as values, all in [0, {width})",
            received="indices that do not fit",
        )
    positions[sparse] = indices
    wanted = place.spec.value_dtype
    out = np.zeros((len(array), width), wanted if wanted.kind == "f" else np.float64)
    out[np.repeat(np.arange(len(array)), lengths), positions] = numbers
    return out
