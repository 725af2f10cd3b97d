"""GPUs of a node's machine, and functions that differed between versions of TensorFlow."""

from __future__ import annotations

import tempfile
from typing import Any

from sparkdl.errors import ResourceError
from sparkdl.launch.devices import busy_gpus, machine_gpus, visible_gpus

MAX_RETRIES = 3
"""As TensorFlowOnSpark has it; nothing is tried again here."""
AS_STRING = "string"
AS_LIST = "list"


def is_gpu_available() -> bool:
    """Whether this process sees a GPU."""
    return bool(visible_gpus())


def get_gpus(num_gpu: int = 1, worker_index: int = -1, format: str = AS_STRING) -> str | list[str]:
    """GPUs for this process: those that Spark gave to the task, else free ones of the machine.

    Free are those on which no process computes. Where Spark schedules no GPUs, two tasks that ask
    at the same time may be told the same ones, unless each names its number.

    Args:
        num_gpu: How many.
        worker_index: The number of this process among those of the machine, which then take
            different ones; negative: the first ones.
        format: ``AS_STRING`` for ``'0,1'``, as ``CUDA_VISIBLE_DEVICES`` has it; ``AS_LIST``.

    Raises:
        ResourceError: There are fewer.
    """
    seen, working = visible_gpus(), busy_gpus()
    numbers = {str(number) for number, uuid in enumerate(machine_gpus()) if uuid in working}
    free = [gpu for gpu in seen if gpu not in working and gpu not in numbers]
    if len(free) < num_gpu:
        raise ResourceError(
            "this node cannot have the GPUs it asks for", expected=f"{num_gpu} free GPUs",
            received=f"{len(free)} free of {len(seen)} that this process sees",
            hint="spark.task.resource.gpu.amount makes Spark deal them to its tasks",
        )  # fmt: skip
    start = worker_index * num_gpu % len(free) if worker_index > 0 and num_gpu else 0
    mine = (free[start:] + free[:start])[:num_gpu]
    return mine if format == AS_LIST else ",".join(mine)


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
