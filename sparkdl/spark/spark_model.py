"""``SparkModel``: a compiled Keras model that trains, predicts and evaluates on Spark data."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from sparkdl.config import (
    COLUMNS,
    FitConfig,
    UseGpu,
    require_int,
)
from sparkdl.errors import ConfigError
from sparkdl.files.checkpoints import Checkpoints
from sparkdl.files.model_file import check_path, write_model
from sparkdl.launch.interrupts import heard, held
from sparkdl.learner import keras_learner, metric_state
from sparkdl.learner.archive import encode_model, model_bytes
from sparkdl.learner.callback_sink import CallbackSink
from sparkdl.learner.ensemble import build_ensemble
from sparkdl.learner.export import export_model
from sparkdl.learner.model_source import KerasSource
from sparkdl.learner.signature import model_signature
from sparkdl.network import Encrypt, PortSpec
from sparkdl.progress.bar import ProgressBar
from sparkdl.progress.events import TrainingBegan, TrainingEnded
from sparkdl.progress.monitor import FitMonitor
from sparkdl.spark.columns.files import is_path
from sparkdl.spark.columns.fit_source import open_fit_source
from sparkdl.spark.columns.local_data import are_arrays, as_frame, has_texts_or_sequences
from sparkdl.spark.columns.matching import make_spec
from sparkdl.spark.columns.shipped import removes_tables
from sparkdl.spark.columns.sources import (
    Columns,
    Source,
    is_frame,
    open_source,
)
from sparkdl.spark.driver.arguments import (
    FitArguments,
    check_callbacks,
    check_keras_arguments,
    lists_its_arguments,
    refuse_labels_apart,
    verbosity,
)
from sparkdl.spark.driver.choice import choose_exchange, require_refusable
from sparkdl.spark.driver.cluster import default_parallelism
from sparkdl.spark.driver.fitting import run_fit
from sparkdl.spark.driver.metrics import prepare_metrics
from sparkdl.spark.driver.plan import FitPlan, count_workers, loop_settings, prepare_model
from sparkdl.spark.driver.resources import resource_profile
from sparkdl.spark.driver.telling import describe_run, facts_of, open_sinks
from sparkdl.spark.driver.trained_model import TrainedModel
from sparkdl.spark.driver.training import StageSummary
from sparkdl.spark.inference.choice import Names, PredictionChoice
from sparkdl.spark.inference.evaluate import evaluate_arrays, evaluate_source
from sparkdl.spark.predict import predict_data
from sparkdl.spark.setting import Setting
from sparkdl.spark.shared_data import SharedData
from sparkdl.spark.streaming import OnBatch, StreamingFit, check_stream, start_stream_fit
from sparkdl.tracking.profile import Facts, Profile, profile_of
from sparkdl.tracking.sinks import GivenSink


class SparkModel:
    """Trains a compiled Keras model on the workers of a Spark cluster.

    ::

        spark_model = SparkModel(model, mode='asynchronous')
        history = spark_model.fit(df, epochs=5, batch_size=64)
        predictions = spark_model.predict(df)

    The first eight arguments have the names and the order of Elephas' ``SparkModel``. Each argument
    but ``model`` is a read-only attribute afterwards.

    Args:
        model: A built and compiled ``keras.Model``. ``fit`` changes it in place, as Keras does.
        mode: ``'asynchronous'`` (server, no waiting), ``'hogwild'`` (server, lock-free),
            ``'synchronous'`` (server, every round waits for all; with ``frequency='batch'``, its
            default, exactly one process on the global batch) or ``'allreduce'``.
        frequency: ``'auto'``, ``'batch'``, ``'epoch'`` or a number: batches between two exchanges.
            For ``'epoch'`` modes that do not wait add a p-th of each worker's change.
        parameter_server_mode: ``'auto'`` (the fastest that a worker can reach), ``'shm'``,
            ``'socket'`` or ``'http'``.
        num_workers: Workers; None for as many as there are task slots.
        custom_objects: Name -> class or function, beside those found in the model itself.
        batch_size: Rows per step and worker.
        port: The server's port: 0 for any free one, a number, or a range ``'5000-5010'``.
        rule: How an exchange changes the weights: a name, a rule of :mod:`sparkdl.ps.rules` (of
            :mod:`sparkdl.collective.rules` for ``'allreduce'``), or None for the mode's default.
        communicator: For ``mode='allreduce'``: ``'horovod'``, ``'builtin'`` or ``'auto'``.
        compression: What travels encoded, between workers that are not on the server's host and
            the server: ``'fp16'``, ``'bf16'``, ``'int8'``, ``'int4'``, ``'onebit'``, ``'topk'``,
            ``'randomk'``, ``'dgc'``, ``'dithering'``, a codec of :mod:`sparkdl.ps.codecs`, or None
            for float32. ``'allreduce'`` takes the first two. See docs/rules.md.
        use_gpu: ``'auto'`` (the GPUs that Spark gives to a task), True (fail without) or False.
        decoder: Makes the model's input from a binary or image value: a function, or input
            name -> function.
        server_bind: Address that the server listens on; None for the narrowest that works.
        server_address: Address that workers connect to, if it differs (NAT, several networks).
        repartition: Spread the rows over the workers; False takes the partitions as they are.
        memory_budget_mb: A partition larger than this is spilled to disk, in MiB.
        seed: Seed of the row order and the validation split.
        start_timeout_s: Wait for all workers of a synchronous run to start.
        worker_timeout_s: A worker that was silent for longer counts as dead.
        max_restarts: For ``mode='allreduce'``: how often training begins again from the last
            whole epoch after workers were lost; None for 3.
        on_nan: What becomes of a worker's update with NaN or infinity: ``'raise'`` (one error that
            says where it comes from), ``'skip'`` (it is refused, and counted in ``summary``; not
            for ``'allreduce'`` with a rule or Horovod) or ``'ignore'``.
        worker_port: For ``mode='allreduce'``: the workers' own ports: 0 for any free one, or a
            range with one for each worker of a host.
        worker_bind: For ``mode='allreduce'``: address or network (``'10.0.0.0/8'``) that workers
            listen on; None for the address from which a worker's host reaches the driver.
        encrypt: Whether traffic between hosts is encrypted (TLS): ``'auto'``: as Spark's own
            (``spark.network.crypto.enabled``, ``spark.ssl.rpc.enabled``); True; False. Horovod's
            cannot be.
        pad: For arrays of different length, a number or input name -> number: each batch is padded
            with it to its longest row. ``Masking``, ``Embedding(mask_zero=True)`` and an input
            called ``'<input>_mask'`` tell the model what is padding.
        resources: What each task of the training stage asks of its executor, where that differs
            from other stages: ``{'cpus': 4, 'gpu': 1}`` (Spark's stage-level scheduling, without
            dynamic allocation); None for the application's settings.

    Raises:
        ConfigError: An argument that is not of its kind, or has no effect beside the others.
        ModelError: The model is not compiled, or not built.
    """

    @lists_its_arguments
    def __init__(
        self,
        model: Any,
        mode: str = "asynchronous",
        frequency: str | int = "auto",
        parameter_server_mode: str = "auto",
        num_workers: int | None = None,
        custom_objects: dict[str, Any] | None = None,
        batch_size: int = 32,
        port: PortSpec = 0,
        *,
        rule: Any = None,
        communicator: str = "auto",
        compression: Any = None,
        use_gpu: UseGpu = "auto",
        decoder: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = None,
        server_bind: str | None = None,
        server_address: str | None = None,
        repartition: bool = True,
        memory_budget_mb: int = 2048,
        seed: int = 0,
        start_timeout_s: float = 300.0,
        worker_timeout_s: float = 60.0,
        max_restarts: int | None = None,
        on_nan: str = "raise",
        worker_port: PortSpec = 0,
        worker_bind: str | None = None,
        encrypt: Encrypt = "auto",
        pad: float | Mapping[str, float] | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        keras_learner.require_compiled(model)
        keras_learner.require_loadable(model)
        asked = FitConfig(
            mode=mode, frequency=frequency, parameter_server_mode=parameter_server_mode,
            num_workers=num_workers, batch_size=batch_size, port=port, communicator=communicator,
            use_gpu=use_gpu, server_bind=server_bind, server_address=server_address,
            repartition=repartition, memory_budget_mb=memory_budget_mb, seed=seed,
            start_timeout_s=start_timeout_s, worker_timeout_s=worker_timeout_s,
            max_restarts=max_restarts, on_nan=on_nan, worker_port=worker_port,
            worker_bind=worker_bind, encrypt=encrypt, pad=pad, resources=resources,
        )  # fmt: skip
        self._exchange = choose_exchange(asked, rule, compression, model.optimizer)
        require_refusable(on_nan, self._exchange)
        self._config = replace(
            asked,
            rule={"name": self._exchange.rule.name, **self._exchange.rule.config()},
            compression=self._exchange.compression,
        )
        self._trained = TrainedModel(model)
        self._custom_objects = dict(custom_objects or {})
        self._decoder = decoder
        self._history: Any = None
        self._epochs_trained = 0
        self._summary: StageSummary | None = None
        self._facts: Facts | None = None
        self._ensemble: list[Any] = []
        self._columns = Columns()
        self._fitting = threading.Lock()

    # -- what it holds -------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The Keras model, trained in place; after ``rule='ensemble'`` the mean of the members."""
        return self._trained.model

    @property
    def ensemble(self) -> list[Any]:
        """The models that ``rule='ensemble'`` trained, one per worker; empty for other rules."""
        return list(self._ensemble)

    @property
    def history(self) -> Any:
        """The History of the last ``fit``, or None."""
        return self._history

    @property
    def summary(self) -> StageSummary | None:
        """Seconds, transports, GPUs and processes of the last fit's workers; None before one."""
        return self._summary

    @property
    def profile(self) -> Profile | None:
        """Where the time of the last fit's workers went; None before one. ``print`` draws it."""
        return None if self._facts is None else profile_of(self._facts)

    mode = Setting(lambda self: self._config.mode)
    frequency = Setting(lambda self: self._config.frequency)
    parameter_server_mode = Setting(lambda self: self._config.parameter_server_mode)
    num_workers = Setting(lambda self: self._config.num_workers)
    custom_objects = Setting(lambda self: dict(self._custom_objects))
    batch_size = Setting(lambda self: self._config.batch_size)
    port = Setting(lambda self: self._config.port)
    rule = Setting(lambda self: self._exchange.rule)
    communicator = Setting(lambda self: self._config.communicator)
    compression = Setting(lambda self: self._config.compression)
    use_gpu = Setting(lambda self: self._config.use_gpu)
    decoder = Setting(lambda self: self._decoder)
    server_bind = Setting(lambda self: self._config.server_bind)
    server_address = Setting(lambda self: self._config.server_address)
    repartition = Setting(lambda self: self._config.repartition)
    memory_budget_mb = Setting(lambda self: self._config.memory_budget_mb)
    seed = Setting(lambda self: self._config.seed)
    pad = Setting(lambda self: self._config.pad)
    start_timeout_s = Setting(lambda self: self._config.start_timeout_s)
    worker_timeout_s = Setting(lambda self: self._config.worker_timeout_s)
    max_restarts = Setting(lambda self: self._config.restarts)
    worker_port = Setting(lambda self: self._config.worker_port)
    worker_bind = Setting(lambda self: self._config.worker_bind)
    encrypt = Setting(lambda self: self._config.encrypt)

    def get_config(self) -> dict[str, Any]:
        """The arguments as plain values (the model left out), to be saved or shown."""
        return self._config.to_dict()

    def __repr__(self) -> str:
        return (
            f"SparkModel({self.model.name!r}, mode={self.mode!r}, frequency={self.frequency!r}, "
            f"rule={self.rule.name!r}, num_workers={self.num_workers})"
        )

    # -- training ------------------------------------------------------------------------------

    @heard()
    def fit(
        self,
        data: Any,
        epochs: int = 1,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        validation_split: float = 0.0,
        validation_data: Any = None,
        callbacks: Any = None,
        features: Any = "features",
        label: Any = "label",
        sample_weight: Any = None,
        shuffle: bool = True,
        checkpoint_dir: str | None = None,
        resume: bool = False,
        sinks: Sequence[GivenSink] | GivenSink | None = None,
        timeline: str | None = None,
        profile: bool = False,
        **keras_fit_arguments: Any,
    ) -> Any:
        """Trains the model on all rows, ``epochs`` times; a second call goes on from the first.

        Args:
            data: A DataFrame of Spark, pandas or polars, or an Arrow table; an RDD of ``(x, y)``
                pairs or ``LabeledPoint``; arrays or lists ``(x, y)`` or ``(x, y,
                sample_weight)``; or a path of Parquet or TFRecord files, such as
                ``'hdfs:///rows/*.parquet'``, which the workers read by themselves: the driver
                deals them by size, and no row goes through Spark.
            epochs: Passes over the data.
            batch_size: Rows per step and worker; None for the constructor's.
            verbose: ``'auto'`` or 1 for a progress bar, 2 for a line per epoch, 0 for silence.
            validation_split: Share of the rows held out at random for validation, in [0, 1).
            validation_data: Rows like ``data``, evaluated by the workers after each epoch; arrays
                ``(x, y, sample_weight)`` are weighted. Or the name of a boolean column of
                ``data``, true in the rows to validate on.
            callbacks: Keras callbacks; they run here on the driver, with the metrics of all
                workers. Setting ``model.stop_training`` or the learning rate reaches the workers.
            features: A vector, array, image or binary column; several numeric columns; or input
                name -> either.
            label: A column, or output name -> column. Integer class labels do where the loss
                wants one-hot vectors. None for a model that was compiled without a loss.
            sample_weight: A numeric column, or output name -> column; outputs that are not named
                are not weighted. As in Keras, it weighs the rows of ``data`` (also those held
                out by ``validation_split`` or a column), not rows of ``validation_data``.
            shuffle: New row order in each epoch.
            checkpoint_dir: Folder for a checkpoint after each epoch; paths as in :meth:`save`.
            resume: Go on from the last checkpoint in ``checkpoint_dir``; ``epochs`` is then the
                total, as in ``keras``' ``initial_epoch``.
            sinks: Who is told what happens while the fit runs: functions of one event
                (:mod:`sparkdl.progress.events`), or sinks of :mod:`sparkdl.tracking`.
            timeline: A file to write what every rank did when, for Perfetto or
                ``chrome://tracing``.
            profile: Print where the time of each worker went, and what would help most; also in
                :attr:`profile`.
            **keras_fit_arguments: ``initial_epoch``; ``class_weight={class: weight}`` (for the
                rows to train on); ``steps_per_epoch`` and ``validation_steps``: batches of each
                worker (each epoch goes on in the rows where the one before ended, and always
                evaluates the same validation rows); ``check_data=True`` (refuse NaN and
                infinity). Others of Keras' ``fit`` are refused with a hint.

        Returns:
            A Keras ``History``: ``history.history['loss']`` has one value per epoch, weighted by
            the rows of each worker.

        Raises:
            ConfigError, DataError, ModelError, ResourceError: Found before a job starts where
                that is possible.
            WorkerError: A worker raised; the message ends with its traceback.
            TransportError: The parameter server died.
        """
        with self._one_fit_at_a_time(), removes_tables():
            data, validation_data = as_frame(data), as_frame(validation_data)
            columns = Columns(features, label, sample_weight, self.decoder, self.pad)
            keras_learner.require_compiled(self.model)
            refuse_labels_apart("fit", "epochs", epochs)
            check_callbacks(callbacks)
            if self._ensemble or (checkpoint_dir is not None and self._exchange.independent):
                raise ConfigError(
                    "an ensemble is trained in one fit",
                    expected="a new SparkModel for another fit, and checkpoint_dir=None",
                    received="an ensemble that is trained"
                    if self._ensemble
                    else repr(checkpoint_dir),
                    hint="spark_model.ensemble has the members; each can be trained further",
                )
            arguments = FitArguments(
                epochs, batch_size, verbose, validation_split, shuffle, checkpoint_dir, resume,
                **check_keras_arguments(keras_fit_arguments),
            )  # fmt: skip
            source = self._open(data, validation_data, columns, validation_split)
            arguments.check_spec(source.spec)
            if source.spec.role_column is not None:
                keras_learner.require_evaluable(self.model)
            if is_frame(data) or is_path(data):
                self._columns = Columns(columns.features, columns.label)
            profile_of_tasks = resource_profile(self._config.resources, source.spark)
            num_workers, at_once = count_workers(
                self._config, self._exchange, source, profile_of_tasks
            )
            prepare_model(self.model, self._exchange, num_workers)
            checkpoints = Checkpoints.at(checkpoint_dir)
            first_epoch = arguments.initial_epoch
            if resume and checkpoints is not None:
                first_epoch = self._trained.restore(checkpoints) or first_epoch
            last_epoch = arguments.last_epoch(first_epoch)
            if first_epoch >= last_epoch:
                return self._nothing_to_do(callbacks, first_epoch, last_epoch)
            keras_callbacks = CallbackSink(
                self.model, callbacks, epochs=last_epoch, verbose=verbosity(verbose)
            )
            trackers = open_sinks(sinks, timeline, lambda: self.model, source.spark)
            monitor = FitMonitor(
                keras_callbacks, [ProgressBar(verbosity(verbose)), *trackers],
                partial(metric_state.metric_results, self.model),
                epochs=last_epoch, first_epoch=first_epoch,
                run=describe_run(self._config, arguments, self.model, num_workers),
            )  # fmt: skip
            settings = loop_settings(
                self._config, self._exchange, arguments, first_epoch=first_epoch,
                epochs_trained=self._epochs_trained, has_callbacks=monitor.has_callbacks,
                keep_spans=any(sink.wants_spans for sink in trackers),
            )  # fmt: skip
            plan = FitPlan(
                self._config, self._exchange, self._trained, self._custom_objects, source,
                num_workers, at_once, settings, checkpoints, profile_of_tasks,
            )  # fmt: skip
            try:
                self._summary = run_fit(plan, monitor)
            except BaseException as error:
                monitor.fail(error)
                raise
            if checkpoints is not None and not monitor.stopped_inside:
                self._trained.save(checkpoints, monitor.epochs_done)
            if self._summary.members:
                members = list(self._summary.members.values())
                self._trained.model, self._ensemble = build_ensemble(self.model, members)
                self._summary = replace(self._summary, members={})
            self._epochs_trained += monitor.epochs_done - first_epoch
            self._facts = facts_of(plan, self._summary, monitor.epochs_done - first_epoch)
            if profile:
                print(self.profile, flush=True)
            monitor.end()
            self._history = keras_callbacks.history
            return self._history

    def fit_stream(
        self,
        stream: Any,
        *,
        checkpoint_dir: str,
        epochs_per_batch: int = 1,
        trigger: Mapping[str, Any] | None = None,
        on_batch: OnBatch | None = None,
        batch_size: int | None = None,
        callbacks: Any = None,
        features: Any = "features",
        label: Any = "label",
        sample_weight: Any = None,
        shuffle: bool = True,
        verbose: str | int = 0,
    ) -> StreamingFit:
        """Trains on a stream, micro-batch by micro-batch, for as long as it runs.

        ::

            training = spark_model.fit_stream(spark.readStream..., checkpoint_dir='hdfs:///runs/1')
            training.await_termination()

        Each micro-batch is a :meth:`fit` of its own that goes on from the one before. After it the
        model is saved together with the number of micro-batches in it: a restart with the same
        ``checkpoint_dir`` goes on where it was and trains none twice.

        Args:
            stream: A streaming DataFrame.
            checkpoint_dir: Folder for the model (``model``) and Spark's place in the stream
                (``stream``): a local path with a local master, else a URI that the driver and
                Spark both know.
            epochs_per_batch: Passes over each micro-batch.
            trigger: Arguments of Spark's ``DataStreamWriter.trigger``; None for as soon as there
                are rows.
            on_batch: Is called after each micro-batch with its number and the history of its
                epochs; what it raises ends the stream.
            batch_size: See :meth:`fit`, as for the arguments after it.
            callbacks: See there; they see each micro-batch as a training of its own.
            features: See there.
            label: See there.
            sample_weight: See there.
            shuffle: See there.
            verbose: See there.

        Returns:
            The training, which runs in threads of its own.

        Raises:
            DataError: No stream, or its columns do not fit.
            ConfigError: A Spark Connect session, or a ``checkpoint_dir`` of another model.
        """
        require_int("epochs_per_batch", epochs_per_batch, 1)
        check_stream(stream, checkpoint_dir, trigger)
        if self._exchange.independent:
            raise ConfigError(
                "an ensemble is trained in one fit, and a stream is many",
                expected="another rule for fit_stream",
                received=f"rule={self.rule.name!r}",
            )
        columns = Columns(features, label, sample_weight, self.decoder, self.pad)
        make_spec(
            stream.schema, model_signature(self.model), columns.features, columns.label,
            columns.sample_weight, columns.decoder, pad=columns.pad,
        )  # fmt: skip

        workers = self.num_workers or default_parallelism(stream.sparkSession)
        prepare_model(self.model, self._exchange, workers)

        def fit(frame: Any) -> dict[str, list[Any]]:
            history = self.fit(
                frame, epochs_per_batch, batch_size, verbose, callbacks=callbacks,
                features=features, label=label, sample_weight=sample_weight, shuffle=shuffle,
            )  # fmt: skip
            found: dict[str, list[Any]] = history.history
            return found

        def restored(batches_done: int) -> None:
            self._epochs_trained = batches_done * epochs_per_batch

        return start_stream_fit(
            stream, self._trained, fit, checkpoint_dir=checkpoint_dir, trigger=trigger,
            on_batch=on_batch, restored=restored,
        )  # fmt: skip

    @contextlib.contextmanager
    def _one_fit_at_a_time(self) -> Iterator[None]:
        if not self._fitting.acquire(blocking=False):
            raise ConfigError(
                f"model {self.model.name!r} is being trained by another call of fit",
                expected="one fit of a SparkModel at a time: it trains the model in place",
                received="fit while an earlier fit runs, in another thread or in a callback of it",
                hint="wait for the first, or train a copy: "
                "SparkModel(keras.models.clone_model(model), ...), compiled",
            )
        try:
            yield
        finally:
            self._fitting.release()

    def _open(self, data: Any, validation_data: Any, columns: Columns, split: float) -> Source:
        signature = model_signature(self.model)
        if isinstance(data, SharedData):
            return data.source(
                validation_data, signature, columns, split=split, seed=self.seed,
                limit_bytes=self.memory_budget_mb << 20,
            )  # fmt: skip
        return open_fit_source(
            data, validation_data, signature, columns, split=split, seed=self.seed
        )

    def _nothing_to_do(self, callbacks: Any, epochs_done: int, epochs: int) -> Any:
        """An empty History, with a warning, for a fit whose epochs have all been trained."""
        warnings.warn(
            f"fit has nothing left to train: {epochs_done} epochs are done, and epochs={epochs} is "
            "the epoch to stop at when fit goes on (resume, initial_epoch); "
            f"epochs={epochs_done + 1} trains one more",
            UserWarning,
            stacklevel=4,
        )
        keras_callbacks = CallbackSink(self.model, callbacks, epochs=epochs, verbose=0)
        keras_callbacks.handle(TrainingBegan(epochs, epochs))
        keras_callbacks.handle(TrainingEnded(epochs))
        self._history = keras_callbacks.history
        return self._history

    def _batch_size(self, batch_size: int | None) -> int:
        return self.batch_size if batch_size is None else require_int("batch_size", batch_size, 1)

    def _columns_of(self, features: Any, label: Any, sample_weight: Any) -> Columns:
        """The columns that the user names, and those of the last fit for what is None."""
        return Columns(
            self._columns.features if features is None else features,
            self._columns.label if label is None else label,
            sample_weight,
            self.decoder,
            self.pad,
        )

    # -- inference -----------------------------------------------------------------------------

    def predict(
        self,
        data: Any,
        batch_size: int | None = None,
        features: Any = None,
        output_column: str = "prediction",
        *,
        outputs: Iterable[str] | Mapping[str, str] | None = None,
        probability_column: Names = None,
        class_column: Names = None,
        layers: Mapping[str, str] | None = None,
        dtype: str = "float32",
        handle_invalid: str = "error",
    ) -> Any:
        """The model's outputs for every row, in one pass.

        Args:
            data: A DataFrame (also a streaming one), an RDD of inputs, or a NumPy array (or dict,
                or list of them).
            batch_size: Rows per forward pass; None for the constructor's.
            features: See :meth:`fit`; None for those of the last ``fit`` on a DataFrame.
            output_column: Name of the prediction column of a DataFrame.
            outputs: See :func:`sparkdl.predict`, as for the arguments after it.
            probability_column: See there.
            class_column: See there.
            layers: See there.
            dtype: See there.
            handle_invalid: See there.

        Returns:
            For a DataFrame the same rows in the same order, all columns kept, with a prediction
            column more: float, or array of floats (lazy: Spark computes it when it is asked).
            For an RDD an RDD of NumPy arrays. For NumPy arrays a NumPy array.

        Raises:
            DataError: The data do not fit the model.
            ConfigError: Columns that the model has no outputs for.
        """
        batch_size = self._batch_size(batch_size)
        choice = PredictionChoice(
            output_column, outputs, probability_column, class_column, layers or {}, dtype,
            handle_invalid,
        )  # fmt: skip
        return predict_data(
            KerasSource(self.model, self.custom_objects), data,
            self._columns_of(features, None, None), choice,
            batch_size=batch_size, use_gpu=self.use_gpu,
        )  # fmt: skip

    @heard()
    def evaluate(
        self,
        data: Any,
        batch_size: int | None = None,
        features: Any = None,
        label: Any = None,
        sample_weight: Any = None,
        verbose: str | int = 0,
    ) -> dict[str, Any]:
        """Loss and metrics over all rows, exactly as one process would compute them.

        The partitions' metric *states* are merged, so that an AUC is the AUC of all rows and not
        a mean of AUCs.

        Args:
            data: See :meth:`fit`.
            batch_size: Rows per forward pass; None for the constructor's.
            features: See :meth:`fit`; None for those of the last ``fit`` on a DataFrame.
            label: See :meth:`fit`; None as for ``features``.
            sample_weight: See :meth:`fit`.
            verbose: 1 prints the result.

        Returns:
            Name -> value, ``'loss'`` first: a float, or a list for a metric per class.

        Raises:
            DataError: The data do not fit the model, or there are none.
        """
        refuse_labels_apart("evaluate", "batch_size", batch_size)
        batch_size = self._batch_size(batch_size)
        signature = model_signature(self.model)
        columns = self._columns_of(features, label, sample_weight)
        with removes_tables():
            data = as_frame(data)
            if are_arrays(data, needs_labels=signature.needs_labels) and not has_texts_or_sequences(
                data
            ):
                state = evaluate_arrays(self.model, data, signature, batch_size=batch_size)
            else:
                source = open_source(data, signature, columns)
                with held():
                    prepare_metrics(self.model, source)
                    archive = encode_model(self.model, self.custom_objects)
                state = evaluate_source(
                    source, archive, batch_size=batch_size, use_gpu=self.use_gpu
                )
        results = metric_state.metric_results(self.model, state)
        if verbosity(verbose, auto=0):
            print(" - ".join(f"{k}: {np.round(v, 4)}" for k, v in results.items()), flush=True)
        return results

    # -- files ---------------------------------------------------------------------------------

    def save(self, path: str, overwrite: bool = True) -> None:
        """Writes the model with its optimizer state as a ``.keras`` file.

        Args:
            path: As Spark understands it: ``hdfs://``, ``dbfs:/``, ``s3a://``, ... and, without a
                scheme, its default file system; ``file:/`` is this machine. Or any URI of pyarrow
                or fsspec.
            overwrite: False refuses an existing file.

        Raises:
            ResourceError: The path cannot be written.
            ConfigError: The path does not end in ``.keras``.
        """
        check_path(path, overwrite=overwrite)
        state = self._trained.beside(self._epochs_trained)
        write_model(path, model_bytes(self.model), self._file_settings(), state)

    def _file_settings(self) -> dict[str, Any]:
        """What a model file says beside the model."""
        columns = {"features": self._columns.features, "label": self._columns.label}
        return {**self._config.to_file(), COLUMNS: columns}

    def export(self, path: str, file_format: str = "tf_saved_model") -> None:
        """Writes the forward pass and the weights for runtimes without Keras and sparkdl.

        Args:
            path: See :meth:`save`: a folder for ``'tf_saved_model'``, else a file.
            file_format: ``'tf_saved_model'`` (TensorFlow Serving, Triton; :func:`sparkdl.predict`
                takes it, too), ``'onnx'`` (ONNX Runtime, Triton, TensorRT; ``pip install
                'sparkdl-keras[onnx]'``) or ``'litert'`` (phones).

        Raises:
            UnknownNameError: No such format.
            ResourceError: A package that Keras needs is missing, or the path cannot be written.
            ModelError: Keras cannot export the model.
        """
        export_model(self.model, path, file_format)
