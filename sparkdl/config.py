"""Frozen settings objects, validated when built, picklable: what the driver decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import ConfigError, UnknownNameError

MODES = ("asynchronous", "hogwild", "synchronous", "allreduce")
SERVER_MODES = ("asynchronous", "hogwild", "synchronous")
TRANSPORTS = ("auto", "shm", "socket", "http")
FREQUENCIES = ("auto", "batch", "epoch")
EPOCH_WINDOW = 0
"""A window of 0 batches stands for a whole epoch."""
AUTO_WINDOW = -1
"""A number that suits the workers and their rows; see ``sparkdl.worker.auto_window``."""


@dataclass(frozen=True)
class LoopSettings:
    """What a worker's loop needs to know beside its data, model and synchronizer.

    Args:
        epochs: Epoch number to stop at (exclusive).
        first_epoch: Epoch number to begin with.
        batch_size: Rows per step and worker.
        window: Batches between two exchanges; ``EPOCH_WINDOW`` for one exchange per epoch,
            ``AUTO_WINDOW`` for a number that suits the worker's rows.
        shuffle: New row order each epoch.
        seed: Seed of the row order.
        report_interval_s: Least time between two live reports of the metrics.
        wait_for_driver: At the end of an epoch wait until the driver's callbacks have run.
        keep_state: At the end of an epoch leave the state for the driver's checkpoints.
        follow_schedule: Tell learning-rate schedules the steps of all workers together.
        check_data: Refuse NaN and infinity before training.
        memory_budget_bytes: A partition beyond this is spilled to disk.
        spill_dir: Where; None is the executor's temporary directory.
    """

    epochs: int
    first_epoch: int = 0
    batch_size: int = 32
    window: int = 8
    shuffle: bool = True
    seed: int = 0
    report_interval_s: float = 0.2
    wait_for_driver: bool = False
    keep_state: bool = False
    follow_schedule: bool = True
    check_data: bool = False
    memory_budget_bytes: int = 2 << 30
    spill_dir: str | None = None

    def __post_init__(self) -> None:
        require_int("epochs", self.epochs, 0)
        require_int("batch_size", self.batch_size, 1)
        require_int("window", self.window, AUTO_WINDOW)
        require_int("memory_budget_bytes", self.memory_budget_bytes, 1)


def require_int(name: str, value: Any, least: int) -> int:
    """Returns ``value`` if it is a whole number of at least ``least``; raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"{name} is wrong", expected=f"a whole number >= {least}", received=repr(value)
        )
    return value


def require_name(kind: str, value: Any, known: Iterable[str]) -> str:
    """Returns ``value`` if it is one of ``known``; raises UnknownNameError."""
    names = list(known)
    if value not in names:
        raise UnknownNameError(kind, value, names)
    return str(value)


def parse_frequency(frequency: Any) -> str | int:
    """``'auto'``, ``'batch'``, ``'epoch'`` or a number of batches >= 1."""
    if isinstance(frequency, int) and not isinstance(frequency, bool):
        return require_int("frequency", frequency, 1)
    if frequency not in FREQUENCIES:
        raise UnknownNameError("frequency", frequency, [*FREQUENCIES, "a number of batches"])
    return str(frequency)
