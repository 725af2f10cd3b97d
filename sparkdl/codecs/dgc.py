"""Deep gradient compression: top-k of gradients with the momentum in the codec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from sparkdl.codecs.codec import (
    ByteArray,
    Codec,
    Compressor,
    Generator,
    Payload,
    check_vector,
    chunks,
)
from sparkdl.codecs.sparse import (
    Changes,
    check_addressable,
    check_ratio,
    kept,
    largest,
    pack,
    put,
)
from sparkdl.settings.values import require_fraction, require_positive, require_whole
from sparkdl.weights import FloatArray

_WARMUP = (0.25, 0.0625, 0.015625, 0.004, 0.001)
"""Shares sent during warm-up, in equal stages: sparsity 75 % to 99.9 %, as in the paper."""


@dataclass(frozen=True)
class DGC(Codec):
    """Top-k with momentum correction, momentum factor masking, clipping and warm-up.

    A worker's compressor keeps a velocity ``u`` and what is still to be sent ``v``::

        g *= min(1, clip_norm / √workers / ‖g‖)     (if clip_norm is given)
        u = momentum · u + g
        v = v + u
        send the k largest of v;  clear v and u there

    The momentum is applied here: the receiver must apply what it gets without momentum of its own.
    When every element is sent (ratio 1), none is sent late and ``u`` is kept: that is momentum SGD.
    The format on the wire is :class:`TopK`'s. ``encode`` without a compressor is plain top-k.

    Args:
        ratio: Share of the elements sent after warm-up, in (0, 1].
        momentum: In [0, 1).
        clip_norm: The norm that the sum over all workers' gradients may have; None clips nothing.
        num_workers: Workers, for the clipping; ``bind`` fills it in.
        warmup_steps: Calls over which the share sent falls in five stages from 25 % to 0.1 % (but
            not below ``ratio``).

    Reference: Lin, Han, Mao, Wang and Dally, 2018, "Deep Gradient Compression", arXiv:1712.01887.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip_norm: float | None = None
    num_workers: int = 1
    warmup_steps: int = 0

    name: ClassVar[str] = "dgc"
    shapes_training: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ratio(self.name, self.ratio, None)
        require_fraction(self.name, "momentum", self.momentum)
        require_positive(self.name, "clip_norm", self.clip_norm, or_none=True)
        require_whole(self.name, "num_workers", self.num_workers, 1)
        require_whole(self.name, "warmup_steps", self.warmup_steps, 0)

    def share(self, step: int) -> float:
        """Share of the elements sent in call number ``step`` (from 0)."""
        if step >= self.warmup_steps:
            return self.ratio
        return max(self.ratio, _WARMUP[step * len(_WARMUP) // self.warmup_steps])

    def max_size(self, size: int) -> int:
        """8 bytes per element sent in the fullest call."""
        return 8 * kept(size, self.share(0))

    def encode(self, array: FloatArray, rng: Generator | None = None) -> ByteArray:
        """The largest elements, as after warm-up."""
        check_vector(array)
        check_addressable(self.name, array.size)
        return pack(array, largest(array, kept(array.size, self.ratio)))

    def decode(self, payload: Payload, out: FloatArray) -> None:
        """Writes the values sent, and 0 elsewhere."""
        put(self.name, payload, out, self.max_size(out.size) // 8)

    def bind(self, num_workers: int) -> DGC:
        """The same codec, which clips the sum of the gradients of ``num_workers`` workers."""
        return replace(self, num_workers=num_workers)

    def reply(self, size: int, num_workers: int) -> Codec:
        """All that the workers together may have changed, in the fullest call."""
        return Changes.of(kept(size, self.share(0)), size, num_workers)

    def compressor(self, size: int, seed: int | None = None) -> Compressor:
        """One worker's velocity and residual; the seed is not used."""
        return DGCCompressor(self, size)


class DGCCompressor:
    """One worker's state of :class:`DGC`.

    Args:
        codec: The configuration.
        size: Elements of every vector.

    Attributes:
        velocity: The paper's u.
        residual: The paper's v: what is still to be sent.
    """

    def __init__(self, codec: DGC, size: int) -> None:
        check_addressable(codec.name, size)
        self._codec = codec
        self._step = 0
        self.velocity: FloatArray = np.zeros(size, np.float32)
        self.residual: FloatArray = np.zeros(size, np.float32)

    def encode(self, array: FloatArray) -> ByteArray:
        """Adds the gradient to what is still to be sent, and sends the largest elements of that."""
        check_vector(array, self.residual.size)
        scale = np.float32(self._clipping(array))
        momentum = np.float32(self._codec.momentum)
        clipped = np.empty(min(array.size, 65_536), np.float32)
        for part in chunks(array.size):
            velocity, residual = self.velocity[part], self.residual[part]
            gradient = array[part]
            if scale != 1.0:
                gradient = np.multiply(gradient, scale, out=clipped[: gradient.size])
            np.multiply(velocity, momentum, out=velocity)
            np.add(velocity, gradient, out=velocity)
            np.add(residual, velocity, out=residual)
        k = kept(array.size, self._codec.share(self._step))
        self._step += 1
        indices = largest(self.residual, k)
        payload = pack(self.residual, indices)
        self.residual[indices] = 0.0
        if k < array.size:
            self.velocity[indices] = 0.0
        return payload

    def _clipping(self, array: FloatArray) -> float:
        if self._codec.clip_norm is None:
            return 1.0
        limit = self._codec.clip_norm / self._codec.num_workers**0.5
        norm = float(np.sqrt(np.dot(array, array)))
        return limit / norm if norm > limit else 1.0
