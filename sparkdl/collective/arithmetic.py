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
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, UnknownNameError

Array = npt.NDArray[Any]

_UFUNCS = {"max": np.maximum, "min": np.minimum}


def shard_edges(size: int, count: int) -> list[int]:
    """Edges of ``count`` nearly equal parts of ``size`` elements (as ``Layout.shards``).

    >>> shard_edges(7, 3)
    [0, 2, 4, 7]
    """
    return [size * i // count for i in range(count + 1)]


def require_not_bfloat16(wire: str | None) -> None:
    """Raises ConfigError for what Horovod cannot reduce."""
    if wire == "bfloat16":
        raise ConfigError(
            "Horovod cannot reduce bfloat16", expected="compression=None or 'fp16' with Horovod",
            received="compression='bf16'", hint="communicator='builtin' can",
        )  # fmt: skip


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


KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "all_to_all")
OPS = ("sum", "mean", "weighted", "max", "min")
FLOATING = ("float16", "bfloat16", "float32", "float64")
DTYPES = (*FLOATING, *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"))
MAX_DIMENSIONS = 8


@lru_cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """``dtype.name``, which NumPy makes anew each time: 1.5 µs where an exchange takes 16."""
    return dtype.name


def check_array(array: npt.ArrayLike, operation: str) -> Array:
    """The array, contiguous; raises ConfigError unless its dtype can be sent."""
    source = np.asarray(array, order="C")
    if dtype_name(source.dtype) not in DTYPES or not source.dtype.isnative:
        raise ConfigError(
            f"cannot {operation} this array", expected="a native number type: " + ", ".join(DTYPES),
            received=f"dtype {source.dtype!r}",
        )  # fmt: skip
    return source


def check_gathered(source: Array) -> None:
    """Raises ConfigError if the array has more dimensions than a record can describe."""
    if source.ndim > MAX_DIMENSIONS:
        raise ConfigError(
            "cannot all_gather this array", expected=f"at most {MAX_DIMENSIONS} dimensions",
            received=f"shape {source.shape}",
        )  # fmt: skip


def check_parts(parts: Sequence[npt.ArrayLike], size: int) -> list[Array]:
    """The parts of an all-to-all; raises ConfigError unless there is one for each of ``size``."""
    sources = [check_array(part, "all_to_all") for part in parts]
    kinds = {dtype_name(source.dtype) for source in sources}
    if len(sources) != size or len(kinds) > 1 or any(source.ndim != 1 for source in sources):
        shapes = ", ".join(f"{dtype_name(s.dtype)} {s.shape}" for s in sources)
        raise ConfigError(
            "cannot all_to_all these parts",
            expected=f"{size} arrays of one dimension and one dtype, one for each rank",
            received=f"{len(sources)}: {shapes}",
        )
    return sources


def check_op(source: Array, op: str, weight: float, operation: str) -> float:
    """The weight of this rank's array; raises ConfigError if ``op`` cannot reduce the array."""
    if op not in OPS:
        raise UnknownNameError("op", op, OPS)
    if op in ("mean", "weighted") and dtype_name(source.dtype) not in FLOATING:
        raise ConfigError(
            f"cannot {operation} with op={op!r}",
            expected="floating-point numbers: " + ", ".join(FLOATING),
            received=f"dtype {source.dtype}",
            hint="sum integers, and divide where the result is used",
        )
    if op != "weighted":
        return 1.0
    if not (np.isfinite(weight) and weight >= 0):
        raise ConfigError(
            f"cannot {operation} with this weight", expected="a finite number of at least 0",
            received=f"weight={weight!r}",
        )  # fmt: skip
    return float(weight)


def check_out(
    source: Array, out: Array, shape: tuple[int, ...], operation: str, first: int = 0
) -> None:
    """Raises ConfigError unless the result of an operation on ``source`` can go into ``out``.

    Args:
        first: The element of ``source`` at which ``out`` may begin.
    """
    if (
        out.shape != shape
        or out.dtype != source.dtype
        or not out.flags.c_contiguous
        or not out.flags.writeable
    ):
        raise ConfigError(
            f"cannot {operation} into this out",
            expected=f"a writable, contiguous {source.dtype} array of shape {shape}",
            received=f"{out.dtype} of shape {out.shape}, contiguous: {out.flags.c_contiguous}"
            f", writable: {out.flags.writeable}",
        )
    if out.size and np.may_share_memory(source, out):
        begins = out.__array_interface__["data"][0] - source.__array_interface__["data"][0]
        if begins != first * source.itemsize:
            raise ConfigError(
                f"cannot {operation} into this out",
                expected="the place of the result in the input, or memory apart from it",
                received="memory that overlaps the input in part",
            )


def check_root(root: int, size: int) -> None:
    """Raises ConfigError unless ``root`` is one of ``size`` ranks."""
    if not 0 <= root < size:
        raise ConfigError(
            "cannot broadcast", expected=f"a root from 0 to {size - 1}", received=f"root={root!r}"
        )


def check_group(ranks: Sequence[int], rank: int, size: int) -> list[int]:
    """The ranks of a group in order; raises ConfigError unless ``rank`` is one of them."""
    members = sorted({int(r) for r in ranks})
    valid = all(0 <= r < size for r in members) and len(members) == len(ranks)
    if not valid or rank not in members:
        raise ConfigError(
            f"cannot make a group on rank {rank}",
            expected=f"different ranks from 0 to {size - 1}, this one among them",
            received=f"{list(ranks)!r}",
            hint="only the ranks of a group call group(); each passes the same ranks",
        )
    return members
