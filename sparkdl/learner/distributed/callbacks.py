"""Keras callbacks for training functions that run on several ranks."""

from __future__ import annotations

import json
import time
from typing import Any

import keras
import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.current import current
from sparkdl.errors import ConfigError, ModelError
from sparkdl.learner.distributed.optimizer import is_distributed
from sparkdl.learner.state.synchronized_norms import require_synchronized
from sparkdl.process.log_lines import log_to_driver


class BroadcastCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """When training begins, all ranks take the root's weights and optimizer state.

    Weights, BatchNorm statistics, momenta, iterations and learning rate are sent; the states of
    random generators are not, so that each rank draws its own dropout. A model that is not built
    yet is broadcast after its first batch; the steps that the other ranks made by then are lost.

    Args:
        root: The rank whose state all others take.
        communicator: None: that of the run.
    """

    def __init__(self, root: int = 0, communicator: Communicator | None = None) -> None:
        super().__init__()
        self._communicator = current() if communicator is None else communicator
        if not 0 <= root < self._communicator.size:
            raise ConfigError(
                "cannot broadcast from this rank",
                expected=f"a root from 0 to {self._communicator.size - 1}",
                received=f"root={root!r}",
            )
        self._root, self._done = root, False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts, if the model is built."""
        self._done = False
        _refuse_xla(self.model)
        size = self._communicator.size
        require_synchronized(self.model, size, "model.fit on each rank", followed=False)
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts once, if the model was not built when training began."""
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        variables = list(self.model.weights)
        if optimizer is not None:
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            variables += list(optimizer.variables)
        for variable in variables:
            value = keras.ops.convert_to_numpy(variable.value)
            if value.dtype.kind in "fiub" or value.dtype.name == "bfloat16":
                variable.assign(_broadcast(self._communicator, value, self._root))
        self._done = True


def _refuse_xla(model: keras.Model) -> None:
    compiled = keras.backend.backend() == "tensorflow" and model.jit_compile
    if compiled and is_distributed(model.optimizer):
        raise ModelError(
            "a step compiled by XLA cannot join its gradients with other ranks",
            expected="model.compile(..., jit_compile=False)",
            received=f"jit_compile={model.jit_compile!r}", hint="'auto' means True on GPUs",
        )  # fmt: skip


def _broadcast(communicator: Communicator, value: Any, root: int) -> Any:
    raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return communicator.broadcast(raw, root).view(value.dtype).reshape(value.shape)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """At the end of an epoch every log becomes its mean over the ranks, for later callbacks too.

    Place it before callbacks that decide by the logs (EarlyStopping, ReduceLROnPlateau,
    ModelCheckpoint), so that all ranks decide alike. A log that only some ranks have (validation
    on rank 0) is the mean over those. Ranks weigh the same, however many rows each has; a mean of
    ratios such as AUC is the mean of the ranks' values, not the value over all rows.

    Args:
        communicator: None: that of the run.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        super().__init__()
        self._communicator = current() if communicator is None else communicator

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Changes ``logs`` in place."""
        mine = {k: float(v) for k, v in (logs or {}).items() if np.ndim(v) == 0}
        text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
        every = [json.loads(t.tobytes()) for t in self._communicator.all_gather(text)]
        if logs is None:
            return
        for name in dict.fromkeys(key for logged in every for key in logged):
            values = [logged[name] for logged in every if name in logged]
            logs[name] = float(np.mean(values))


class LogCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Rank 0 sends the driver a line with the logs of each epoch.

    Args:
        per_batch_log: Send a line for each batch, too (the name is Databricks').
        communicator: None: that of the run.
    """

    def __init__(
        self, per_batch_log: bool = False, communicator: Communicator | None = None
    ) -> None:
        super().__init__()
        self._per_batch = per_batch_log
        self._sends = (current() if communicator is None else communicator).rank == 0
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock."""
        self._began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sends the logs of the batch, if wanted."""
        if self._per_batch and self._sends:
            log_to_driver(f"batch {batch}: {_words(logs)}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sends the logs of the epoch."""
        if self._sends:
            seconds = time.monotonic() - self._began
            log_to_driver(f"epoch {epoch + 1}: {_words(logs)} ({seconds:.1f} s)")


def _words(logs: dict[str, Any] | None) -> str:
    return ", ".join(f"{k} {float(v):.4f}" for k, v in (logs or {}).items())
