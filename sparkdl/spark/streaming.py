"""Training on a stream: each micro-batch of Structured Streaming is one fit, and counts once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import ConfigError, DataError
from sparkdl.files.checkpoints import Checkpoints
from sparkdl.spark.fit.trained_model import TrainedModel
from sparkdl.spark.forms.frames import FrameForm
from sparkdl.spark.forms.opening import form_of
from sparkdl.spark.runs.feeding import check_trigger
from sparkdl.spark.session.running import is_connect

History = dict[str, list[Any]]
OnBatch = Callable[[int, History], object]
Fit = Callable[[Any], History]
"""Trains the model on a frame and returns the history of its epochs."""


@dataclass
class BatchTrainer:
    """The function that Spark calls for each micro-batch, one after the other.

    Spark calls again with a micro-batch whose end it did not write down before it was stopped. So
    the number of micro-batches that the model has trained is saved in the same file as the weights,
    and what is in the weights already is left out.

    Args:
        batches_done: Micro-batches that are in the weights.
        on_batch: Is called after each micro-batch with its number and the history of its epochs.
    """

    trained: TrainedModel
    checkpoints: Checkpoints
    batches_done: int
    fit: Fit
    on_batch: OnBatch | None = None

    def __post_init__(self) -> None:
        self.history: History = {}
        self.error: BaseException | None = None
        self._first = True

    def __call__(self, frame: object, batch_id: int) -> None:
        try:
            self._train(frame, batch_id)
        except BaseException as error:
            self.error = error
            raise

    def _train(self, frame: Any, batch_id: int) -> None:
        if self._first:
            self._require_own(batch_id)
            self._first = False
        if batch_id < self.batches_done:
            return
        frame.persist()  # its rows are read several times
        try:
            history = {} if frame.isEmpty() else self.fit(frame)
        finally:
            frame.unpersist()
        self.trained.save(self.checkpoints, batch_id + 1)
        self.batches_done = batch_id + 1
        for name, values in history.items():
            self.history.setdefault(name, []).extend(values)
        if self.on_batch is not None:
            self.on_batch(batch_id, history)

    def _require_own(self, batch_id: int) -> None:
        """Refuses to go on with the place in the stream that belongs to other weights."""
        if batch_id not in (self.batches_done - 1, self.batches_done):
            raise ConfigError(
                f"the model and the place in the stream in {self.checkpoints.folder!r} do not "
                "belong together",
                expected=f"micro-batch {self.batches_done}: so many are in the weights",
                received=f"micro-batch {batch_id}",
                hint="checkpoint_dir holds both, in 'model' and 'stream': delete both to begin "
                "from the start, or bring both back",
            )


class StreamingFit:
    """A training that runs for as long as its stream; see :meth:`sparkdl.SparkModel.fit_stream`."""

    def __init__(self, query: Any, trainer: BatchTrainer) -> None:
        self._query, self._trainer = query, trainer
        self._lock = threading.Lock()

    @property
    def model(self) -> Any:
        """The Keras model, trained in place; consistent between two micro-batches."""
        return self._trainer.trained.model

    @property
    def history(self) -> History:
        """Metric name -> one value per epoch, over the micro-batches trained since the start."""
        return {name: list(values) for name, values in self._trainer.history.items()}

    @property
    def batches_done(self) -> int:
        """Micro-batches that are in the weights, also those trained before a restart."""
        return self._trainer.batches_done

    @property
    def is_active(self) -> bool:
        """Whether the stream still runs."""
        return bool(self._query.isActive)

    def stop(self) -> None:
        """Ends the stream; a micro-batch that is being trained is trained to its end first."""
        with self._lock:
            self._query.stop()

    def await_termination(self, timeout_s: float | None = None) -> bool:
        """Waits for the end of the stream.

        Args:
            timeout_s: The longest wait; None without a limit.

        Returns:
            Whether it has ended.

        Raises:
            Exception: What ended it, if it was not :meth:`stop` or the end of the data.
        """
        try:
            ended = self._query.awaitTermination(timeout_s)
        except Exception:
            if self._trainer.error is not None:
                raise self._trainer.error from None
            raise
        return timeout_s is None or bool(ended)


def start_stream_fit(
    stream: Any,
    trained: TrainedModel,
    fit: Fit,
    *,
    checkpoint_dir: str,
    trigger: Mapping[str, Any] | None,
    on_batch: OnBatch | None,
    restored: Callable[[int], None],
) -> StreamingFit:
    """Starts the query.

    Args:
        checkpoint_dir: Folder for the model and for Spark's place in the stream.
        restored: Is told the number of micro-batches that the restored model has trained.

    Raises:
        ConfigError: ``checkpoint_dir`` belongs to another model.
        ResourceError: It cannot be written.
    """
    folder = str(checkpoint_dir).rstrip("/")
    checkpoints = Checkpoints.at(f"{folder}/model")
    assert checkpoints is not None  # a folder was given
    optimizer = trained.model.optimizer
    if not optimizer.built:  # else the first file would lack its state
        optimizer.build(trained.model.trainable_variables)
    if not checkpoints.exist:
        trained.save(checkpoints, 0)
    batches_done = trained.restore(checkpoints)
    restored(batches_done)
    trainer = BatchTrainer(trained, checkpoints, batches_done, fit, on_batch)
    writer = stream.writeStream.foreachBatch(trainer)
    writer = writer.option("checkpointLocation", f"{folder}/stream")
    if trigger is not None:
        writer = writer.trigger(**trigger)
    return StreamingFit(writer.start(), trainer)


def check_stream(stream: Any, trigger: Any) -> None:
    """Refuses what cannot be trained on by micro-batches.

    Raises:
        DataError: No streaming DataFrame.
        ConfigError: A Spark Connect session, or a trigger that is none.
    """
    form = form_of(stream)
    if not form.endless:
        raise DataError(
            "fit_stream trains on a stream of rows",
            expected="a streaming DataFrame (spark.readStream)",
            received="a DataFrame whose rows end"
            if type(form) is FrameForm
            else type(stream).__name__,
            hint="fit(...) trains on rows that end; spark.readStream...parquet(path) is a stream",
        )
    if is_connect(stream.sparkSession):
        raise ConfigError(
            "fit_stream cannot train over Spark Connect",
            expected="a session on the driver, where the model is",
            received="a Spark Connect client: Spark would run the training on its server",
            hint="fit on frames of the rows that have come, or run this on the driver",
        )
    if trigger is not None:
        check_trigger(trigger)
