"""``SparkModel``: a compiled Keras model that trains, predicts and evaluates on Spark data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkdl import config
from sparkdl.config import LoopSettings, require_int, require_name
from sparkdl.errors import ConfigError, DataError, ModelError, ResourceError
from sparkdl.learner import keras_base
from sparkdl.learner.archive import encode_model
from sparkdl.learner.signature import Signature, model_signature
from sparkdl.spark import persistence
from sparkdl.spark.checkpoints import Checkpoints
from sparkdl.spark.cluster import default_parallelism, wait_for_slots
from sparkdl.spark.inference import evaluate_source, predict_frame, predict_rdd
from sparkdl.spark.monitor import FitMonitor
from sparkdl.spark.resources import UseGpu, check_use_gpu
from sparkdl.spark.server_run import ServerOptions, ServerRun, choose_rule
from sparkdl.spark.sources import (
    Columns,
    Source,
    add_validation,
    is_frame,
    is_rdd,
    open_source,
    wanted_spec,
)
from sparkdl.spark.task import TrainTask
from sparkdl.spark.training import StageSummary, train_stage

_KERAS_FIT_REFUSED = {
    "steps_per_epoch": "every row is trained once per epoch; take df.limit(n) for fewer",
    "validation_steps": "all validation rows are evaluated",
    "class_weight": "add a column of sample weights and pass sample_weight='column'",
    "x": "pass the data as the first argument",
    "y": "name the label column: label='column'",
}


class SparkModel:
    """Trains a compiled Keras model on the workers of a Spark cluster.

    ::

        spark_model = SparkModel(model, mode='asynchronous')
        history = spark_model.fit(df, epochs=5, batch_size=64)
        predictions = spark_model.predict(df)

    The first eight arguments have the names and the order of Elephas' ``SparkModel``.

    Args:
        model: A built and compiled ``keras.Model``. ``fit`` changes it in place, as Keras does.
        mode: ``'asynchronous'`` (server, no waiting), ``'hogwild'`` (server, lock-free),
            ``'synchronous'`` (server, every round waits for all; with ``frequency='batch'``, its
            default, exactly one process on the global batch) or ``'allreduce'``.
        frequency: ``'auto'``, ``'batch'``, ``'epoch'`` or a number: batches between two exchanges.
        parameter_server_mode: ``'auto'`` (the fastest that a worker can reach), ``'shm'``,
            ``'socket'`` or ``'http'``.
        num_workers: Workers; None for as many as there are task slots.
        custom_objects: Name -> class or function, beside those found in the model itself.
        batch_size: Rows per step and worker.
        port: The server's port: 0 for any free one, a number, or a range ``'5000-5010'``.
        rule: How an exchange changes the weights: a name, a rule object, or None for the mode's
            default.
        communicator: For ``mode='allreduce'``: ``'horovod'``, ``'builtin'`` or ``'auto'``.
        compression: None; codecs come with a later version.
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

    Raises:
        ConfigError: A wrong argument.
        ModelError: The model is not compiled, or not built.
    """

    def __init__(
        self,
        model: Any,
        mode: str = "asynchronous",
        frequency: str | int = "auto",
        parameter_server_mode: str = "auto",
        num_workers: int | None = None,
        custom_objects: dict[str, Any] | None = None,
        batch_size: int = 32,
        port: int | str | tuple[int, int] = 0,
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
    ) -> None:
        require_name("mode", mode, config.MODES)
        if mode == "allreduce":
            raise ConfigError(
                "mode 'allreduce' is not in this version",
                expected="one of " + ", ".join(map(repr, config.SERVER_MODES)),
                received="'allreduce'",
                hint="mode='synchronous' gives the same weights through the server",
            )
        require_name("communicator", communicator, ("auto", "horovod", "builtin"))
        if communicator != "auto":
            raise ConfigError(
                "communicator has no effect in a mode with a server",
                expected="communicator='auto', its default, in mode " + repr(mode),
                received=repr(communicator),
            )
        require_name("parameter_server_mode", parameter_server_mode, config.TRANSPORTS)
        if compression is not None:
            raise ConfigError(
                "compression is not in this version", expected="None", received=repr(compression)
            )
        if num_workers is not None:
            require_int("num_workers", num_workers, 1)
        keras_base.require_compiled(model)
        self._model = model
        self.mode = mode
        self.frequency = config.parse_frequency(frequency)
        self.parameter_server_mode = parameter_server_mode
        self.num_workers = num_workers
        self.custom_objects = dict(custom_objects or {})
        self.batch_size = require_int("batch_size", batch_size, 1)
        self.communicator = communicator
        self.use_gpu = check_use_gpu(use_gpu)
        self.decoder = decoder
        self.repartition = repartition
        self.memory_budget_mb = require_int("memory_budget_mb", memory_budget_mb, 1)
        self.seed = require_int("seed", seed, 0)
        self.rule, self._window = choose_rule(mode, self.frequency, rule)
        self.server = ServerOptions(
            transport=parameter_server_mode,
            port=port,
            bind=server_bind,
            advertised=server_address,
            start_timeout_s=start_timeout_s,
            worker_timeout_s=worker_timeout_s,
        )
        self._history: Any = None
        self._epochs_trained = 0
        self._summary: StageSummary | None = None

    # -- what it holds -------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The Keras model, trained in place."""
        return self._model

    @property
    def history(self) -> Any:
        """The History of the last ``fit``, or None."""
        return self._history

    @property
    def summary(self) -> StageSummary | None:
        """Seconds, transports, GPUs and processes of the last fit's workers; None before one."""
        return self._summary

    def get_config(self) -> dict[str, Any]:
        """The arguments as plain values (the model left out), to be saved or shown."""
        return {
            "mode": self.mode,
            "frequency": self.frequency,
            "parameter_server_mode": self.parameter_server_mode,
            "num_workers": self.num_workers,
            "batch_size": self.batch_size,
            "port": self.server.port,
            "rule": {"name": self.rule.name, **self.rule.config()},
            "communicator": self.communicator,
            "use_gpu": self.use_gpu,
            "server_bind": self.server.bind,
            "server_address": self.server.advertised,
            "repartition": self.repartition,
            "memory_budget_mb": self.memory_budget_mb,
            "seed": self.seed,
            "start_timeout_s": self.server.start_timeout_s,
            "worker_timeout_s": self.server.worker_timeout_s,
        }

    def __repr__(self) -> str:
        return (
            f"SparkModel({self._model.name!r}, mode={self.mode!r}, frequency={self.frequency!r}, "
            f"rule={self.rule.name!r}, num_workers={self.num_workers})"
        )

    # -- training ------------------------------------------------------------------------------

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
        **keras_fit_arguments: Any,
    ) -> Any:
        """Trains the model on all rows, ``epochs`` times; a second call goes on from the first.

        Args:
            data: A DataFrame; an RDD of ``(x, y)`` pairs or ``LabeledPoint``; or NumPy arrays
                ``(x, y)`` or ``(x, y, sample_weight)``.
            epochs: Passes over the data.
            batch_size: Rows per step and worker; None for the constructor's.
            verbose: ``'auto'`` or 1 for a progress bar, 2 for a line per epoch, 0 for silence.
            validation_split: Share of the rows held out at random for validation, in [0, 1).
            validation_data: Rows like ``data``, evaluated by the workers after each epoch.
            callbacks: Keras callbacks; they run here on the driver, with the metrics of all
                workers. Setting ``model.stop_training`` or the learning rate reaches the workers.
            features: A vector, array, image or binary column; several numeric columns; or input
                name -> either.
            label: A column, or output name -> column. Integer class labels do where the loss
                wants one-hot vectors.
            sample_weight: A numeric column, or output name -> column.
            shuffle: New row order in each epoch.
            checkpoint_dir: Folder (local or any file system) for a checkpoint after each epoch.
            resume: Go on from the last checkpoint in ``checkpoint_dir``; ``epochs`` is then the
                total, as in ``keras``' ``initial_epoch``.
            **keras_fit_arguments: ``initial_epoch``, ``check_data=True`` (refuse NaN and
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
        keras_base.require_compiled(self._model)
        options = _fit_options(keras_fit_arguments)
        require_int("epochs", epochs, 1)
        batch_size = self._batch_size(batch_size)
        number = isinstance(validation_split, (int, float)) and validation_split is not False
        if not number or not 0.0 <= validation_split < 1.0:
            raise ConfigError(
                "validation_split is wrong", expected="0 <= share < 1",
                received=repr(validation_split),
            )  # fmt: skip
        if resume and checkpoint_dir is None:
            raise ConfigError(
                "resume needs a place to resume from", expected="checkpoint_dir=...",
                received="None",
            )  # fmt: skip
        model, signature = self._model, model_signature(self._model)
        columns = Columns(features, label, sample_weight, self.decoder)
        source = open_source(data, signature, columns)
        held_out = None
        if validation_data is not None:
            held_out = open_source(validation_data, signature, columns)
        source = add_validation(source, held_out, validation_split, self.seed)
        num_workers, at_once = self._count_workers(source)
        checkpoints = Checkpoints.at(checkpoint_dir)
        first_epoch = options.initial_epoch
        if resume and checkpoints is not None:
            first_epoch = checkpoints.restore(model) or first_epoch
        last_epoch = epochs if (resume or options.initial_epoch) else first_epoch + epochs
        if first_epoch >= last_epoch:
            return self._nothing_to_do(callbacks, last_epoch)
        level = _verbosity(verbose)
        layout = keras_base.model_layout(model)
        with ServerRun.start(
            self.server, self.rule, layout, keras_base.read_model(model, layout), num_workers,
            source.spark, gather=at_once,
        ) as starting:  # fmt: skip
            # The server's process comes up meanwhile.
            self._build_metrics(source, signature)
            archive = encode_model(model, self.custom_objects)
            run = starting.result()
            monitor = FitMonitor(
                model, callbacks, epochs=last_epoch, first_epoch=first_epoch, verbose=level,
                pull_weights=lambda: keras_base.write_model(model, layout, run.pull()),
            )  # fmt: skip
            settings = LoopSettings(
                epochs=last_epoch, first_epoch=first_epoch, batch_size=batch_size,
                window=self._window, shuffle=shuffle, seed=self.seed + 7919 * self._epochs_trained,
                wait_for_driver=self.rule.blocking and monitor.has_callbacks,
                follow_schedule=not self.rule.blocking,
                check_data=options.check_data,
                memory_budget_bytes=self.memory_budget_mb << 20,
            )  # fmt: skip
            task = TrainTask(
                archive, source.spec, settings, run.strategy,
                num_workers, self.use_gpu, source.spec.role_column is not None,
            )  # fmt: skip

            def save_checkpoint(epoch: int) -> None:
                if checkpoints is not None:
                    if not monitor.has_callbacks:
                        keras_base.write_model(model, layout, run.pull())
                    checkpoints.save(model, epoch)

            monitor.begin()
            self._summary = train_stage(
                source, model, run, task, monitor, repartition=self.repartition,
                on_epoch=save_checkpoint,
            )  # fmt: skip
        if checkpoints is not None:
            checkpoints.save(model, monitor.epochs_done)
        self._epochs_trained += monitor.epochs_done - first_epoch
        self._history = monitor.end()
        return self._history

    def _nothing_to_do(self, callbacks: Any, epochs: int) -> Any:
        monitor = FitMonitor(
            self._model, callbacks, epochs=epochs, first_epoch=epochs, verbose=0,
            pull_weights=lambda: None,
        )  # fmt: skip
        monitor.begin()
        self._history = monitor.end()
        return self._history

    def _count_workers(self, source: Source) -> tuple[int, int]:
        """Workers of the run, and how many of them can run at the same time (0: unknown)."""
        if not self.repartition:
            count: int = source.frame.rdd.getNumPartitions()
            if self.num_workers not in (None, count):
                raise ConfigError(
                    "num_workers and the data's partitions differ",
                    expected=f"num_workers={count} (or None) with repartition=False",
                    received=f"num_workers={self.num_workers}",
                )
        else:
            count = self.num_workers or default_parallelism(source.spark)
        slots = wait_for_slots(source.spark, count, 15.0 if self.rule.blocking else 0.0)
        if self.rule.blocking and slots is not None and slots < count:
            raise ResourceError(
                f"mode {self.mode!r} needs all workers at the same time",
                expected=f"{count} task slots",
                received=f"{slots}",
                hint=f"num_workers={max(slots, 1)}, more executors, or mode='asynchronous'",
            )
        return count, 0 if slots is None else min(count, slots)

    def _build_metrics(self, source: Source, signature: Signature) -> None:
        """Makes the model's metric variables here, to put the workers' numbers into them."""
        spec = source.spec
        example = {
            "x": {n: _Example(s.shape, s.dtype) for n, s in spec.features.items()},
            "y": {n: _Example(s.shape, s.dtype) for n, s in spec.labels.items()},
        }
        weights: Any = {n: _Example(s.shape, s.dtype) for n, s in spec.weights.items()} or None
        try:
            keras_base.build_metrics(self._model, example["x"], example["y"], weights)  # type: ignore[arg-type]
        except Exception as error:
            raise DataError(
                f"model {self._model.name!r} cannot take these columns",
                expected=f"inputs {_shapes(signature.inputs)}, outputs "
                f"{_shapes(signature.outputs)}",
                received=f"{type(error).__name__}: {error}",
                hint="try model.fit on a few rows as NumPy arrays",
            ) from error

    def _batch_size(self, batch_size: int | None) -> int:
        return self.batch_size if batch_size is None else require_int("batch_size", batch_size, 1)

    # -- inference -----------------------------------------------------------------------------

    def predict(
        self,
        data: Any,
        batch_size: int | None = None,
        features: Any = "features",
        output_column: str = "prediction",
    ) -> Any:
        """The model's outputs for every row.

        Args:
            data: A DataFrame, an RDD of inputs, or a NumPy array (or dict, or list of them).
            batch_size: Rows per forward pass; None for the constructor's.
            features: See :meth:`fit`.
            output_column: Name of the prediction column of a DataFrame.

        Returns:
            For a DataFrame the same rows in the same order, all columns kept, with a prediction
            column more: float, or array of floats (lazy: Spark computes it when it is asked).
            For an RDD an RDD of NumPy arrays. For NumPy arrays a NumPy array.

        Raises:
            DataError: The data do not fit the model.
        """
        batch_size = self._batch_size(batch_size)
        if not (is_frame(data) or is_rdd(data)):
            return self._model.predict(data, batch_size=batch_size, verbose=0)
        archive = encode_model(self._model, self.custom_objects)
        signature = model_signature(self._model)
        if is_rdd(data):
            return predict_rdd(
                data, signature, archive, batch_size=batch_size, use_gpu=self.use_gpu
            )
        return predict_frame(
            data, signature, archive, Columns(features, decoder=self.decoder),
            batch_size=batch_size, use_gpu=self.use_gpu, output_column=output_column,
        )  # fmt: skip

    def evaluate(
        self,
        data: Any,
        batch_size: int | None = None,
        features: Any = "features",
        label: Any = "label",
        sample_weight: Any = None,
        verbose: str | int = 0,
    ) -> dict[str, Any]:
        """Loss and metrics over all rows, exactly as one process would compute them.

        The partitions' metric *states* are merged, so that an AUC is the AUC of all rows and not
        a mean of AUCs.

        Args:
            data: See :meth:`fit`.
            batch_size: Rows per forward pass; None for the constructor's.
            features: See :meth:`fit`.
            label: See :meth:`fit`.
            sample_weight: See :meth:`fit`.
            verbose: 1 prints the result.

        Returns:
            Name -> value, ``'loss'`` first: a float, or a list for a metric per class.

        Raises:
            DataError: The data do not fit the model, or there are none.
        """
        batch_size = self._batch_size(batch_size)
        signature = model_signature(self._model)
        columns = Columns(features, label, sample_weight, self.decoder)
        if isinstance(data, (tuple, list)):
            results = self._evaluate_numpy(data, signature, batch_size)
        else:
            source = open_source(data, signature, columns)
            self._build_metrics(source, signature)
            state = evaluate_source(
                source, encode_model(self._model, self.custom_objects), batch_size=batch_size,
                use_gpu=self.use_gpu,
            )  # fmt: skip
            results = keras_base.metric_results(self._model, state)
        if _verbosity(verbose, auto=0):
            print(" - ".join(f"{k}: {np.round(v, 4)}" for k, v in results.items()), flush=True)
        return results

    def _evaluate_numpy(self, data: Any, signature: Signature, batch_size: int) -> dict[str, Any]:
        from sparkdl.data import Batches, rows_from_numpy
        from sparkdl.learner import make_learner

        x, y = data[0], data[1]
        weight = data[2] if len(data) == 3 else None
        rows = rows_from_numpy(x, y, weight, wanted_spec(x, y, weight, signature))
        windows = Batches(rows, batch_size, shuffle=False).windows(0, 8)
        state = make_learner(self._model).evaluate(windows)
        if not state.size:
            raise DataError("there are no rows to evaluate", received="0 rows")
        return keras_base.metric_results(self._model, np.asarray(state))

    # -- files ---------------------------------------------------------------------------------

    def save(self, path: str, overwrite: bool = True) -> None:
        """Writes the model with its optimizer state as a ``.keras`` file.

        Args:
            path: A local path, ``file://``, ``hdfs://``, or any URI of pyarrow or fsspec.
            overwrite: False refuses an existing file.

        Raises:
            ResourceError: The path cannot be written.
            ConfigError: The path does not end in ``.keras``.
        """
        if not str(path).endswith(".keras"):
            raise ConfigError(
                "the path does not name a Keras file", expected="a path that ends in '.keras'",
                received=repr(path),
            )  # fmt: skip
        if not overwrite and persistence.exists(path):
            raise ResourceError(
                f"{path!r} exists", expected="a new path", received="an existing one",
                hint="save(path, overwrite=True)",
            )  # fmt: skip
        persistence.check_writable(path)
        try:
            content = persistence.model_bytes(self._model)
        except Exception as error:
            raise ModelError(
                f"model {self._model.name!r} cannot be saved",
                received=f"{type(error).__name__}: {error}",
            ) from error
        persistence.write_bytes(path, persistence.with_settings(content, self.get_config()))


def load_spark_model(
    path: str,
    custom_objects: dict[str, Any] | None = None,
    safe_mode: bool = True,
    **overrides: Any,
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
        state.

    Raises:
        ResourceError: The path cannot be read.
        ModelError: The file holds no compiled Keras model.
    """
    content = persistence.read_bytes(path)
    settings = persistence.settings_of(content)
    try:
        model = persistence.model_from_bytes(content, custom_objects, safe_mode)
    except Exception as error:
        raise ModelError(
            f"{path!r} cannot be loaded",
            received=f"{type(error).__name__}: {error}",
            hint="pass custom_objects={'MyLayer': MyLayer} for classes of your own, and "
            "safe_mode=False for Lambda layers of a file that you trust",
        ) from error
    strange = sorted(set(settings) - set(inspect.signature(SparkModel).parameters))
    if strange:
        raise ModelError(
            f"{path!r} was written by another version of sparkdl",
            expected="settings that this version has",
            received=", ".join(strange),
            hint="keras.models.load_model reads the model itself",
        )
    port = settings.get("port", 0)
    settings["port"] = tuple(port) if isinstance(port, list) else port
    rule = settings.pop("rule", None)
    if rule:
        from sparkdl.ps.rules import make_rule, rule_names

        name = rule.pop("name")
        if name not in rule_names():
            raise ModelError(
                f"{path!r} was trained with a rule of your own",
                expected="one of " + ", ".join(map(repr, rule_names())),
                received=repr(name),
                hint="SparkModel(keras.models.load_model(path), rule=your rule)",
            )
        settings["rule"] = make_rule(name, **rule)
    return SparkModel(model, custom_objects=custom_objects, **{**settings, **overrides})


@dataclass(frozen=True)
class _Example:
    """Shape and dtype of a batch, for Keras' symbolic build."""

    row_shape: Any
    dtype: str
    shape: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", (None, *self.row_shape))


@dataclass(frozen=True)
class _FitOptions:
    initial_epoch: int = 0
    check_data: bool = False


def _fit_options(arguments: dict[str, Any]) -> _FitOptions:
    known = set(_FitOptions.__dataclass_fields__)
    for name in arguments:
        if name in known:
            continue
        raise ConfigError(
            f"fit does not take {name!r}",
            expected="the arguments of fit, and " + ", ".join(sorted(known)),
            received=f"{name}={arguments[name]!r}",
            hint=_KERAS_FIT_REFUSED.get(name, "see help(SparkModel.fit)"),
        )
    options = _FitOptions(**arguments)
    require_int("initial_epoch", options.initial_epoch, 0)
    return options


def _verbosity(verbose: str | int, auto: int = 1) -> int:
    if verbose == "auto":
        return auto
    if verbose not in (0, 1, 2):
        raise ConfigError("verbose is wrong", expected="'auto', 0, 1 or 2", received=repr(verbose))
    return int(verbose)


def _shapes(specs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {spec.shape}" for name, spec in specs.items())
