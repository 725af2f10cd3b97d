"""Keras' optimizer variables as bytes, and those of one kind as a flat vector."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.weights import FloatArray

Arrays = list[npt.NDArray[Any]]


def pack_arrays(arrays: Iterable[npt.NDArray[Any]]) -> bytes:
    """Arrays as a ``.npz`` file; dtypes that it does not know (bfloat16) become float32."""
    buffer = io.BytesIO()
    np.savez(buffer, *(a.astype(np.float32) if a.dtype.kind == "V" else a for a in arrays))
    return buffer.getvalue()


def read_slots(
    optimizer: Any, trained: list[Any], arrays: Arrays, names: list[str]
) -> dict[str, FloatArray] | None:
    """Variables of an optimizer that it has for each of the model's, as flat vectors.

    Args:
        optimizer: Built.
        trained: The model's variables.
        arrays: The values of ``optimizer.variables``.
        names: Attributes of the optimizer, e.g. ``'_momentums'``.

    Returns:
        Name -> the values in the order of ``trained``; None if it has no such variables.
    """
    found = {}
    for name in names:
        places = _places(optimizer, trained, name)
        if places is None:
            return None
        found[name] = np.concatenate([arrays[i].ravel() for i in places]).astype(np.float32)
    return found


def with_slots(
    optimizer: Any, trained: list[Any], arrays: Arrays, slots: dict[str, FloatArray], step: int
) -> Arrays:
    """``arrays`` with other values for some variables; the counterpart of :func:`read_slots`."""
    result = list(arrays)
    for name, flat in slots.items():
        places = _places(optimizer, trained, name) or []
        ends = np.cumsum([arrays[i].size for i in places])[:-1]
        for i, part in zip(places, np.split(flat, ends.tolist()), strict=True):
            result[i] = part.reshape(arrays[i].shape)
    counter = next(i for i, v in enumerate(optimizer.variables) if v is optimizer.iterations)
    result[counter] = np.array(step, arrays[counter].dtype)
    return result


def _places(optimizer: Any, trained: list[Any], name: str) -> list[int] | None:
    numbers = {id(variable): i for i, variable in enumerate(optimizer.variables)}
    slots = getattr(optimizer, name, None) or []
    if len(slots) != len(trained) or any(id(v) not in numbers for v in slots):
        return None
    return [numbers[id(slots[optimizer._get_variable_index(v)])] for v in trained]
