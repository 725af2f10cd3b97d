"""Rows for JAX: ordered callbacks inside the compiled step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

if TYPE_CHECKING:
    from sparkdl.layers.lookups import HostRows


def lookup(rows: HostRows, ids: Any, anchor: Any, width: int) -> Any:
    """See :func:`sparkdl.layers.lookups.lookup`."""
    shape = jax.ShapeDtypeStruct((*ids.shape, width), jnp.float32)
    nothing = jax.ShapeDtypeStruct((), jnp.float32)

    def pull(ids: Any) -> Any:
        return rows.pull(np.asarray(ids))

    def push(ids: Any, gradients: Any) -> Any:
        rows.push(np.asarray(ids), np.asarray(gradients, np.float32))
        return np.float32(0)

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def rows_of(ids: Any, anchor: Any) -> Any:
        return io_callback(pull, shape, ids, ordered=True)

    def forward(ids: Any, anchor: Any) -> Any:
        return rows_of(ids, anchor), ids

    def backward(ids: Any, upstream: Any) -> Any:
        done = io_callback(push, nothing, ids, upstream, ordered=True)
        return np.zeros(ids.shape, jax.dtypes.float0), done

    rows_of.defvjp(forward, backward)
    return rows_of(ids, anchor)
