"""Few elements instead of all: top-k and random-k."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from sparkdl.codecs.codec import (
    CHUNK,
    ByteArray,
    Codec,
    Compressor,
    Generator,
    Payload,
    as_bytes,
    check_size,
    check_vector,
    chunks,
    malformed,
)
from sparkdl.errors import ConfigError
from sparkdl.settings.values import (
    POSITIVE_OR_NONE,
    option,
    require_fraction,
    require_share,
    whole_from,
)
from sparkdl.weights import FloatArray

Indices = npt.NDArray[np.int64]
_SAMPLE = 16_384
_SMALL = 65_536


def kept(size: int, ratio: float, k: int | None = None) -> int:
    """Elements kept of ``size``: ``k``, or ``ratio · size`` but at least one; never above size."""
    return min(size, k if k is not None else max(1, round(ratio * size)))


def check_addressable(codec: str, size: int) -> None:
    """Raises ConfigError unless every index of ``size`` elements fits 32 bits."""
    if size > 2**32:
        raise ConfigError(
            f"codec {codec!r} cannot address every element", expected="at most 2**32 elements",
            received=f"{size}", hint="compression='int8' or 'onebit' has no such limit",
        )  # fmt: skip


def largest(array: FloatArray, k: int) -> Indices:
    """Indices, ascending, of exactly ``k`` elements of largest size; NaN counts as the largest.

    Among equals at the border, which ones are taken is not defined. A threshold a little below the
    k-th largest size, estimated from a sample, leaves few candidates in one cheap pass; the exact
    choice is made among them.
    """
    n = array.size
    if k >= n:
        return np.arange(n)
    if n <= _SMALL or 4 * k >= n:
        return _exact(np.abs(array), k)
    sample = np.sort(np.abs(array[:: n // _SAMPLE]))
    # Of the sample about `share` lie above the k-th largest; aim three deviations further down.
    share = k / n * sample.size
    for slack in (3.0, 10.0):
        place = sample.size - int(share + slack * np.sqrt(share) + slack) - 1
        if place < 0 or np.isnan(sample[place]):
            break
        candidates = _at_least(array, sample[place])
        if candidates.size >= k:
            return candidates[_exact(np.abs(array[candidates]), k)]
    return _exact(np.abs(array), k)


def _at_least(array: FloatArray, threshold: np.float32) -> Indices:
    """Indices of the elements whose size is not below ``threshold``."""
    found: list[Indices] = []
    sizes = np.empty(CHUNK, np.float32)
    below = np.empty(CHUNK, np.bool_)
    for part in chunks(array.size):
        n = part.stop - part.start
        np.abs(array[part], out=sizes[:n])
        np.less(sizes[:n], threshold, out=below[:n])
        np.logical_not(below[:n], out=below[:n])
        indices = np.flatnonzero(below[:n])
        indices += part.start
        found.append(indices)
    return np.concatenate(found)


def _exact(sizes: FloatArray, k: int) -> Indices:
    if k == sizes.size:
        return np.arange(k)
    return np.sort(np.argpartition(sizes, sizes.size - k)[sizes.size - k :])


def pack(array: FloatArray, indices: Indices) -> ByteArray:
    """The elements at ``indices`` as bytes: all indices (uint32), then all values (float32)."""
    k = indices.size
    payload = np.empty(8 * k, np.uint8)
    payload[: 4 * k].view("<u4")[...] = indices
    payload[4 * k :].view("<f4")[...] = array[indices]
    return payload


def unpack(
    codec: str, payload: Payload, size: int, limit: int
) -> tuple[Indices, npt.NDArray[np.float32]]:
    """The indices and values in the bytes that :func:`pack` made.

    Raises:
        ProtocolError: More than ``limit`` elements, a broken length, or indices that are not
            ascending and below ``size``.
    """
    data = as_bytes(payload)
    if data.size % 8 or data.size > 8 * limit:
        raise malformed(codec, f"at most {8 * limit} bytes, a multiple of 8", f"{data.size} bytes")
    k = data.size // 8
    data = np.ascontiguousarray(data)
    indices = data[: 4 * k].view("<u4").astype(np.int64)
    if k and (indices[-1] >= size or not (indices[1:] > indices[:-1]).all()):
        raise malformed(codec, f"ascending indices below {size}", "other indices")
    return indices, data[4 * k :].view("<f4")


class _Placed(Codec):
    """The base of the codecs whose payload is the places of some elements and their values."""

    def decode(self, payload: Payload, out: FloatArray) -> None:
        places, values = self._unpack(payload, out.size)
        out.fill(0.0)
        out[places] = values

    def subtract(self, payload: Payload, values: FloatArray) -> None:
        places, sent = self._unpack(payload, values.size)
        values[places] -= sent

    def _unpack(self, payload: Payload, size: int) -> tuple[Indices, npt.NDArray[np.float32]]:
        return unpack(self.name, payload, size, self.max_size(size) // 8)


@dataclass(frozen=True)
class _FewElements(_Placed):
    """The base of top-k and random-k: how many elements they keep, and the reply's codec."""

    ratio: float = option(0.01, require_share)
    k: int | None = option(None, whole_from(1, or_none=True))

    def reply(self, size: int, num_workers: int) -> Codec:
        """All that the workers together may have changed."""
        return Changes.of(kept(size, self.ratio, self.k), size, num_workers)


