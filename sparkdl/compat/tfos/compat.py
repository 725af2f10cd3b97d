"""Functions that differed between versions of TensorFlow."""

from __future__ import annotations

import tempfile
from typing import Any

from sparkdl.compat.tfos.gpu_info import is_gpu_available

__all__ = ["disable_auto_shard", "export_saved_model", "is_gpu_available"]


def export_saved_model(model: Any, export_dir: str, is_chief: bool = False) -> None:
    """Exports a Keras model for serving; all nodes of a strategy must take part.

    Args:
        model: The model.
        export_dir: The folder that the chief writes; the others write one that is deleted again.
        is_chief: Whether this node is the chief.
    """
    if is_chief:
        model.export(export_dir)
        return
    with tempfile.TemporaryDirectory() as folder:
        model.export(folder)


def disable_auto_shard(options: Any) -> None:
    """Says in ``tf.data.Options`` that each node's data set is its own share already."""
    import tensorflow as tf

    off = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = off
