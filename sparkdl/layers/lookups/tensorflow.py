"""Rows for TensorFlow: functions of Python inside the graph, in the order of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from sparkdl.failures import carried

if TYPE_CHECKING:
    from sparkdl.layers.lookups import HostClasses, HostRows
    from sparkdl.weights import FloatArray


def lookup(rows: HostRows, ids: Any, anchor: Any, width: int) -> Any:
    """See :func:`sparkdl.layers.lookups.lookup`."""
    ids = tf.convert_to_tensor(ids)

    def push(ids: Any, gradients: Any) -> Any:
        rows.push(ids, gradients)
        return np.float32(0)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def rows_of(anchor: Any) -> Any:
        values = tf.numpy_function(carried(rows.pull), [ids], tf.float32)
        values.set_shape([*ids.shape, width])

        def gradient(upstream: Any) -> Any:
            done = tf.numpy_function(carried(push), [ids, upstream], tf.float32)
            done.set_shape([])
            return done

        return values, gradient

    return rows_of(anchor)


def losses(classes: HostClasses, features: Any, labels: Any, anchor: Any) -> Any:
    """See :func:`sparkdl.layers.lookups.losses`."""
    labels = tf.convert_to_tensor(labels)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def losses_of(features: Any, anchor: Any) -> Any:
        found = tf.numpy_function(carried(classes.measure), [features, labels], tf.float32)
        found.set_shape(features.shape[:1])

        def gradient(upstream: Any) -> Any:
            onward = tf.numpy_function(carried(classes.learn), [upstream], tf.float32)
            onward.set_shape(features.shape)
            with tf.control_dependencies([onward]):
                return onward, tf.zeros([])

        return found, gradient

    return losses_of(features, anchor)


def after(function: Callable[[], FloatArray], like: Any) -> Any:
    """See :func:`sparkdl.layers.lookups.after`."""
    found = tf.numpy_function(function, [], tf.float32)
    found.set_shape(like.shape[:1])
    return found
