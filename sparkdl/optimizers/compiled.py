"""One pass over long vectors where NumPy takes ten: loops that numba compiles.

In NumPy a step of Adam is ten calls per block, bound by arithmetic. The same formula as one loop is
bound by the memory alone. A formula that has such a loop gives it to :func:`run_compiled` first,
and goes on in NumPy if that says no: both come to the same numbers, to the last bit.
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
"""Elements from which on a compiled loop is taken. To import numba and compile takes half a second
of a process: as long as some hundred steps of Adam on so many elements gain."""

Loop = Callable[..., None]


def run_compiled(
    loop: Loop, vectors: tuple[FloatArray, ...], scalars: tuple[np.float32 | float, ...]
) -> bool:
    """Calls ``loop(*vectors, *scalars)``, compiled, in pieces and in several threads.

    Args:
        loop: A plain function that goes through the elements with ``for i in range(...)`` and uses
            nothing but arithmetic, ``abs`` and ``np.sqrt``. It gets its scalars as float32; a
            number written in it would make the arithmetic float64.
        vectors: Float32 vectors of one length, which do not overlap.
        scalars: The numbers of the formula.

    Returns:
        False if nothing was done: the vectors are shorter than :data:`COMPILED_FROM`, or numba is
        not installed (``pip install 'sparkdl-keras[fast]'``).
    """
    size = vectors[0].size
    compiled = _compile(loop) if size >= COMPILED_FROM else None
    if compiled is None:
        return False
    numbers = [np.float32(value) for value in scalars]
    compiled(*(vector[:0] for vector in vectors), *numbers)  # compiles once, not in every thread

    def body(part: slice) -> None:
        compiled(*(vector[part] for vector in vectors), *numbers)

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
