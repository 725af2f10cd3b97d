"""Files like those of Keras, without Keras."""

from __future__ import annotations

import io
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
