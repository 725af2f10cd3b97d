"""What all predicting tasks have in common: a model that runs forward on an executor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyarrow as pa

from sparkdl.config import UseGpu
from sparkdl.data import DataSpec
from sparkdl.launch.devices import DeviceRequest, Resources, start_framework
from sparkdl.launch.task import RankContext
from sparkdl.learner.predictor_archive import PredictorArchive
from sparkdl.protocols import Predictor


class ForwardTask:
    """What the tasks share that run a model forward: its devices, and what becomes of failures."""

    archive: PredictorArchive
    use_gpu: UseGpu

    @property
    def devices(self) -> DeviceRequest:
        """The model's backend, on the GPUs that Spark gives."""
        return DeviceRequest(self.archive.archive.backend, self.use_gpu)

    def failed(self, rank: RankContext, error: Exception | SystemExit) -> Iterator[pa.RecordBatch]:
        """Raises it: Spark tries again, and at last shows it to whoever asks for the rows."""
        raise error


@dataclass(frozen=True)
class PredictorTask(ForwardTask):
    """A model, and how its rows are read.

    Args:
        archive: The model.
        spec: The columns to read.
        batch_size: Rows per forward pass.
        use_gpu: See :class:`sparkdl.SparkModel`.
    """

    archive: PredictorArchive
    spec: DataSpec
    batch_size: int
    use_gpu: UseGpu

    def predictor(self, resources: Resources) -> AbstractContextManager[Predictor]:
        """The model in this process, on the devices that Spark gave."""
        start_framework(self.devices.place(resources))
        from sparkdl.learner.cache import cached_predictor

        return cached_predictor(self.archive)
