"""The arithmetic of a reduction: each rank's factor, and the steps on cache-sized pieces.

A reduction of ``p`` ranks is ``x_0·f_0 ∘ x_1·f_1 ∘ … ∘ x_{p-1}·f_{p-1}`` with ``∘`` one of ``+``,
``max``, ``min`` and the factors

* ``sum``, ``max``, ``min``: ``f_i = 1``;
* ``mean``: ``f_i = 1/p``;
* ``weighted``: ``f_i = w_i / Σ w``. A rank of weight 0 contributes nothing, whatever its array
  holds (NaN included); if all weights are 0 the result is 0.

Scaling comes before adding, so that half-precision sums do not overflow on the way to a mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_UFUNCS = {"max": np.maximum, "min": np.minimum}


def shard_edges(size: int, count: int) -> list[int]:
    """Edges of ``count`` nearly equal parts of ``size`` elements (as ``Layout.shards``).

    >>> shard_edges(7, 3)
    [0, 2, 4, 7]
    """
    return [size * i // count for i in range(count + 1)]


def reduction_ufunc(op: str) -> np.ufunc:
    """The NumPy function that joins two contributions of ``op``."""
    return _UFUNCS.get(op, np.add)


def reduction_factors(op: str, weights: Sequence[float]) -> list[float]:
    """The factor of each rank's contribution.

    >>> reduction_factors('weighted', [1.0, 3.0, 0.0]), reduction_factors('mean', [1.0, 1.0])
    ([0.25, 0.75, 0.0], [0.5, 0.5])
    """
    if op == "mean":
        return [1.0 / len(weights)] * len(weights)
    if op == "weighted":
        total = float(sum(weights))
        return [w / total if total > 0 else 0.0 for w in weights]
    return [1.0] * len(weights)


def put_scaled(source: Array, factor: float, target: Array) -> None:
    """``target = factor · source``; a factor of 0 does not read the source."""
    if factor == 1.0:
        if target is not source:
            np.copyto(target, source)
    elif factor == 0.0:
        target.fill(0)
    elif target.dtype.itemsize == 2:
        # a factor rounded to half precision would bias every element alike
        np.multiply(source, np.float32(factor), out=target, casting="unsafe")
    else:
        np.multiply(source, factor, out=target)


def join_scaled(
    partial: Array, source: Array, factor: float, ufunc: np.ufunc, target: Array
) -> None:
    """``target = partial ∘ factor · source``; target may be the source, never the partial."""
    if factor == 1.0:
        ufunc(partial, source, out=target)
    elif factor == 0.0:
        np.copyto(target, partial)
    else:
        put_scaled(source, factor, target)
        ufunc(partial, target, out=target)


def reduce_in_order(
    parts: Sequence[Array], factors: Sequence[float], ufunc: np.ufunc, out: Array
) -> None:
    """Reduces whole arrays in rank order into ``out``, which overlaps none of them."""
    put_scaled(parts[0], factors[0], out)
    scratch = np.empty_like(out) if any(f not in (0.0, 1.0) for f in factors[1:]) else out
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        if factor == 1.0:
            ufunc(out, part, out=out)
        elif factor != 0.0:
            put_scaled(part, factor, scratch)
            ufunc(out, scratch, out=out)
