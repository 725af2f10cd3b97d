"""Computing on long vectors: block by block, as fit a cache, or by loops that numba compiles.

``center + delta / 5`` written in one line makes a temporary as long as the model and reads memory
twice. Rules and optimizers compute one block after the other instead, so that the temporary values
of a block stay in the cache. NumPy computes without the interpreter's lock, so a server may use
several threads.

In NumPy a step of Adam is ten calls per block, and arithmetic takes most of the time. As one loop
the same formula takes as long as reading and writing the memory. An optimizer that has such a loop
calls :func:`run_compiled` first, and computes in NumPy if that returns False. Both give the same
numbers, to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from sparkdl.weights import FloatArray

logger = logging.getLogger(__name__)


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


COMPILED_FROM = 2_000_000
"""Elements from which on a compiled loop is used. To import numba and to compile takes a process
half a second, which some hundred steps of Adam on so many elements save."""

Loop = Callable[..., None]


def run_compiled(
    loop: Loop,
    weights: FloatArray,
    out: FloatArray,
    vectors: tuple[FloatArray, ...],
    scalars: tuple[np.float32 | float, ...],
) -> bool:
    """Calls ``loop(weights, *vectors, *scalars)``, compiled, in pieces and in several threads.

    Args:
        loop: A plain function that goes through the elements with ``for i in range(...)`` and uses
            nothing but arithmetic, ``abs`` and ``np.sqrt``. It gets its scalars as float32; a
            number written in it would make the arithmetic float64.
        weights: What the loop changes in place.
        out: Where the caller wants the new weights: in place, or nothing is done.
        vectors: What else it goes through: float32 of one length; none overlaps another.
        scalars: The numbers of the formula.

    Returns:
        False if nothing was done: ``out`` is not ``weights``, these are fewer than
        :data:`COMPILED_FROM`, or numba is not installed (``pip install 'sparkdl-keras[fast]'``).
    """
    size = weights.size
    compiled = _compile(loop) if out is weights and size >= COMPILED_FROM else None
    if compiled is None:
        return False
    numbers = [np.float32(value) for value in scalars]
    all_vectors = (weights, *vectors)
    # compiles once, not in every thread
    compiled(*(vector[:0] for vector in all_vectors), *numbers)

    def body(part: slice) -> None:
        compiled(*(vector[part] for vector in all_vectors), *numbers)

    each_block(size, body)
    return True


@cache
def _compile(loop: Loop) -> Any:
    try:
        from numba import config, njit
    except ModuleNotFoundError:
        return None
    except ImportError as error:  # it says which NumPy it needs
        logger.warning("numba cannot be used, updates of large models take longer: %s", error)
        return None
    if config.DISABLE_JIT:  # NUMBA_DISABLE_JIT: a loop in Python would take minutes
        return None
    return njit(nogil=True, error_model="numpy")(loop)
