"""What a codec is: it encodes float32 vectors in fewer bytes, and decodes them.

A *codec* is a frozen configuration with pure functions; the sender and the receiver have equal
ones. A *compressor* belongs to one worker and one vector: it remembers what the codec has lost and
sends it later. Payloads are little-endian bytes without a header, and nothing in them is unpickled:
the receiver knows the codec and the length of the vector, and checks everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, ProtocolError
from sparkdl.values import bare_options
from sparkdl.weights import FloatArray

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
        """What is still to be sent; None where nothing is kept back."""

    def encode(self, array: FloatArray) -> ByteArray:
        """The payload to send for ``array``, which is not changed."""
        ...


class Codec:
    """Base of all codecs.

    Class attributes:
        name: The word a user writes, e.g. ``compression='fp16'``.
        lossy: Whether ``decode(encode(u))`` can differ from ``u``.
        feedback: Whether its compressor adds what was lost to the vector of the next call.
        sum_dtype: The dtype as which messages of several workers can be added up; None if they
            cannot.
        shapes_training: Whether it does more than save bytes (momentum, clipping), so that it must
            run even where worker and server share memory.
    """

    name: ClassVar[str] = ""
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

    def config(self) -> dict[str, Any]:
        """The constructor arguments, as values that JSON can hold."""
        return bare_options(self)


class Memoryless:
    """A compressor without state: what the codec loses is lost.

    Args:
        codec: Encodes.
        seed: Of the codec's draws.
    """

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
        seed: Of the codec's draws.

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
        f"malformed payload of codec {codec!r}",
        expected=expected,
        received=received,
        hint="the sender must use the same codec, with the same options, for the same model",
    )


def check_size(codec: str, payload: ByteArray, size: int) -> None:
    """Raises ProtocolError unless the payload has exactly ``size`` bytes."""
    if payload.size != size:
        raise malformed(codec, f"{size} bytes", f"{payload.size} bytes")


def chunks(size: int, step: int = CHUNK) -> Iterator[slice]:
    """Slices of at most ``step`` elements that cover ``range(size)``."""
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))
