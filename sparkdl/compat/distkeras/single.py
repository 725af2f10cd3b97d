"""dist-keras' trainers of one model per worker, and what all of its trainers share."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

import sparkdl
from sparkdl import payload
from sparkdl.call_arguments import lists_its_arguments
from sparkdl.compat.distkeras.utils import serialize_keras_model
from sparkdl.compat.distkeras.utils import shuffle as shuffled
from sparkdl.errors import ConfigError
from sparkdl.learner.archive import decode_model, making_models
from sparkdl.learner.compiling import compile_model
from sparkdl.learner.signature import model_signature
from sparkdl.spark.ml.parts import archive_of


class Trainer:
    """What all trainers have. ``train`` never changes the model that it was given.

    Args:
        keras_model: A built Keras model; compiled or not.
        loss: Name of a loss, or a loss.
        worker_optimizer: Name of an optimizer, or an optimizer.
        metrics: Names of metrics, or metrics; None for accuracy.
        loss_weights: Of a model with several outputs.
    """

    features_column: Any
    label_column: Any
    num_epoch: int
    batch_size: int
    num_workers = 1
    communication_window = 1
    """Batches between two exchanges with the server; 1 without a server."""

    @lists_its_arguments
    def __init__(
        self, keras_model: Any, loss: Any, worker_optimizer: Any, metrics: Any = None,
        loss_weights: Any = None,
    ) -> None:  # fmt: skip
        self.loss, self.worker_optimizer, self.loss_weights = loss, worker_optimizer, loss_weights
        self.metrics = ["accuracy"] if metrics is None else metrics
        self.history: list[dict[str, Any]] = []
        self.training_time = 0.0
        self.max_mini_batches_prefetch = 100
        self._updates = 0
        self.set_model(keras_model)

    @property
    def master_model(self) -> dict[str, Any]:
        """The model, as :func:`serialize_keras_model` returns it."""
        return serialize_keras_model(decode_model(self._archive))

    def set_model(self, model: Any) -> None:
        """Sets the model to train, as it is now."""
        self._archive = archive_of(model)

    def set_max_prefetch(self, max_mini_batches: int) -> None:
        """Keeps the number; without effect, as workers read ahead by themselves."""
        self.max_mini_batches_prefetch = max_mini_batches

    def get_training_time(self) -> float:
        """Seconds of the last ``train``."""
        return self.training_time

    def get_history(self) -> list[dict[str, Any]]:
        """An entry per epoch: ``{'iteration': epoch, 'history': [loss, metrics, ...]}``."""
        return self.history

    def get_averaged_history(self) -> list[Any]:
        """``[loss, metrics, ...]`` of each epoch over the rows of all workers, as arrays."""
        return [np.asarray(entry["history"]) for entry in self.history]

    def get_executor_history(self, executor_id: int) -> list[dict[str, Any]]:
        """The history of a trainer with one worker.

        Raises:
            ConfigError: There are several, whose metrics are one value per epoch.
        """
        if self.num_workers > 1:
            raise ConfigError(
                "the history has no values of single workers",
                expected="get_averaged_history()",
                received=f"get_executor_history({executor_id!r}) of {self.num_workers} workers",
                hint="each value is over the rows of all workers in an epoch",
            )
        return self.history

    def serialize(self) -> bytes:
        """The trainer as bytes."""
        return payload.dump(self)

    def train(self, dataframe: Any, shuffle: bool = False) -> Any:
        """Trains a copy of the model.

        Args:
            dataframe: A DataFrame with the columns of features and labels.
            shuffle: Shuffle all rows over the cluster before. Workers shuffle their own rows in
                every epoch anyway.

        Returns:
            A new, trained Keras model.

        Raises:
            SparkDLError: See :meth:`sparkdl.SparkModel.fit`.
        """
        spark_model = self._fit(shuffled(dataframe) if shuffle else dataframe)
        self.set_model(spark_model.model)
        return spark_model.model

    def _settings(self) -> dict[str, Any]:
        """Arguments of SparkModel: the mode, the rule, the window, the workers."""
        raise NotImplementedError

    def _fit(self, dataframe: Any) -> sparkdl.SparkModel:
        with making_models:
            model = decode_model(self._archive)
        optimizer = own_optimizer(self.worker_optimizer)
        compile_model(model, optimizer, self.loss, self.metrics, self.loss_weights)
        features, label = self.features_column, self.label_column
        signature = model_signature(model)
        if isinstance(features, (list, tuple)) and len(signature.inputs) > 1:
            features = dict(zip(signature.inputs, features, strict=True))
        if isinstance(label, (list, tuple)) and len(signature.outputs) > 1:
            label = dict(zip(signature.outputs, label, strict=True))
        settings = self._settings()
        began = time.monotonic()
        spark_model = sparkdl.SparkModel(model, batch_size=self.batch_size, **settings)
        history = spark_model.fit(
            dataframe, epochs=self.num_epoch, verbose=0, features=features, label=label
        )
        self.training_time = time.monotonic() - began
        names = ["loss", *(name for name in history.history if name != "loss")]
        values = zip(*(history.history[name] for name in names), strict=True)
        self.history = [{"iteration": epoch, "history": list(row)}
                        for epoch, row in enumerate(values)]  # fmt: skip
        self._updates = self._count_updates(spark_model)
        return spark_model

    def _count_updates(self, spark_model: sparkdl.SparkModel) -> int:
        summary, window = spark_model.summary, self.communication_window
        if summary is None:
            return 0
        steps = [math.ceil(rows / self.batch_size) for rows in summary.rank_rows.values()]
        return self.num_epoch * sum(math.ceil(count / window) for count in steps)


class SingleTrainer(Trainer):
    """One worker trains on all rows, as plain Keras does.

    Args:
        keras_model: See :class:`Trainer`.
        worker_optimizer: See :class:`Trainer`.
        loss: See :class:`Trainer`.
        metrics: See :class:`Trainer`.
        features_col: Column of the features; a list: several columns, or one for each input.
        label_col: Column of the labels.
        num_epoch: Passes over the rows.
        batch_size: Rows per step.
        loss_weights: See :class:`Trainer`.
    """

    @lists_its_arguments
    def __init__(
        self, keras_model: Any, worker_optimizer: Any, loss: Any, metrics: Any = None,
        features_col: Any = "features", label_col: Any = "label", num_epoch: int = 1,
        batch_size: int = 32, loss_weights: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, loss, worker_optimizer, metrics, loss_weights)
        self.features_column, self.label_column = features_col, label_col
        self.num_epoch, self.batch_size = num_epoch, batch_size

    def _settings(self) -> dict[str, Any]:
        return {"mode": "allreduce", "num_workers": 1}


class AveragingTrainer(SingleTrainer):
    """Workers train an epoch apart; then the model is the mean of theirs.

    Args:
        num_workers: Workers; the others as of :class:`SingleTrainer`.
    """

    @lists_its_arguments
    def __init__(
        self, keras_model: Any, worker_optimizer: Any, loss: Any, metrics: Any = None,
        features_col: Any = "features", label_col: Any = "label", num_epoch: int = 1,
        batch_size: int = 32, num_workers: int = 2, loss_weights: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, worker_optimizer, loss, metrics, features_col, label_col,
                         num_epoch, batch_size, loss_weights)  # fmt: skip
        self.num_workers = num_workers

    def _settings(self) -> dict[str, Any]:
        return {"mode": "synchronous", "rule": "averaging", "num_workers": self.num_workers}


class EnsembleTrainer(SingleTrainer):
    """Each worker trains a model of its own on its part of the rows.

    Args:
        num_ensembles: Models; the others as of :class:`SingleTrainer`.
        num_epoch: Passes over the rows.
    """

    @lists_its_arguments
    def __init__(
        self, keras_model: Any, worker_optimizer: Any, loss: Any, metrics: Any = None,
        features_col: Any = "features", label_col: Any = "label", batch_size: int = 32,
        num_ensembles: int = 2, loss_weights: Any = None, num_epoch: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, worker_optimizer, loss, metrics, features_col, label_col,
                         num_epoch, batch_size, loss_weights)  # fmt: skip
        self.num_ensembles = self.num_workers = num_ensembles

    def _settings(self) -> dict[str, Any]:
        return {"mode": "asynchronous", "rule": "ensemble", "num_workers": self.num_ensembles}

    def train(self, dataframe: Any, shuffle: bool = False) -> list[dict[str, Any]]:
        """Trains the models; see :meth:`Trainer.train`.

        Returns:
            The models as :func:`serialize_keras_model` returns them, as dist-keras does.
        """
        spark_model = self._fit(shuffled(dataframe) if shuffle else dataframe)
        return [serialize_keras_model(model) for model in spark_model.ensemble]


def own_optimizer(optimizer: Any) -> Any:
    """An optimizer for one fit: a Keras optimizer belongs to the model that it first trained."""
    if hasattr(optimizer, "get_config"):
        return type(optimizer).from_config(optimizer.get_config())
    return optimizer
