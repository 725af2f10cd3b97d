"""Spark's daemon of Python workers, with Keras imported before it forks the first of them.

Each new worker would import TensorFlow for three seconds; a forked one has it. It is started as
``python -m preloaded_workers`` by ``spark.python.daemon.module``; its folder is in the executors'
``PYTHONPATH``. TensorFlow starts its threads with the first operation, so a worker has its own.
"""

from __future__ import annotations

import gc
import os

from pyspark.daemon import manager


def preload() -> None:
    """Imports what Spark's workers and those of a fit import, on the CPU, without a trace of it."""
    before = dict(os.environ)
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    gc.disable()
    import keras  # noqa: F401
    import numpy as np
    import pandas  # noqa: F401
    import pyarrow  # noqa: F401
    import pyspark.worker  # noqa: F401

    import sparkdl.spark.executor.trainer  # noqa: F401

    os.register_at_fork(after_in_child=np.random.seed)  # as Python's own generator
    gc.enable()
    gc.freeze()  # workers share these pages with the daemon
    os.environ.clear()
    os.environ.update(before)


if __name__ == "__main__":
    preload()
    manager()
