"""How a codec is used between workers and server: the bytes that a flat buffer becomes.

Both sides have an equal :class:`Compression`. On the wire a buffer ``[trained | averaged]`` is::

    | averaged section, float32 as it is | the codec's payload for the trained section |

The averaged section (running statistics) is small, and a sparse or 1-bit codec would destroy it, so
it is never encoded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparkdl.codecs.codec import ByteArray, Codec, Compressor, check_size, malformed
from sparkdl.errors import ConfigError
from sparkdl.weights import FloatArray, Layout


@dataclass(frozen=True)
class Sections:
    """The sections of a buffer, and the codec of the trained one.

    Args:
        codec: For the trained section.
        trained_size: Elements in the trained section.
        size: Elements in all.
    """

    codec: Codec
    trained_size: int
    size: int

    @property
    def averaged_bytes(self) -> int:
        """Bytes of the averaged section."""
        return 4 * (self.size - self.trained_size)

    @property
    def max_bytes(self) -> int:
        """The most bytes that :meth:`join` makes."""
        return self.averaged_bytes + self.codec.max_size(self.trained_size)

    def join(self, averaged: FloatArray, payload: ByteArray) -> ByteArray:
        """The bytes on the wire, newly allocated."""
        joined = np.empty(self.averaged_bytes + payload.size, np.uint8)
        joined[: self.averaged_bytes] = averaged.view(np.uint8)
        joined[self.averaged_bytes :] = payload
        return joined

    def decode(self, data: ByteArray, out: FloatArray) -> None:
        """Writes what ``data`` stands for into ``out``, a whole buffer that does not overlap it.

        Raises:
            ProtocolError: These bytes cannot come from the other end.
        """
        if data.size < self.averaged_bytes:
            expected = f"at least {self.averaged_bytes} bytes, the averaged section"
            raise malformed(self.codec.name, expected, f"{data.size} bytes")
        averaged = data[: self.averaged_bytes]
        check_size(self.codec.name, averaged, self.averaged_bytes)
        self.codec.decode(data[self.averaged_bytes :], out[: self.trained_size])
        out[self.trained_size :].view(np.uint8)[...] = averaged


@dataclass(frozen=True)
class Compression:
    """What is encoded in one run: the workers' commits and the server's replies.

    A commit is encoded by ``codec``, with its error feedback. A reply is the change of what the
    worker holds (or the mean gradient of a round), encoded by ``codec.reply``: for sparse codecs
    the coordinates that all workers together have changed, so that it is not the bottleneck.

    Args:
        codec: What the user chose.
        layout: Of the flat buffer.
        num_workers: Workers of the run.

    Raises:
        ConfigError: The codec would send more than no compression does.
    """

    codec: Codec
    layout: Layout
    num_workers: int

    def __post_init__(self) -> None:
        # For a small model the codec's scales and padding may weigh more than what it saves.
        limit = max(self.layout.size_bytes, 1 << 16)
        if self.max_bytes > limit:
            raise ConfigError(
                f"codec {self.codec.name!r} sends more than no compression would",
                expected=f"at most {limit} bytes per commit for this model",
                received=f"{self.max_bytes} bytes",
                hint="a smaller ratio or k, or compression=None",
            )

    @property
    def commits(self) -> Sections:
        """How a worker's commits travel."""
        return Sections(self.codec, self.layout.trained_size, self.layout.size)

    @property
    def replies(self) -> Sections:
        """How the server's replies to them travel."""
        trained = self.layout.trained_size
        return Sections(self.codec.reply(trained, self.num_workers), trained, self.layout.size)

    @property
    def max_bytes(self) -> int:
        """The most bytes of an encoded body, either way."""
        return max(self.commits.max_bytes, self.replies.max_bytes)

    def compressor(self, seed: int) -> Compressor:
        """A new compressor for one worker's commits."""
        return self.codec.compressor(self.layout.trained_size, seed)
