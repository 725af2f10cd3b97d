"""dist-keras' trainers under dist-keras' module name."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import sparkdl
from sparkdl.compat.distkeras.utils import deserialize_keras_model, serialize_keras_model
from sparkdl.compat.distkeras.utils import shuffle as shuffled
from sparkdl.errors import ConfigError
from sparkdl.images.deep_image import as_vector
from sparkdl.learner.archives.archive import decode_model, making_models
from sparkdl.learner.checks.compiling import compile_model
from sparkdl.learner.signature import model_signature
from sparkdl.process import payload
from sparkdl.rules import AEASGD as AEASGDRule
from sparkdl.rules import EAMSGD as EAMSGDRule
from sparkdl.rules import Experimental as ExperimentalRule
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.spark.ml.training import archive_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def _getter(attribute: str, doc: str) -> Callable[[Any], Any]:
    def get(self: object) -> Any:
        return getattr(self, attribute)

    get.__doc__ = doc
    return get


def _setter(attribute: str, doc: str) -> Callable[[Any, Any], None]:
    def set_to(self: object, value: object) -> None:
        setattr(self, attribute, value)

    set_to.__doc__ = doc
    return set_to


class Trainer:
    """The base of all trainers. ``train`` never changes the model that it was given.

    Args:
        keras_model: A built Keras model; compiled or not.
        loss: Name of a loss, or a loss.
        worker_optimizer: Name of an optimizer, or an optimizer.
        metrics: Names of metrics, or metrics; None for accuracy.
        loss_weights: object weights of a model with several outputs.
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
        self, keras_model: object, loss: object, worker_optimizer: object, metrics: object = None,
        loss_weights: object = None,
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
        return serialize_keras_model(decode_model(self._archive, own_code=True))

    def set_model(self, model: object) -> None:
        self._archive = archive_of(model)

    def set_max_prefetch(self, max_mini_batches: int) -> None:
        """Keeps the number; without effect, as workers read ahead by themselves."""
        self.max_mini_batches_prefetch = max_mini_batches

    get_training_time = _getter("training_time", "Seconds of the last ``train``.")
    get_history = _getter(
        "history", "An entry per epoch: ``{'iteration': epoch, 'history': [loss, metrics, ...]}``."
    )

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
                "the history has no values of single workers", expected="get_averaged_history()",
                received=f"get_executor_history({executor_id!r}) of {self.num_workers} workers",
                hint="each value is over the rows of all workers in an epoch",
            )  # fmt: skip
        return self.history

    def serialize(self) -> bytes:
        """The trainer as bytes."""
        return payload.dump(self)

    def train(self, dataframe: object, shuffle: bool = False) -> Any:
        """Trains a copy of the model.

        Args:
            dataframe: A DataFrame with the columns of features and labels.
            shuffle: Shuffle all rows over the cluster before; workers shuffle theirs every epoch.

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

    def _fit(self, dataframe: object) -> sparkdl.SparkModel:
        with making_models:
            model = decode_model(self._archive, own_code=True)
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
        self.history = [{"iteration": n, "history": list(row)} for n, row in enumerate(values)]
        rank_rows = {} if spark_model.summary is None else spark_model.summary.rank_rows
        steps = [math.ceil(rows / self.batch_size) for rows in rank_rows.values()]
        windows = sum(math.ceil(count / self.communication_window) for count in steps)
        self._updates = self.num_epoch * windows
        return spark_model


class SingleTrainer(Trainer):
    """One worker trains on all rows, as plain Keras does.

    Args:
        keras_model, worker_optimizer, loss, metrics, loss_weights: As of :class:`Trainer`.
        features_col: Column of the features; a list: several columns, or one for each input.
        label_col: Column of the labels.
        num_epoch: Passes over the rows.
        batch_size: Rows per step.
    """

    @lists_its_arguments
    def __init__(
        self, keras_model: object, worker_optimizer: object, loss: object, metrics: object = None,
        features_col: object = "features", label_col: object = "label", num_epoch: int = 1,
        batch_size: int = 32, loss_weights: object = None,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, loss, worker_optimizer, metrics, loss_weights)
        self.features_column, self.label_column = features_col, label_col
        self.num_epoch, self.batch_size = num_epoch, batch_size

    def _settings(self) -> dict[str, Any]:
        return {"mode": "allreduce", "num_workers": 1}


class AveragingTrainer(SingleTrainer):
    """Workers train an epoch apart; then the model is the mean of theirs."""

    @lists_its_arguments
    def __init__(
        self, keras_model: object, worker_optimizer: object, loss: object, metrics: object = None,
        features_col: object = "features", label_col: object = "label", num_epoch: int = 1,
        batch_size: int = 32, num_workers: int = 2, loss_weights: object = None,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, worker_optimizer, loss, metrics, features_col, label_col,
                         num_epoch, batch_size, loss_weights)  # fmt: skip
        self.num_workers = num_workers

    def _settings(self) -> dict[str, Any]:
        return {"mode": "synchronous", "rule": "averaging", "num_workers": self.num_workers}


class EnsembleTrainer(SingleTrainer):
    """Each worker trains a model of its own on its part of the rows."""

    @lists_its_arguments
    def __init__(
        self, keras_model: object, worker_optimizer: object, loss: object, metrics: object = None,
        features_col: object = "features", label_col: object = "label", batch_size: int = 32,
        num_ensembles: int = 2, loss_weights: object = None, num_epoch: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, worker_optimizer, loss, metrics, features_col, label_col,
                         num_epoch, batch_size, loss_weights)  # fmt: skip
        self.num_ensembles = self.num_workers = num_ensembles

    def _settings(self) -> dict[str, Any]:
        return {"mode": "asynchronous", "rule": "ensemble", "num_workers": self.num_ensembles}

    def train(self, dataframe: object, shuffle: bool = False) -> list[dict[str, Any]]:
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


class DistributedTrainer(Trainer):
    """The base of the trainers with a parameter server.

    Args:
        keras_model, worker_optimizer, loss, metrics, loss_weights: As of :class:`Trainer`.
        num_workers: Workers.
        batch_size: Rows per step and worker.
        features_col, label_col: As of :class:`SingleTrainer`.
        num_epoch: Passes over the rows.
        master_port: The server's port; 0 for any free one.
    """

    RULE = ""

    @lists_its_arguments
    def __init__(
        self, keras_model: object, worker_optimizer: object, loss: object, metrics: object = None,
        num_workers: int = 2, batch_size: int = 32, features_col: object = "features",
        label_col: object = "label", num_epoch: int = 1, master_port: int = 0,
        loss_weights: object = None,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, loss, worker_optimizer, metrics, loss_weights)
        self.num_workers, self.batch_size, self.num_epoch = num_workers, batch_size, num_epoch
        self.features_column, self.label_column = features_col, label_col
        self.master_port = master_port
        self.master_host: str | None = None
        self.learning_rate = 1.0

    get_features_column = _getter("features_column", "The column of the features.")
    get_label_column = _getter("label_column", "The column of the labels.")
    get_minibatch_size = _getter("batch_size", "Rows per step and worker.")
    set_minibatch_size = _setter("batch_size", "Sets the rows per step and worker.")
    get_learning_rate = _getter("learning_rate", "The rule's learning rate.")
    set_learning_rate = _setter(
        "learning_rate",
        "Sets the rule's learning rate, for those that have one; not the optimizer's.",
    )
    get_num_epoch = _getter("num_epoch", "Passes over the rows.")
    set_num_epoch = _setter("num_epoch", "Sets the passes over the rows.")
    get_num_workers = _getter("num_workers", "The number of workers.")
    set_num_workers = _setter("num_workers", "Sets the number of workers.")

    def set_master(self, master: str | None) -> None:
        """Sets the address of this host that workers connect to; None: found by itself."""
        self.master_host = master

    def determine_new_master(self) -> None:
        """Leaves the address to be found by itself again."""
        self.master_host = None

    def num_updates(self) -> int:
        """Updates that the workers of the last ``train`` sent: a worker's steps per window."""
        return self._updates

    def _rule(self) -> Any:
        return self.RULE

    def _workers(self) -> int:
        return self.num_workers

    def _settings(self) -> dict[str, Any]:
        rule = self._rule()
        if not rule:
            raise ConfigError(
                f"{type(self).__name__} has no rule of its own",
                expected="a trainer with one: DOWNPOUR, ADAG, AEASGD, EAMSGD, DynSGD, Experimental",
                received=type(self).__name__, hint="a subclass of yours sets RULE",
            )  # fmt: skip
        return {
            "mode": "asynchronous", "rule": rule, "frequency": self.communication_window,
            "num_workers": self._workers(),
            "network": sparkdl.Network(self.master_port, server_address=self.master_host),
        }  # fmt: skip


