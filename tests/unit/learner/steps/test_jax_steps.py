"""Copies between JAX' devices and NumPy memory."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")
from sparkdl.learner.steps.jax import HostCopy, pinned_copy


@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_has_every_bit(pinned: bool) -> None:
    import jax.numpy as jnp

    values = np.array([0.0, -0.0, 1.5, -3e38, 1e-45, np.inf, np.nan], np.float32)
    copy = HostCopy()
    if pinned:
        copy._pinned = pinned_copy()
        assert copy._pinned is not None
    for _ in range(3):  # memory that is used again
        out = np.full(values.size, 7.0, np.float32)
        copy(jnp.asarray(values), out)
        assert out.tobytes() == values.tobytes()
        values = np.roll(values, 1)
