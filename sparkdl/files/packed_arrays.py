"""NumPy arrays in the bytes of an ``.npz`` file, which may come from a model file of a stranger."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ModelError
from sparkdl.files.archive_parts import check_whole, damaged_model
from sparkdl.files.run_state import StoredBytes


def pack_arrays(arrays: dict[str, Any]) -> bytes:
    """Arrays and numbers by name as bytes, not compressed."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def store_arrays(
    arrays: Mapping[str, npt.NDArray[Any] | int | float],
    pieces: Iterable[tuple[str, int, Iterable[npt.NDArray[np.float32]]]],
) -> StoredBytes:
    """The same as :func:`pack_arrays`, in a file, of arrays that are never whole in memory.

    Args:
        arrays: Small ones.
        pieces: The name of each flat array, the number of its elements, and its parts in order.
    """
    stored = StoredBytes()
    with zipfile.ZipFile(stored.file, "w") as archive:
        for name, value in arrays.items():
            with archive.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, np.asarray(value), allow_pickle=False)
        for name, size, parts in pieces:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                head = {"descr": "<f4", "fortran_order": False, "shape": (size,)}
                np.lib.format.write_array_header_1_0(entry, head)
                for part in parts:
                    entry.write(np.ascontiguousarray(part).view(np.uint8).data)
    stored.file.flush()
    return stored


def unpack_arrays(content: bytes, what: str) -> dict[str, npt.NDArray[Any]]:
    """The counterpart of :func:`pack_arrays`; nothing in the bytes is executed or unpickled.

    Args:
        what: Whose they are, for the message.

    Raises:
        ModelError: They are damaged, or would fill the memory.
    """
    try:
        check_whole(content)
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            found = dict(arrays.items())
        for name, array in found.items():
            if not isinstance(array, np.ndarray):  # numpy gives such parts as bytes
                raise ValueError(f"{name} is no array")
        return found
    except ModelError as error:
        raise damaged_model(f"{what} cannot be read", error.expected, error.received) from error
    except Exception as error:  # numpy reads the head of an array as Python's syntax
        told = f"{type(error).__name__}: {str(error)[:200]}"
        raise damaged_model(f"{what} cannot be read", "arrays of NumPy", told) from error
