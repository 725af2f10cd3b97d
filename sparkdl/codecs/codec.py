"""A codec encodes float32 vectors in fewer bytes, and decodes them.

A *codec* is a frozen configuration with pure functions; the sender and the receiver have equal
ones. A *compressor* belongs to one worker and one vector: it remembers what the codec has lost and
sends it later. Payloads are little-endian bytes without a header, and nothing in them is unpickled:
the receiver knows the codec and the length of the vector, and checks everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, ProtocolError
from sparkdl.settings.values import Options
from sparkdl.weights import FloatArray, Layout

ByteArray = npt.NDArray[np.uint8]
Payload = bytes | bytearray | memoryview | ByteArray
Generator = np.random.Generator

CHUNK = 65_536
"""Elements that a codec works on at a time, so that intermediate values stay in the cache."""


class Compressor(Protocol):
    """Encodes one vector of one worker, again and again; keeps state between two calls.

    Not thread-safe.
    """

    @property
    def residual(self) -> FloatArray | None:
        """The part that is still to be sent; None where nothing is kept back."""

    def encode(self, array: FloatArray) -> ByteArray:
        """The payload to send for ``array``, which is not changed."""
        ...


class Codec(Options):
    """Base of all codecs.

    Class attributes:
        lossy: Whether ``decode(encode(u))`` can differ from ``u``.
        feedback: Whether its compressor adds what was lost to the vector of the next call.
        sum_dtype: The dtype as which messages of several workers can be added up; None if they
            cannot.
        shapes_training: Whether it does more than save bytes (momentum, clipping), so that it must
            run even where worker and server share memory.
    """

    lossy: ClassVar[bool] = True
    feedback: ClassVar[bool] = True
    sum_dtype: ClassVar[str | None] = None
    shapes_training: ClassVar[bool] = False

    def max_size(self, size: int) -> int:
        """The most bytes that ``encode`` makes of ``size`` elements, so that a server can check."""
        raise NotImplementedError

    def encode(self, array: FloatArray, rng: Generator | None = None) -> ByteArray:
        """Encodes a float32 vector.

        Args:
            array: Float32 of shape (n,); not changed.
            rng: Source of randomness for the codecs that draw; None takes fresh entropy.

        Returns:
            uint8 of shape (m,), m at most ``max_size(n)``.
        """
        raise NotImplementedError

    def decode(self, payload: Payload, out: FloatArray) -> None:
        """Writes what ``payload`` stands for into ``out``, float32 of the encoded length.

        Raises:
            ProtocolError: The payload cannot come from ``encode`` of a vector of that length.
        """
        raise NotImplementedError

    def subtract(self, payload: Payload, values: FloatArray) -> None:
        """``values -= decode(payload)``, which leaves what is still to be sent."""
        decoded = np.empty_like(values)
        self.decode(payload, decoded)
        np.subtract(values, decoded, out=values)

    def compressor(self, size: int, seed: int | None = None) -> Compressor:
        """A new compressor for one worker's vectors of ``size`` elements.

        Args:
            size: Elements of every vector to come.
            seed: Makes the draws of a random codec repeatable; give every worker its own.
        """
        if self.lossy and self.feedback:
            return ErrorFeedback(self, size, seed)
        return Memoryless(self, seed)

    def bind(self, num_workers: int) -> Codec:
        """The codec to use in a run of ``num_workers``."""
        return self

    def reply(self, size: int, num_workers: int) -> Codec:
        """The codec of a server's replies to ``num_workers`` workers that use this codec."""
        return self


class Memoryless:
    """A compressor without state: what the codec loses is lost."""

    residual: None = None

    def __init__(self, codec: Codec, seed: int | None = None) -> None:
        self._codec = codec
        self._rng = np.random.default_rng(seed)

    def encode(self, array: FloatArray) -> ByteArray:
        """The codec's payload for ``array``."""
        return self._codec.encode(array, self._rng)


class ErrorFeedback:
    """Sends what the codec lost together with the next vector.

    ::

        c = C(u + e)
        e = u + e - D(c)

    so that the sum of everything decoded, plus ``residual``, is the sum of everything given.

    Args:
        codec: C and D.
        size: Elements of every vector.
        seed: Seed of the codec's draws.

    References: Seide et al., 2014, "1-Bit Stochastic Gradient Descent" (Interspeech); Karimireddy
    et al., 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
    arXiv:1901.09847.
    """

    def __init__(self, codec: Codec, size: int, seed: int | None = None) -> None:
        self._codec = codec
        self._rng = np.random.default_rng(seed)
        self.residual: FloatArray = np.zeros(size, np.float32)

    def encode(self, array: FloatArray) -> ByteArray:
        """The payload for ``array`` plus what was lost before; updates ``residual``."""
        check_vector(array, self.residual.size)
        np.add(self.residual, array, out=self.residual)
        payload = self._codec.encode(self.residual, self._rng)
        self._codec.subtract(payload, self.residual)
        return payload


def check_vector(array: npt.NDArray[Any], size: int | None = None) -> None:
    """Raises ConfigError unless ``array`` is a float32 vector (of ``size`` elements)."""
    if array.ndim != 1 or array.dtype != np.float32 or size not in (None, array.shape[0]):
        raise ConfigError(
            "a codec cannot take this array",
            expected=f"float32 of shape ({'n' if size is None else size},)",
            received=f"{array.dtype} of shape {array.shape}",
        )


def as_bytes(payload: Payload) -> ByteArray:
    """The payload as a uint8 vector, without a copy."""
    if isinstance(payload, np.ndarray):
        return payload.view(np.uint8).reshape(-1)
    return np.frombuffer(payload, np.uint8)


def malformed(codec: str, expected: str, received: str) -> ProtocolError:
    """The error for a payload that the codec's ``encode`` cannot have made."""
    return ProtocolError(
        f"malformed payload of codec {codec!r}", expected=expected, received=received,
        hint="the sender must use the same codec, with the same options, for the same model",
    )  # fmt: skip


def check_size(codec: str, payload: ByteArray, size: int) -> None:
    """Raises ProtocolError unless the payload has exactly ``size`` bytes."""
    if payload.size != size:
        raise malformed(codec, f"{size} bytes", f"{payload.size} bytes")


def chunks(size: int, step: int = CHUNK) -> Iterator[slice]:
    """Slices of at most ``step`` elements that cover ``range(size)``."""
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


@dataclass(frozen=True)
class Sections:
    """The sections of a buffer, and the codec of the trained one."""

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
        self.codec.decode(data[self.averaged_bytes :], out[: self.trained_size])
        out[self.trained_size :].view(np.uint8)[...] = averaged


@dataclass(frozen=True)
class Compression:
    """The encoded part of a run's traffic: the workers' commits and the server's replies.

    A commit is encoded by ``codec``, with its error feedback. A reply is the change of what the
    worker holds (or the mean gradient of a round), encoded by ``codec.reply``: for sparse codecs
    the coordinates that all workers together have changed, so that it is not the bottleneck.

    Both sides have an equal one. A buffer ``[trained | averaged]`` travels as ``averaged section,
    float32 as it is | the codec's payload of the trained section``: running statistics are small,
    and a sparse or 1-bit codec would destroy them.

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
