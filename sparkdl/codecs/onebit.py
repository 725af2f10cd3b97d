"""One bit per element: the sign, and the mean size of all elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sparkdl.codecs.codec import (
    CHUNK,
    ByteArray,
    Codec,
    Generator,
    Payload,
    as_bytes,
    check_size,
    check_vector,
    chunks,
    malformed,
)
from sparkdl.weights import FloatArray


@dataclass(frozen=True)
class OneBit(Codec):
    """``sign(u) · mean|u|``: n/8 + 4 bytes. Biased, so it needs error feedback.

    On the wire: the mean size (float32), then the signs (1 is below zero), most significant bit
    first. A NaN or infinity makes the mean NaN or infinite, and all decoded values with it.

    References: Seide et al., 2014, "1-Bit Stochastic Gradient Descent" (Interspeech); Karimireddy
    et al., 2019, arXiv:1901.09847 (scaled sign with error feedback).
    """

    name: ClassVar[str] = "onebit"

    def max_size(self, size: int) -> int:
        """4 bytes and a bit per element."""
        return 4 + -(-size // 8)

    def encode(self, array: FloatArray, rng: Generator | None = None) -> ByteArray:
        """Takes the signs and the mean size."""
        check_vector(array)
        payload = np.empty(self.max_size(array.size), np.uint8)
        sizes = np.empty(min(array.size, CHUNK), np.float32)
        total = 0.0
        for part in chunks(array.size):
            values = array[part]
            payload[4 + part.start // 8 : 4 + -(-part.stop // 8)] = np.packbits(values < 0)
            total += float(np.add.reduce(np.abs(values, out=sizes[: values.size])))
        payload[:4].view("<f4")[0] = total / max(array.size, 1)
        return payload

    def decode(self, payload: Payload, out: FloatArray) -> None:
        """Writes plus or minus the mean size."""
        data = as_bytes(payload)
        check_size(self.name, data, self.max_size(out.size))
        scale = np.ascontiguousarray(data[:4]).view("<f4")[0]
        if scale < 0:
            raise malformed(self.name, "a mean size that is not negative", f"{scale}")
        # Eight values per byte, looked up: a table of 8 KiB stays in the first-level cache.
        signs = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
        table = np.where(signs, -scale, scale).astype(np.float32)
        codes = data[4:]
        whole = out.size // 8
        for part in chunks(whole, CHUNK // 8):
            target = out[8 * part.start : 8 * part.stop].reshape(-1, 8)
            np.take(table, codes[part], axis=0, out=target, mode="clip")
        if whole < codes.size:
            out[8 * whole :] = table[codes[whole], : out.size - 8 * whole]
