"""Files like those of Keras, without Keras."""

from __future__ import annotations

import io
import struct
import zipfile


def keras_zip(weights: bytes = b"weights", compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", weights)
    return buffer.getvalue()


def with_part(content: bytes, name: str, part: bytes) -> bytes:
    buffer = io.BytesIO(content)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(name, part, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def with_far_part(offset: int) -> bytes:
    """An archive with a part that begins at ``offset``, as its entry (in zip64's form) says."""
    extra = struct.pack("<HHQ", 1, 8, offset)
    name = b"config.json"
    entry = struct.pack(
        "<4s4B4HL2L5H2L", b"PK\x01\x02", 45, 3, 45, 0, 0, 0, 0, 0, 0, 2, 2, len(name), len(extra),
        0, 0, 0, 0, 0xFFFFFFFF,
    )  # fmt: skip
    entry += name + extra
    return entry + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(entry), 0, 0)
