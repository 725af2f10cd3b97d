"""Rows for TensorFlow: functions of Python inside the graph, in the order of the program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from sparkdl.layers.lookups import HostRows


def lookup(rows: HostRows, ids: Any, anchor: Any, width: int) -> Any:
    """See :func:`sparkdl.layers.lookups.lookup`."""
    ids = tf.convert_to_tensor(ids)

    def push(ids: Any, gradients: Any) -> Any:
        rows.push(ids, gradients)
        return np.float32(0)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def rows_of(anchor: Any) -> Any:
        values = tf.numpy_function(rows.pull, [ids], tf.float32)
        values.set_shape([*ids.shape, width])

        def gradient(upstream: Any) -> Any:
            done = tf.numpy_function(push, [ids, upstream], tf.float32)
            done.set_shape([])
            return done

        return values, gradient

    return rows_of(anchor)