class AsynchronousDistributedTrainer(DistributedTrainer):
    """Workers that do not wait for each other; more tasks than workers take turns on the slots."""

    parallelism_factor = 1

    get_parallelism_factor = _getter("parallelism_factor", "Tasks for each worker.")
    set_parallelism_factor = _setter("parallelism_factor", "Sets the tasks for each worker.")

    def _workers(self) -> int:
        return self.num_workers * self.parallelism_factor


class DOWNPOUR(AsynchronousDistributedTrainer):
    """Each window a worker's change is added to the center (rule ``'downpour'``)."""

    RULE = "downpour"
    WINDOW = 5

    @lists_its_arguments
    def __init__(
        self, keras_model: object, worker_optimizer: object, loss: object, metrics: object = None,
        num_workers: int = 2, batch_size: int = 32, features_col: object = "features",
        label_col: object = "label", num_epoch: int = 1, communication_window: int | None = None,
        master_port: int = 0, loss_weights: object = None,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, worker_optimizer, loss, metrics, num_workers, batch_size,
                         features_col, label_col, num_epoch, master_port, loss_weights)  # fmt: skip
        self.communication_window = communication_window or self.WINDOW


class ADAG(DOWNPOUR):
    """As DOWNPOUR, each change divided by the window (rule ``'adag'``)."""

    RULE = "adag"
    WINDOW = 12


