"""What tests do to workers: layers that raise, processes to kill, a moment for it."""

from __future__ import annotations

from typing import Any

import keras
import psutil


class Raises(keras.layers.Layer):
    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            raise ValueError("a custom layer that raises")
        return x


def python_workers() -> list[psutil.Process]:
    """The Python worker processes of this session's executors that have a model loaded."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            daemon = "pyspark.daemon" in " ".join(process.cmdline())
            if daemon and process.memory_info().rss > 250 << 20:
                found.append(process)
        except psutil.Error:
            continue
    return found


class AtEpoch(keras.callbacks.Callback):
    """Calls a function at the end of one epoch."""

    def __init__(self, epoch: int, action: Any) -> None:
        super().__init__()
        self.epoch, self.action, self.done = epoch, action, False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epoch and not self.done:
            self.done = True
            self.action()
