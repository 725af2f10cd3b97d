"""``SparkModel``: a compiled Keras model that trains, predicts and evaluates on Spark data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sparkdl.config import FitConfig, Limits, UseGpu, arguments_from_file, columns_from_file
from sparkdl.errors import ConfigError
from sparkdl.files.model_file import ModelFile, read_model
from sparkdl.launch.interrupts import heard
from sparkdl.learner.archives.archive import model_from_bytes
from sparkdl.learner.checks import compile_parts
from sparkdl.learner.signature import model_signature
from sparkdl.learner.steps import keras_learner
from sparkdl.process.host_load import TRAINING_DESCRIPTORS, require_descriptors
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.network import Network, PortSpec, at_port
from sparkdl.settings.values import require_flag, require_int, require_objects, require_path
from sparkdl.spark.fit.arguments import (
    FitArguments,
    check_callbacks,
    check_keras_arguments,
    refuse_labels_apart,
)
from sparkdl.spark.fit.choice import (
    choose_exchange,
    is_default_rule,
    require_refusable,
    restore_rule,
)
from sparkdl.spark.fit.fitting import FitCall, Fitted
from sparkdl.spark.fit.plan import prepare_model
from sparkdl.spark.forms.arrays import takes_labels_apart
from sparkdl.spark.forms.matching import make_spec
from sparkdl.spark.forms.opening import RowChoice, form_of, open_fit_source
from sparkdl.spark.forms.shipped import removes_tables
from sparkdl.spark.forms.sources import Columns, Form, Source
from sparkdl.spark.model_inference import ModelInference
from sparkdl.spark.runs.capacity import default_parallelism
from sparkdl.spark.shared_data import SharedData
from sparkdl.spark.streaming import OnBatch, StreamingFit, check_stream, start_stream_fit
from sparkdl.tables.checkpoints import found_beside
from sparkdl.tracking.sinks import GivenSink


class SparkModel(ModelInference):
    """Trains a compiled Keras model on the workers of a Spark cluster.

    ::

        spark_model = SparkModel(model, mode='asynchronous')
        history = spark_model.fit(df, epochs=5, batch_size=64)
        predictions = spark_model.predict(df)

    The first eight arguments have the names and the order of Elephas' ``SparkModel`` up to version
    6.2. Each argument but ``model`` is a read-only attribute afterwards.

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
        port: The same as ``network=Network(port=...)``: the server's port, 0 for any free one, a
            number, or a range ``'5000-5010'``.
        rule: How an exchange changes the weights: a name, a rule of :mod:`sparkdl.rules` (of
            :mod:`sparkdl.collective.rules` for ``'allreduce'``), or None for the mode's default.
        communicator: For ``mode='allreduce'``: ``'horovod'``, ``'builtin'`` or ``'auto'``.
        compression: What travels encoded, between workers that are not on the server's host and
            the server: ``'fp16'``, ``'bf16'``, ``'int8'``, ``'int4'``, ``'onebit'``, ``'topk'``,
            ``'randomk'``, ``'dgc'``, ``'dithering'``, a codec of :mod:`sparkdl.codecs`, or None
            for float32. ``'allreduce'`` takes the first two. See docs/rules.md.
        use_gpu: ``'auto'`` (the GPUs that Spark gives to a task), True (fail without) or False.
        decoder: Makes the model's input from a binary or image value: a function, or input
            name -> function. Of strings a layer of Keras that takes them (``TextVectorization``,
            ``StringLookup``, ``Hashing``); also of labels: ``{'label': StringLookup(...)}``.
        repartition: Spread the rows over the workers; False takes the partitions as they are.
        seed: Seed of the row order and the validation split.
        on_nan: What happens to a worker's update with NaN or infinity: ``'raise'`` (one error that
            says where it comes from), ``'skip'`` (it is refused, and counted in ``summary``; not
            for ``'allreduce'`` with a rule or Horovod) or ``'ignore'``.
        pad: For arrays of different length, a number or input name -> number: each batch is padded
            with it to its longest row. ``Masking``, ``Embedding(mask_zero=True)`` and an input
            called ``'<input>_mask'`` tell the model what is padding.
        resources: What each task of the training stage asks of its executor, where that differs
            from other stages: ``{'cpus': 4, 'gpu': 1}`` (Spark's stage-level scheduling, without
            dynamic allocation); None for the application's settings.
        network: Where the server and, for ``mode='allreduce'``, the workers listen, and whether
            they encrypt: a :class:`~sparkdl.settings.network.Network`, such as
            ``Network(server_address='10.0.0.7', encrypt=True)``.
        limits: Memory, times and restarts: a :class:`~sparkdl.config.Limits`, such as
            ``Limits(memory_budget_mb=512)``.

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
        repartition: bool = True,
        seed: int = 0,
        on_nan: str = "raise",
        pad: float | Mapping[str, float] | None = None,
        resources: Mapping[str, float] | None = None,
        network: Network = Network(),
        limits: Limits = Limits(),
    ) -> None:
        keras_learner.require_compiled(model)
        compile_parts.require_loadable(model)
        asked = FitConfig(
            mode=mode, frequency=frequency, parameter_server_mode=parameter_server_mode,
            num_workers=num_workers, batch_size=batch_size, communicator=communicator,
            use_gpu=use_gpu, repartition=repartition, seed=seed, on_nan=on_nan, pad=pad,
            resources=resources, network=at_port(network, port), limits=limits,
        )  # fmt: skip
        exchange = choose_exchange(asked, rule, compression, model.optimizer)
        require_refusable(on_nan, exchange)
        chosen = replace(
            asked,
            rule={"name": exchange.rule.name, **exchange.rule.config()},
            compression=exchange.compression,
        )
        super().__init__(chosen, exchange, model, require_objects(custom_objects), decoder)

    @takes_labels_apart
    @heard()
    def fit(
        self,
        data: object,
        epochs: int = 1,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        validation_split: float = 0.0,
        validation_data: object = None,
        callbacks: object = None,
        features: Any = "features",
        label: Any = "label",
        sample_weight: Any = None,
        shuffle: bool = True,
        checkpoint_dir: str | None = None,
        resume: bool = False,
        sinks: Sequence[GivenSink] | GivenSink | None = None,
        timeline: str | None = None,
        profile: bool = False,
        **keras_fit_arguments: object,
    ) -> Any:
        """Trains the model on all rows, ``epochs`` times; a second call goes on from the first.

        Args:
            data: A DataFrame of Spark, ``pyspark.pandas``, pandas or polars, or an Arrow table; an
                RDD of ``(x, y)`` pairs or ``LabeledPoint``; arrays or lists ``(x, y)`` or ``(x, y,
                sample_weight)``, also as Keras takes them (``fit(x, y, epochs=5)``; all that
                follows has a name); or a path (a text or of ``pathlib``) of Parquet, Arrow or
                TFRecord files, such as ``'hdfs:///rows/*.parquet'``, which the workers read by
                themselves: the driver deals them by size, and no row goes through Spark.
            epochs: Passes over the data.
            batch_size: Rows per step and worker; None for the constructor's.
            verbose: 1 for a progress bar, 2 for a line per epoch, 0 for silence; ``'auto'`` for a
                progress bar, in a notebook with matplotlib for curves of loss and metrics.
            validation_split: Share of the rows held out for validation, in [0, 1): of arrays the
                last ones, as in Keras, otherwise a random share.
            validation_data: Rows like ``data``, evaluated by the workers after each epoch; arrays
                ``(x, y, sample_weight)`` are weighted. Or the name of a boolean column of
                ``data``, true in the rows to validate on.
            callbacks: Keras callbacks; they run here on the driver, with the metrics of all
                workers. Setting ``model.stop_training`` or the learning rate reaches the workers.
            features: A vector, array, image or binary column; several numeric columns; or input
                name -> either.
            label: A column, or output name -> column. Integer class labels do where the loss
                wants one-hot vectors. None for a model that was compiled without a loss.
            sample_weight: A column of numbers, or of arrays with one for each position; or output
                name -> column; outputs that are not named are not weighted. As in Keras, it weighs
                the rows of ``data`` (also those held out by ``validation_split`` or a column), not
                rows of ``validation_data``.
            shuffle: New row order in each epoch.
            checkpoint_dir: Folder for a checkpoint after each epoch; paths as in :meth:`save`. The
                first takes the place of those of an earlier fit, unless ``resume`` goes on from it.
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
                infinity); ``group='query'``, a column (of arrays: an array, or an input's name)
                whose rows of one value stay together in a batch, for losses that compare rows.
                Others of Keras' ``fit`` are refused with a hint.

        Returns:
            A Keras ``History``: ``history.history['loss']`` has one value per epoch, weighted by
            the rows of each worker.

        Raises:
            KeyboardInterrupt: The user interrupted the fit. The model keeps what was trained until
                then, optimizer state included, and :attr:`history` has the epochs that ended;
                the same where its job was cancelled in Spark (WorkerError).
            ConfigError, DataError, ModelError, ResourceError: Found before a job starts where
                that is possible.
            WorkerError: A worker raised; the message ends with its traceback.
            TransportError: The parameter server died.
        """
        began_at = time.time()
        require_descriptors("fit", TRAINING_DESCRIPTORS)
        with self._trained.one_at_a_time("fit"), removes_tables():
            form = form_of(data)
            group = keras_fit_arguments.pop("group", None)
            columns = Columns(features, label, sample_weight, self.decoder, self.pad, group)
            keras_learner.require_compiled(self.model)
            refuse_labels_apart("fit", "epochs", epochs)
            self._require_first_of_ensemble(checkpoint_dir)
            validates = validation_data is not None or bool(validation_split)
            call = FitCall(
                check_callbacks(callbacks, validates=validates),
                require_flag("profile", profile), sinks,
                None if timeline is None else require_path("timeline", timeline), began_at,
                FitArguments(
                    epochs, batch_size, verbose, validation_split, shuffle, checkpoint_dir, resume,
                    **check_keras_arguments(type(self), keras_fit_arguments),
                ),
            )  # fmt: skip
            source = self._open(form, validation_data, columns, call.arguments.validation_split)
            self._require_fitting(source, call.arguments)
            if form.has_columns:  # predict reads the same by default
                self._columns = Columns(columns.features, columns.label)
            return self._take(
                call.train(
                    self._config, self._exchange, self._trained, self._custom_objects, source,
                    self._epochs_trained, self._take,
                )
            )  # fmt: skip

    @lists_its_arguments
    def fit_stream(
        self,
        stream: Any,
        *,
        checkpoint_dir: str,
        epochs_per_batch: int = 1,
        trigger: Mapping[str, Any] | None = None,
        on_batch: OnBatch | None = None,
        batch_size: int | None = None,
        callbacks: object = None,
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
            batch_size, features, label, sample_weight, shuffle, verbose: As for :meth:`fit`.
            callbacks: See there; they see each micro-batch as a training of its own.

        Returns:
            The training, which runs in threads of its own.

        Raises:
            DataError: No stream, or its columns do not fit.
            ConfigError: An argument that is not of its kind, a Spark Connect session, or a
                ``checkpoint_dir`` of another model.
        """
        epochs_per_batch = require_int("epochs_per_batch", epochs_per_batch, 1)
        checkpoint_dir = require_path(
            "checkpoint_dir", checkpoint_dir, "from there it can go on after a restart"
        )
        check_stream(stream, trigger)
        callbacks = check_callbacks(callbacks)
        FitArguments(epochs_per_batch, batch_size, verbose, shuffle=shuffle)  # checks them
        if self._exchange.independent:
            raise ConfigError(
                "an ensemble is trained in one fit, and a stream is many",
                expected="another rule for fit_stream", received=f"rule={self.rule.name!r}",
            )  # fmt: skip
        columns = Columns(features, label, sample_weight, self.decoder, self.pad)
        make_spec(
            stream.schema, model_signature(self.model), columns.features, columns.label,
            columns.sample_weight, columns.decoder, pad=columns.pad,
        )  # fmt: skip

        workers = self.num_workers or default_parallelism(stream.sparkSession)
        prepare_model(self.model, self._config, self._exchange, workers)

        def fit(frame: object) -> dict[str, list[Any]]:
            history = self.fit(
                frame, epochs_per_batch, batch_size, verbose, callbacks=callbacks,
                features=columns.features, label=columns.label, sample_weight=sample_weight,
                shuffle=shuffle,
            )  # fmt: skip
            found: dict[str, list[Any]] = history.history
            return found

        def restored(batches_done: int) -> None:
            self._epochs_trained = batches_done * epochs_per_batch

        return start_stream_fit(
            stream, self._trained, fit, checkpoint_dir=checkpoint_dir, trigger=trigger,
            on_batch=on_batch, restored=restored,
        )  # fmt: skip

    def _require_first_of_ensemble(self, checkpoint_dir: str | None) -> None:
        if self._ensemble or (checkpoint_dir is not None and self._exchange.independent):
            raise ConfigError(
                "an ensemble is trained in one fit",
                expected="a new SparkModel for another fit, and checkpoint_dir=None",
                received="an ensemble that is trained" if self._ensemble else repr(checkpoint_dir),
                hint="spark_model.ensemble has the members; each can be trained further",
            )

    def _open(self, form: Form, validation_data: object, columns: Columns, split: float) -> Source:
        choice = RowChoice(model_signature(self.model), columns, validation_data, split, self.seed)
        if isinstance(form, SharedData):
            return form.source(choice, self.limits.memory_budget_mb << 20)
        return open_fit_source(form, choice)

    def _require_fitting(self, source: Source, arguments: FitArguments) -> None:
        arguments.check_spec(source.spec)
        if source.spec.role_column is not None:
            compile_parts.require_evaluable(self.model)

    def _take(self, fitted: Fitted) -> Any:
        """Keeps what a fit has left; Keras' ``History``."""
        if fitted.summary is not None:
            self._summary, self._facts = fitted.summary, fitted.facts
            self._ensemble = fitted.ensemble or self._ensemble
        self._epochs_trained += fitted.epochs
        self._history = fitted.history
        return self._history


M = TypeVar("M", bound=SparkModel)


def load_spark_model(
    path: str,
    custom_objects: dict[str, Any] | None = None,
    safe_mode: bool = True,
    **overrides: object,
) -> SparkModel:
    """Loads what :meth:`SparkModel.save` wrote, or any ``.keras`` file.

    Args:
        path: See :meth:`SparkModel.save`.
        custom_objects: Name -> class or function that the model uses.
        safe_mode: False also loads what runs code from the file (``Lambda`` layers): only for
            files that you trust.
        **overrides: Arguments of :class:`SparkModel` to have instead of those saved, and
            ``decoder``, which is not saved.

    Returns:
        A SparkModel with the same mode and settings; its next ``fit`` goes on with the optimizer
        state and, in mode ``'allreduce'``, the outer momentum of rules like ``'diloco'``, and
        ``predict`` and ``evaluate`` read the columns of its last ``fit``.
        ``port`` and ``network`` have their defaults: where the driver and its workers listen, and
        whether they encrypt, is for their user to say, never for a file.

    Raises:
        ResourceError: The path cannot be read.
        ModelError: The file holds no compiled Keras model.
    """
    path = require_path("path", path)
    custom_objects = require_objects(custom_objects)
    return load_as(SparkModel, read_model(path), path, custom_objects, safe_mode, **overrides)


def load_as(
    cls: type[M],
    file: ModelFile,
    path: str,
    custom_objects: dict[str, Any] | None = None,
    safe_mode: bool = True,
    **overrides: object,
) -> M:
    """A model file as a ``SparkModel``, or a subclass that takes its arguments by name.

    Args:
        file: What was read.
        path: Path of the file, for messages.
        custom_objects, safe_mode, **overrides: See :func:`load_spark_model`.

    Raises:
        ModelError: The file holds no compiled Keras model.
    """
    settings = arguments_from_file(file.settings, path)
    content, tables = found_beside(file.content, f"{path}.tables")
    model = model_from_bytes(content, custom_objects, safe_mode=safe_mode, path=path)
    if "rule" not in overrides and settings.get("rule"):
        mode, rule = settings["mode"], settings["rule"]
        to_another = overrides.get("mode", mode) != mode
        frequency = settings.get("frequency", "auto")
        if to_another and is_default_rule(mode, frequency, rule, model.optimizer):
            settings["rule"] = None  # which nobody chose: the other mode has its own
        else:
            settings["rule"] = restore_rule(mode, rule)
    loaded = cls(model, custom_objects=custom_objects, **{**settings, **overrides})
    loaded._columns = replace(loaded._columns, **columns_from_file(file.settings, path))
    if file.state is not None:
        loaded._epochs_trained = file.state.epoch  # the next fit's row order is not the first's
        if not {"mode", "rule"} & set(overrides):
            loaded._trained.rule_state = file.state.rule if tables is None else tables.to_bytes()
    return loaded