class DynSGD(DOWNPOUR):
    """As DOWNPOUR, each change divided by its staleness (rule ``'dynsgd'``)."""

    RULE = "dynsgd"


class AEASGD(AsynchronousDistributedTrainer):
    """Worker and center pull each other closer, by ``rho · learning_rate`` (rule ``'aeasgd'``).

    That is stable only while it is at most ``1 / workers``; a larger one is replaced by the rule's
    own, with a warning.
    """

    @lists_its_arguments
    def __init__(
        self, keras_model: object, worker_optimizer: object, loss: object, metrics: object = None,
        num_workers: int = 2, batch_size: int = 32, features_col: object = "features",
        label_col: object = "label", num_epoch: int = 1, communication_window: int = 32,
        rho: float = 5.0, learning_rate: float = 0.1, master_port: int = 0,
        loss_weights: object = None,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, worker_optimizer, loss, metrics, num_workers, batch_size,
                         features_col, label_col, num_epoch, master_port, loss_weights)  # fmt: skip
        self.communication_window = communication_window
        self.rho, self.learning_rate = rho, learning_rate

    def _rule(self) -> Any:
        return AEASGDRule(**self._elasticity())

    def _elasticity(self) -> dict[str, float]:
        if self.rho * self.learning_rate * self._workers() <= 1:
            return {"rho": self.rho, "learning_rate": self.learning_rate}
        warnings.warn(
            f"rho · learning_rate = {self.rho * self.learning_rate:g} is not stable with "
            f"{self._workers()} workers; {type(self).__name__} takes 0.9 / workers",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}


class EAMSGD(AEASGD):
    """AEASGD whose workers train by SGD with Nesterov momentum (rule ``'eamsgd'``)."""

    @lists_its_arguments
    def __init__(
        self, keras_model: object, worker_optimizer: object, loss: object, metrics: object = None,
        num_workers: int = 2, batch_size: int = 32, features_col: object = "features",
        label_col: object = "label", num_epoch: int = 1, communication_window: int = 32,
        rho: float = 5.0, learning_rate: float = 0.1, momentum: float = 0.9, master_port: int = 0,
        loss_weights: object = None,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, worker_optimizer, loss, metrics, num_workers, batch_size,
                         features_col, label_col, num_epoch, communication_window, rho,
                         learning_rate, master_port, loss_weights)  # fmt: skip
        self.momentum = momentum

    def _rule(self) -> Any:
        return EAMSGDRule(momentum=self.momentum, **self._elasticity())


class Experimental(DOWNPOUR):
    """As ADAG; a coordinate that moved since the pull counts less (rule ``'experimental'``)."""

    @lists_its_arguments
    def __init__(
        self, keras_model: object, worker_optimizer: object, loss: object, metrics: object = None,
        num_workers: int = 2, batch_size: int = 32, features_col: object = "features",
        label_col: object = "label", num_epoch: int = 1, communication_window: int = 5,
        learning_rate: float = 1.0, master_port: int = 0, loss_weights: object = None,
    ) -> None:  # fmt: skip
        super().__init__(keras_model, worker_optimizer, loss, metrics, num_workers, batch_size,
                         features_col, label_col, num_epoch, communication_window, master_port,
                         loss_weights)  # fmt: skip
        self.learning_rate = learning_rate

    def _rule(self) -> Any:
        return ExperimentalRule(learning_rate=self.learning_rate)


class Predictor:
    """Holds a Keras model."""

    @lists_its_arguments
    def __init__(self, keras_model: object) -> None:
        self.model = keras_model

    def predict(self, dataframe: DataFrame) -> Any:
        """The DataFrame with a column of predictions."""
        raise NotImplementedError


class ModelPredictor(Predictor):
    """Adds a column of vectors: a model's output for each row.

    Args:
        keras_model: A built Keras model.
        features_col: Column of the features; a list: several numeric columns.
        output_col: The new column.
    """

    @lists_its_arguments
    def __init__(
        self, keras_model: object, features_col: Any = "features", output_col: str = "prediction"
    ) -> None:
        super().__init__(keras_model)
        self.features_column, self.output_column = features_col, output_col

    def predict(self, dataframe: DataFrame) -> Any:
        scored = sparkdl.predict(
            self.model, dataframe, batch_size=256, features=self.features_column,
            output_column=self.output_column,
        )  # fmt: skip
        return as_vector(scored, self.output_column)


__all__ = [
    "ADAG",
    "AEASGD",
    "DOWNPOUR",
    "EAMSGD",
    "AsynchronousDistributedTrainer",
    "AveragingTrainer",
    "DistributedTrainer",
    "DynSGD",
    "EnsembleTrainer",
    "Experimental",
    "SingleTrainer",
    "Trainer",
    "deserialize_keras_model",
    "serialize_keras_model",
]
