"""The frames of TFRecord and event files: known CRCs, and files that are cut or changed."""

from __future__ import annotations

import io

import pytest

from sparkdl.data.tfrecord.framing import crc32c, crc32c_by_table, frame, read_frames
from sparkdl.errors import DataError


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720, B.4
        (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283), (b"", 0),
    ],
)  # fmt: skip
def test_known_crcs(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc32c_by_table(data) == crc


def test_frames_come_back() -> None:
    records = [b"", b"a", b"x" * 70_000]
    assert list(read_frames(io.BytesIO(b"".join(map(frame, records))))) == records


def test_a_frame_is_that_of_the_format() -> None:
    """The CRCs are TensorBoard's ``masked_crc32c``."""
    assert frame(b"foo").hex() == "0300000000000000" + "b099490e" + "666f6f" + "618abefe"


@pytest.mark.parametrize("place", [0, 9, 12, 14, -1])
def test_a_changed_byte_is_found(place: int) -> None:
    content = bytearray(frame(b"some data"))
    content[place] ^= 1
    with pytest.raises(DataError, match=r"record 1 of f\.tfrecord, at byte \d+: broken"):
        list(read_frames(io.BytesIO(frame(b"first") + bytes(content)), "f.tfrecord"))


@pytest.mark.parametrize("size", [1, 11, 12, 15, 24])
def test_a_file_that_is_cut_is_found(size: int) -> None:
    with pytest.raises(DataError, match="record 0"):
        list(read_frames(io.BytesIO(frame(b"some data")[:size])))
