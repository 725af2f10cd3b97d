"""The task of ``fit`` as a rank of this kit runs it: its rows from arrays, its GPU by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from sparkdl.launch.devices import DeviceRequest, Resources
from sparkdl.launch.task import RankContext
from sparkdl.spark.executor.trainer import TrainTask
from sparkdl.spark.forms.wire import wire_names


@dataclass(frozen=True)
class GpuTask:
    """Trains the rows of a file, on the GPUs that a scheduler would have given.

    Args:
        inner: The task that ``SparkModel.fit`` sends to its workers.
        rows: Rank -> a ``.npz`` file with its rows, ``x`` and ``y``.
        gpus: What the scheduler gives to every rank.
        told: Folder for what each rank's framework has seen.
    """

    inner: TrainTask
    rows: tuple[str, ...]
    gpus: tuple[str, ...]
    told: str

    @property
    def devices(self) -> DeviceRequest:
        """Those of the task of ``fit``."""
        return self.inner.devices

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Trains, and writes down which devices the framework has."""
        placed = replace(rank, resources=Resources(self.gpus))
        yield from self.inner.run(placed, _batches(self.rows[rank.rank]))
        seen = {"devices": devices_seen(), "bytes": peak_bytes()}
        Path(self.told, f"{rank.rank}.json").write_text(json.dumps(seen))

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        """As the task of ``fit`` does."""
        yield from self.inner.failed(rank, error)


def _batches(path: str) -> Iterator[pa.RecordBatch]:
    with np.load(path) as arrays:
        x, y = arrays["x"], arrays["y"]
    flat = pa.FixedSizeListArray.from_arrays(x.reshape(-1), int(np.prod(x.shape[1:])))
    yield pa.RecordBatch.from_arrays([flat, pa.array(y)], names=wire_names(2))


def devices_seen() -> list[str]:
    """The devices of this process' framework, the CPU left out."""
    if "torch" in sys.modules:
        import torch

        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    import jax

    return [str(device) for device in jax.devices() if device.platform != "cpu"]


def peak_bytes() -> int:
    """The most memory of the GPU that this process' framework has held; 0 on a CPU."""
    if not devices_seen():
        return 0
    if "torch" in sys.modules:
        import torch

        return int(torch.cuda.max_memory_allocated())
    import jax

    return int(jax.devices()[0].memory_stats()["peak_bytes_in_use"])
