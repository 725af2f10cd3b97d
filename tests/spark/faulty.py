"""What tests do to workers: layers that raise, processes to kill, a moment for it."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import psutil


class Raises(keras.layers.Layer):
    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            raise ValueError("a custom layer that raises")
        return x


_THREADS = 3
"""A worker that computes with TensorFlow has six or more, another one has one."""


def forked_workers() -> list[psutil.Process]:
    """Spark's Python workers below this process: those that a daemon has forked."""
    below = psutil.Process().children(recursive=True)
    daemons = {process.pid for process in below if _is_daemon(process)}
    return [process for process in below if {process.pid, _parent_of(process)} <= daemons]


def python_workers() -> list[psutil.Process]:
    """Those in which TensorFlow has computed.

    Their memory does not show it, as they share the daemon's, which has imported TensorFlow.
    """
    found = []
    for process in forked_workers():
        with contextlib.suppress(psutil.Error):
            if process.num_threads() > _THREADS:
                found.append(process)
    return found


def _is_daemon(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return not {"preloaded_workers", "pyspark.daemon"}.isdisjoint(process.cmdline())
    return False


def _parent_of(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.ppid())
    return 0


class AtEpoch(keras.callbacks.Callback):
    """Calls a function at the end of one epoch."""

    def __init__(self, epoch: int, action: Any) -> None:
        super().__init__()
        self.epoch, self.action, self.done = epoch, action, False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epoch and not self.done:
            self.done = True
            self.action()
