"""NumPy arrays in the bytes of an ``.npz`` file, which may come from a model file of a stranger."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ModelError
from sparkdl.files.archive_parts import check_whole, damaged_model


def pack_arrays(arrays: dict[str, Any]) -> bytes:
    """Arrays and numbers by name as bytes, not compressed."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def unpack_arrays(content: bytes, what: str) -> dict[str, npt.NDArray[Any]]:
    """The counterpart of :func:`pack_arrays`; nothing in the bytes is executed or unpickled.

    Args:
        content: The bytes.
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
