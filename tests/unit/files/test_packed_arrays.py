"""Arrays as bytes: they come back, or one error says why not."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from sparkdl.errors import ModelError
from sparkdl.files.model_file import pack_arrays, unpack_arrays


def npy(array: object) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(array))
    return buffer.getvalue()


def npz(part: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("a.npy", part)
    return buffer.getvalue()


def test_arrays_and_numbers_come_back() -> None:
    arrays = {"a": np.arange(6, dtype="float32").reshape(2, 3), "steps": 7, "none": np.zeros(0)}
    found = unpack_arrays(pack_arrays(arrays), "it")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    assert unpack_arrays(pack_arrays({}), "it") == {}


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_bytes_that_would_fill_the_memory_are_not_unpacked(method: int) -> None:
    """Before, each worker unpacked what the file of a model with such a rule held."""
    bomb = npz(npy(np.zeros(128 << 20, np.uint8)), method)
    assert len(bomb) < 200_000
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"(?s)^the state cannot be read.*hint"):
            unpack_arrays(bomb, "the state")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no arrays",
        npy([1.0]),
        npz(b"no array"),
        npz(npy([1.0])[:-1]),
        npz(npy([1.0]))[:-9],
        npz(npy([1.0]).replace(b"(1,)", b"(9,)")),
    ],
)
def test_other_bytes_are_one_error(content: bytes) -> None:
    with pytest.raises(ModelError, match=r"(?s)^the state cannot be read.*hint"):
        unpack_arrays(content, "the state")


@pytest.mark.parametrize(
    "head",
    [
        "(",
        "{" + "'" * 3,
        "-" * 9000 + "1",
        "{[]: 1}",
        f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({2**70},)}}",
        f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({2**70}, 0)}}",
        "{'descr': [('a',)], 'fortran_order': False, 'shape': (1,)}",
        "{'descr': ('<f8', -3), 'fortran_order': False, 'shape': (1,)}",
    ],
)
def test_heads_that_were_made_to_do_harm_are_one_error(head: str) -> None:
    """Before: TokenError, RecursionError, TypeError, OverflowError of numpy."""
    part = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + bytes(64)
    with pytest.raises(ModelError, match=r"(?s)^the state cannot be read.*hint"):
        unpack_arrays(npz(part), "the state")


def test_pickles_are_not_loaded() -> None:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.array([{}], object))
    with pytest.raises(ModelError, match="cannot be read"):
        unpack_arrays(buffer.getvalue(), "the state")
