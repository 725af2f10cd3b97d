"""``FitTrainer``: trains the segments of a search by ``SparkModel.fit``."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from sparkdl.files.checkpoints import Checkpoints
from sparkdl.learner.callback_sink import at_least_one
from sparkdl.progress.events import EpochEnded, Event
from sparkdl.spark.driver import jobs
from sparkdl.spark.driver.trained_model import TrainedModel
from sparkdl.spark.shared_data import SharedData
from sparkdl.spark.spark_model import SparkModel
from sparkdl.spark.trial_recipes import Recipe, TrialFit
from sparkdl.tracking.sinks import without_standing
from sparkdl.tune.journal import TrialRecord
from sparkdl.tune.runner import OnEpoch, SegmentTraining
from sparkdl.tune.segment import Segment
from sparkdl.tune.suggestions import Trial
from sparkdl.user_warnings import warn_user

if TYPE_CHECKING:
    import keras


class FitTrainer:
    """Trains segments by ``SparkModel.fit`` from checkpoint to checkpoint."""

    def __init__(
        self, spark: Any, recipe: Recipe, data: Any, folder: str, slots: int, seed: int,
        best_epochs: bool,
    ) -> None:  # fmt: skip
        self._recipe, self._data, self._folder = recipe, SharedData(data), folder
        self._slots, self._seed, self._best_epochs = slots, seed, best_epochs
        self.spark = spark
        self._tag = f"sparkdl-tune-{uuid.uuid4().hex[:12]}"

    def prepare(self, trial: Trial, segment: Segment, on_epoch: OnEpoch) -> SegmentTraining:
        """Builds the model; see :class:`sparkdl.tune.runner.TrialTrainer`."""
        made = self._recipe.make(trial)
        self._set_out(made, segment)
        arguments = {**made.arguments}
        if self._best_epochs:  # each epoch's end needs a checkpoint of its own
            arguments["callbacks"] = at_least_one(arguments.get("callbacks"))
        settings = {"num_workers": self._slots, "seed": self._seed, **made.settings}
        spark_model = SparkModel(made.model, **settings)
        alone = settings["num_workers"] == 1 and spark_model.repartition
        data = self._data if alone else self._data.plain

        def hear(event: Event) -> None:
            if isinstance(event, EpochEnded):
                on_epoch(event.epoch, event.metrics)

        def train() -> dict[str, float]:
            jobs.tag_jobs(self.spark, self._tag)
            with without_standing():
                history = spark_model.fit(
                    data, epochs=segment.end, verbose=0, resume=True, sinks=[hear],
                    checkpoint_dir=self._of(segment.trial), **arguments,
                )  # fmt: skip
            return {name: float(values[-1]) for name, values in history.history.items() if values}

        return train

    def cancel(self) -> None:
        """Ends the jobs of all trials."""
        jobs.cancel_tagged(self.spark, self._tag)

    def close(self) -> None:
        """Frees the rows that the trials shared."""
        self._data.close()

    def delete(self, trial: int) -> None:
        """Deletes a trial's checkpoints."""
        Checkpoints(self._of(trial)).clear()

    def keep(self, trial: int, epochs: Collection[int]) -> None:
        """Keeps a trial's checkpoints after these epochs beside its newest."""
        Checkpoints(self._of(trial)).keep(epochs)

    def load(self, record: TrialRecord) -> keras.Model:
        """The model that a trial stands for."""
        trial = Trial(record.number, self._seed, record.params)
        trained = TrainedModel(self._recipe.make(trial).model)
        checkpoints = Checkpoints(self._of(record.number))
        checkpoint = checkpoints.after(record.model_epoch)
        if checkpoint is not None:
            trained.load(checkpoint, checkpoints.folder)
            return trained.model
        found = trained.restore(checkpoints)
        warn_user(
            f"the checkpoint of trial {record.number} after {record.model_epoch} epochs is not "
            f"there or not whole; its model is that after {found} epochs"
        )
        return trained.model

    def _of(self, number: int) -> str:
        return f"{self._folder.rstrip('/')}/trial-{number:05d}"

    def _set_out(self, made: TrialFit, segment: Segment) -> None:
        """Leaves the checkpoint in the trial's folder that the segment goes on from."""
        own = Checkpoints(self._of(segment.trial))
        # Its metrics were lost with the driver, or those of its epochs: it is trained again.
        lost = own.newest() >= segment.end or (self._best_epochs and own.newest() > segment.begin)
        if lost and not own.rewind(segment.begin):
            own.clear()
        if segment.parent is None or own.restore() is not None:
            return
        parent = Checkpoints(self._of(segment.parent))
        checkpoint = parent.after(segment.begin) or parent.restore()
        if checkpoint is not None:
            copy = TrainedModel(made.model)
            copy.load(checkpoint, parent.folder, keep_rate=True)
            copy.save(own, segment.begin)
