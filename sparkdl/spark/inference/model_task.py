"""What predict's and evaluate's tasks have in common: a model that runs forward on an executor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from sparkdl.config import UseGpu
from sparkdl.data import DataSpec
from sparkdl.launch.devices import DeviceRequest, start_framework
from sparkdl.launch.task import RankContext
from sparkdl.learner.archive import ModelArchive
from sparkdl.protocols import Learner


@dataclass(frozen=True)
class ModelTask:
    """A model, and how its rows are read.

    Args:
        archive: The model.
        spec: The columns to read.
        batch_size: Rows per forward pass.
        use_gpu: See :class:`sparkdl.SparkModel`.
    """

    archive: ModelArchive
    spec: DataSpec
    batch_size: int
    use_gpu: UseGpu

    @property
    def devices(self) -> DeviceRequest:
        """The model's backend, on the GPUs that Spark gives."""
        return DeviceRequest(self.archive.backend, self.use_gpu)

    def learner(self, rank: RankContext) -> Learner:
        """The model in this process, on the rank's devices."""
        start_framework(self.devices.place(rank.resources))
        from sparkdl.learner.cache import cached_learner

        learner: Learner = cached_learner(self.archive)
        return learner

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        """Raises it: Spark tries again, and at last shows it to whoever asks for the rows."""
        raise error
