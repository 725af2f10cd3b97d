"""Computing on long vectors block by block, with blocks that fit a core's cache.

``center + delta / 5`` written in one line makes a temporary as long as the model and reads memory
twice. Rules and optimizers compute one block after the other instead, so that the temporary values
of a block stay in the cache. NumPy computes without the interpreter's lock, so a server may use
several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sparkdl.weights import FloatArray

BLOCK = 262_144
"""Elements per block: 1 MiB of float32. A few of them fit a shared cache, and a call on one is long
enough that threads seldom wait for the interpreter."""


def blocks(size: int, first: int = 0) -> Iterator[slice]:
    """Slices of at most ``BLOCK`` elements that cover ``range(size)`` once.

    Args:
        first: Number of the block to begin with; after the last block comes the first.
    """
    count = -(-size // BLOCK)
    for i in range(count):
        start = ((first + i) % count) * BLOCK
        yield slice(start, min(start + BLOCK, size))


_helpers: ThreadPoolExecutor | None = None
_threads = 1


def use_threads(count: int) -> None:
    """Lets :func:`each_block` use so many threads of this process.

    A worker keeps the initial value, one: it has the cores that Spark gave its task.
    """
    global _helpers, _threads
    if _helpers is not None:
        _helpers.shutdown()
    _helpers = ThreadPoolExecutor(count - 1, "sparkdl-blocks") if count > 1 else None
    _threads = count


def each_block(size: int, body: Callable[..., None], buffers: int = 0) -> None:
    """Calls ``body(part, *buffers)`` once for every block of ``range(size)``, in any order.

    Args:
        body: Takes a slice, and float32 vectors of that length with undefined content. Called in
            several threads at once if :func:`use_threads` said so.
    """
    count = -(-size // BLOCK)
    helpers, shares = _helpers, min(_threads, count // 2)  # one block is not worth a thread

    def compute(first: int, last: int) -> None:
        kept = [scratch(size) for _ in range(buffers)]
        for i in range(first, last):
            part = slice(i * BLOCK, min((i + 1) * BLOCK, size))
            body(part, *(buffer[: part.stop - part.start] for buffer in kept))

    if helpers is None or shares < 2:
        compute(0, count)
        return
    ends = [count * i // shares for i in range(shares + 1)]
    others = [helpers.submit(compute, ends[i], ends[i + 1]) for i in range(1, shares)]
    try:
        compute(ends[0], ends[1])
    finally:
        errors = [other.exception() for other in others]  # waits: no thread writes after the return
    for error in errors:
        if error is not None:
            raise error


def scratch(size: int) -> FloatArray:
    """A new float32 vector for one block's intermediate values; never shared between threads."""
    return np.empty(min(size, BLOCK), np.float32)


def add_scaled(center: FloatArray, delta: FloatArray, factor: float, out: FloatArray) -> None:
    """``out = center + factor * delta``, all float32 of one shape; ``out`` may be ``center``."""
    if factor == 1.0:
        np.add(center, delta, out=out)
        return
    scale = np.float32(factor)

    def body(part: slice, step: FloatArray) -> None:
        np.multiply(delta[part], scale, out=step)
        np.add(center[part], step, out=out[part])

    each_block(center.size, body, 1)
