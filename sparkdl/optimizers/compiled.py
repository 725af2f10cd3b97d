"""One pass over long vectors where NumPy takes ten: loops that numba compiles.

In NumPy a step of Adam is ten calls per block, and arithmetic takes most of the time. As one loop
the same formula takes as long as reading and writing the memory. An optimizer that has such a loop
calls :func:`run_compiled` first, and computes in NumPy if that returns False. Both give the same
numbers, to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from sparkdl.optimizers.blocks import each_block
from sparkdl.weights import FloatArray

logger = logging.getLogger(__name__)

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
    compiled(
        *(vector[:0] for vector in all_vectors), *numbers
    )  # compiles once, not in every thread

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
    if (
        config.DISABLE_JIT
    ):  # the environment's NUMBA_DISABLE_JIT: a loop in Python would take minutes
        return None
    return njit(nogil=True, error_model="numpy")(loop)