@dataclass(frozen=True)
class TopK(_FewElements):
    """The k elements of largest size, exactly k, as indices and values: 8 k bytes.

    On the wire: the indices, ascending (uint32), then the values (float32).

    Args:
        ratio: Share of the elements to keep, in (0, 1].
        k: Elements to keep, instead of ``ratio``.

    References: Aji and Heafield, 2017, "Sparse Communication for Distributed Gradient Descent",
    arXiv:1704.05021; Stich, Cordonnier and Jaggi, 2018, "Sparsified SGD with Memory",
    arXiv:1809.07599.
    """

    name: ClassVar[str] = "topk"

    def max_size(self, size: int) -> int:
        """8 bytes per element kept."""
        return 8 * kept(size, self.ratio, self.k)

    def encode(self, array: FloatArray, rng: Generator | None = None) -> ByteArray:
        """Picks the k largest."""
        check_vector(array)
        check_addressable(self.name, array.size)
        return pack(array, largest(array, kept(array.size, self.ratio, self.k)))


@dataclass(frozen=True)
class Changes(TopK):
    """Every element that is not 0; the k largest if there are more.

    For replies: p workers that send k elements each change p · k elements at most, so nothing is
    lost. Users cannot choose it with ``compression=``.
    """

    name: ClassVar[str] = "changes"

    @classmethod
    def of(cls, count: int, size: int, num_workers: int) -> Changes:
        """For ``num_workers`` that send ``count`` of ``size`` elements; half of all at most."""
        return cls(k=max(1, min(count * num_workers, size // 2)))

    def encode(self, array: FloatArray, rng: Generator | None = None) -> ByteArray:
        """Picks what is not 0, as indices and values."""
        check_vector(array)
        check_addressable(self.name, array.size)
        k = kept(array.size, self.ratio, self.k)
        if np.count_nonzero(array) <= k:
            return pack(array, np.flatnonzero(array))
        return pack(array, largest(array, k))


@dataclass(frozen=True)
class RandomK(_FewElements):
    """k elements drawn at random, as values and a seed: 4 k + 8 bytes.

    The vector is cut into k nearly equal pieces and one element is drawn from each. No index is
    sent: the receiver draws the same elements from the seed. Values are not scaled by n/k, as error
    feedback sends the other elements later.

    On the wire: the seed (uint64), then the values (float32) in order of their places.

    Args:
        ratio: Share of the elements to keep, in (0, 1].
        k: Elements to keep, instead of ``ratio``.

    Reference: Stich, Cordonnier and Jaggi, 2018, "Sparsified SGD with Memory", arXiv:1809.07599.
    """

    name: ClassVar[str] = "randomk"

    def max_size(self, size: int) -> int:
        """8 bytes for the seed and 4 per element kept."""
        return 8 + 4 * kept(size, self.ratio, self.k)

    def encode(self, array: FloatArray, rng: Generator | None = None) -> ByteArray:
        """Draws a seed, and the elements from it."""
        check_vector(array)
        check_addressable(self.name, array.size)
        rng = np.random.default_rng() if rng is None else rng
        seed = int(rng.integers(2**64, dtype=np.uint64))
        payload = np.empty(self.max_size(array.size), np.uint8)
        payload[:8].view("<u8")[0] = seed
        payload[8:].view("<f4")[...] = array[self._places(seed, array.size)]
        return payload

    def _unpack(self, payload: Payload, size: int) -> tuple[Indices, npt.NDArray[np.float32]]:
        data = as_bytes(payload)
        check_size(self.name, data, self.max_size(size))
        data = np.ascontiguousarray(data)
        return self._places(int(data[:8].view("<u8")[0]), size), data[8:].view("<f4")

    def _places(self, seed: int, size: int) -> Indices:
        k = kept(size, self.ratio, self.k)
        edges = np.arange(k + 1, dtype=np.uint64) * np.uint64(size) // np.uint64(max(k, 1))
        draws = _splitmix64(seed, k) >> np.uint64(32)
        widths = edges[1:] - edges[:-1]
        return (edges[:-1] + ((draws * widths) >> np.uint64(32))).astype(np.int64)


def _splitmix64(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """``count`` numbers of the splitmix64 sequence (Steele, Lea and Flood, 2014).

    Written out because both ends of a wire must draw alike, whatever their NumPy's version.
    """
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


_WARMUP = (0.25, 0.0625, 0.015625, 0.004, 0.001)
"""Shares sent during warm-up, in equal stages: sparsity 75 % to 99.9 %, as in the paper."""


@dataclass(frozen=True)
class DGC(_Placed):
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

    ratio: float = option(0.001, require_share)
    momentum: float = option(0.9, require_fraction)
    clip_norm: float | None = option(None, POSITIVE_OR_NONE)
    num_workers: int = option(1, whole_from(1))
    warmup_steps: int = option(0, whole_from(0))

    name: ClassVar[str] = "dgc"
    shapes_training: ClassVar[bool] = True

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
