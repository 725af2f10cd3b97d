"""How a ``SparkModel`` shows its settings, predicts, evaluates, and is written to files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, Generic, NoReturn, TypeVar, overload

import numpy as np

from sparkdl.config import COLUMNS, FitConfig
from sparkdl.errors import ConfigError, ReadOnlyError, UnpicklableError, closest
from sparkdl.files import storage
from sparkdl.files.model_file import check_path, write_model
from sparkdl.launch.interrupts import heard, held
from sparkdl.learner.archives.archive import encode_model, model_bytes
from sparkdl.learner.checks import compile_parts
from sparkdl.learner.prediction.export import FORMATS, export_model
from sparkdl.learner.prediction.model_source import KerasSource
from sparkdl.learner.preprocessing import give_space
from sparkdl.learner.signature import model_signature
from sparkdl.learner.state import metric_state
from sparkdl.process.host_load import require_descriptors
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require_flag, require_int, require_name, require_path, shown
from sparkdl.spark.fit.arguments import refuse_labels_apart, verbosity
from sparkdl.spark.fit.choice import ChosenExchange
from sparkdl.spark.fit.trained_model import TrainedModel, prepare_metrics, refuse_export
from sparkdl.spark.fit.trained_tables import TrainedTable, stored_tables
from sparkdl.spark.fit.training import StageSummary
from sparkdl.spark.forms.arrays import takes_labels_apart
from sparkdl.spark.forms.opening import form_of
from sparkdl.spark.forms.shipped import removes_tables
from sparkdl.spark.forms.sources import Columns
from sparkdl.spark.inference.evaluate import evaluate_arrays, evaluate_source
from sparkdl.spark.inference.predict import Names, PredictionChoice
from sparkdl.spark.predict import predict_data
from sparkdl.tables.checkpoints import save_beside
from sparkdl.tracking.profile import Facts, Profile, profile_of

T = TypeVar("T")


class Setting(Generic[T]):
    """A read-only attribute of a :class:`SparkModel`: an argument that it was made with."""

    def __init__(self, read: Callable[[ModelSettings], T]) -> None:
        self._read = read

    def __set_name__(self, owner: type[ModelSettings], name: str) -> None:
        self._name = name
        self.__doc__ = f"The argument ``{name}``, or what was chosen for it; read-only."

    @overload
    def __get__(self, model: None, owner: type[ModelSettings]) -> Setting[T]: ...
    @overload
    def __get__(self, model: ModelSettings, owner: type[ModelSettings]) -> T: ...
    def __get__(self, model: ModelSettings | None, owner: type[ModelSettings]) -> T | Setting[T]:
        return self if model is None else self._read(model)

    def __set__(self, model: ModelSettings, value: T) -> None:
        raise ReadOnlyError(
            f"{self._name} of a SparkModel cannot be changed",
            expected=f"{self._name}={self._read(model)!r}, with which it was made",
            received=repr(value),
            hint=f"make another one: SparkModel(spark_model.model, ..., {self._name}={value!r})",
        )


class ModelSettings:
    """The settings, the model and what the last fit left; see ``SparkModel``."""

    def __init__(
        self,
        config: FitConfig,
        exchange: ChosenExchange,
        model: object,
        custom_objects: Mapping[str, Any],
        decoder: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None,
    ) -> None:
        self._config = config
        self._exchange = exchange
        self._trained = TrainedModel(model)
        self._custom_objects = dict(custom_objects)
        self._decoder = decoder
        give_space(model, decoder)
        self._history: Any = None
        self._epochs_trained = 0
        self._summary: StageSummary | None = None
        self._facts: Facts | None = None
        self._ensemble: list[Any] = []
        self._columns = Columns()

    def __setattr__(self, name: str, value: object) -> None:
        """Refuses a public name that has no effect; a class of the user's own may have more.

        Raises:
            ReadOnlyError: There is no such attribute, or it cannot be assigned to.
        """
        cls = type(self)
        known = getattr(cls, name, None)
        if isinstance(known, property) and known.fset is None:
            raise ReadOnlyError(
                f"{name} of a SparkModel cannot be changed",
                expected="what fit leaves there" if name != "model" else "the model of its making",
                received=shown(value),
                hint="make another one: SparkModel(model, ...)" if name == "model" else "",
            )
        if cls.__module__.startswith("sparkdl.") and known is None and not name.startswith("_"):
            arguments = [n for n in dir(cls) if isinstance(getattr(cls, n), Setting)]
            meant = closest(name, arguments)
            raise ReadOnlyError(
                f"a SparkModel has no attribute {name!r}",
                expected="settings as arguments of SparkModel: " + ", ".join(arguments),
                received=f"{name} = {shown(value)}",
                hint=f"make another one: SparkModel(spark_model.model, ..., {meant}={value!r})"
                if meant
                else "",
            )
        super().__setattr__(name, value)

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
        """The parts of the workers' time in the last fit; None before one. ``print`` draws them."""
        return None if self._facts is None else profile_of(self._facts)

    @property
    def tables(self) -> Mapping[str, TrainedTable]:
        """Table name -> its rows after a fit, of a model with ``sparkdl.layers.ServedEmbedding``.

        ``tables['ads'].pull(ids)`` gives rows, ``len(...)`` their number, ``.to_dataframe()`` all
        of them for Spark; ``.load(df)`` sets rows, ``.shrink(below=2)`` removes some. Nothing is
        loaded whole. Empty for other models.

        Raises:
            ResourceError: The files of the fit are gone, or not whole.
        """
        return stored_tables(self._trained)

    mode = Setting(lambda self: self._config.mode)
    frequency = Setting(lambda self: self._config.frequency)
    parameter_server_mode = Setting(lambda self: self._config.parameter_server_mode)
    num_workers = Setting(lambda self: self._config.num_workers)
    custom_objects = Setting(lambda self: dict(self._custom_objects))
    batch_size = Setting(lambda self: self._config.batch_size)
    port = Setting(lambda self: self._config.network.port)
    rule = Setting(lambda self: self._exchange.rule)
    communicator = Setting(lambda self: self._config.communicator)
    compression = Setting(lambda self: self._config.compression)
    use_gpu = Setting(lambda self: self._config.use_gpu)
    decoder = Setting(lambda self: self._decoder)
    repartition = Setting(lambda self: self._config.repartition)
    seed = Setting(lambda self: self._config.seed)
    pad = Setting(lambda self: copy(self._config.pad))
    on_nan = Setting(lambda self: self._config.on_nan)
    resources = Setting(lambda self: copy(self._config.resources))
    network = Setting(lambda self: self._config.network)
    limits = Setting(lambda self: self._config.limits)

    def get_config(self) -> dict[str, Any]:
        """The arguments as plain values (the model left out), to be saved or shown."""
        return self._config.to_dict()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuses ``pickle``, ``copy`` and the closures of functions that go to executors.

        Raises:
            UnpicklableError: Always.
        """
        raise UnpicklableError(
            "a SparkModel stays on the driver: it is neither pickled nor copied",
            expected="its Keras model, spark_model.model, where a function of executors needs one",
            received=repr(self),
            hint="spark_model.save('model.keras') and sparkdl.load_spark_model('model.keras') make "
            "another one; within a function use spark_model.model, or values taken before",
        )

    def __repr__(self) -> str:
        return (
            f"SparkModel({self.model.name!r}, mode={self.mode!r}, frequency={self.frequency!r}, "
            f"rule={self.rule.name!r}, num_workers={self.num_workers})"
        )


class ModelInference(ModelSettings):
    """The inference of a ``SparkModel``: all that it does with its model beside training."""

    @lists_its_arguments
    def predict(
        self,
        data: object,
        batch_size: int | None = None,
        features: object = None,
        output_column: str = "prediction",
        *,
        outputs: Iterable[str] | Mapping[str, str] | None = None,
        probability_column: Names = None,
        class_column: Names = None,
        layers: Mapping[str, str] | None = None,
        dtype: str | None = None,
        handle_invalid: str = "error",
    ) -> Any:
        """The model's outputs for every row, in one pass.

        Args:
            data: A DataFrame of Spark (also a streaming one), pandas or polars, an Arrow table, a
                path, an RDD of inputs, or an array or list of rows (or dict, or list of them).
            batch_size: Rows per forward pass; None for the constructor's.
            features: See :meth:`SparkModel.fit`; None for those of the last ``fit`` on a DataFrame.
            output_column: Name of the prediction column of a DataFrame.
            outputs, probability_column, class_column, layers, dtype, handle_invalid: See
                :func:`sparkdl.predict`.

        Returns:
            For a DataFrame one of Spark: the same rows in the same order, all columns kept, with a
            prediction column more, of the output's dtype or arrays (lazy: Spark computes it when
            asked for). For an RDD an RDD of NumPy arrays. For arrays and lists a NumPy array.

        Raises:
            DataError: The data do not fit the model.
            ConfigError: Columns that the model has no outputs for, or no form of data that is
                known.
        """
        require_descriptors("predict")
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

    @takes_labels_apart
    @lists_its_arguments
    @heard()
    def evaluate(
        self,
        data: object,
        batch_size: int | None = None,
        features: object = None,
        label: object = None,
        sample_weight: object = None,
        verbose: str | int = 0,
        group: object = None,
    ) -> dict[str, Any]:
        """Loss and metrics over all rows, exactly as one process would compute them.

        The partitions' metric *states* are merged, so that an AUC is the AUC of all rows and not
        a mean of AUCs.

        Args:
            data: See :meth:`SparkModel.fit`, also for ``evaluate(x, y)``.
            batch_size: Rows per forward pass; None for the constructor's.
            features: See :meth:`SparkModel.fit`; None for those of the last ``fit`` on a DataFrame.
            label: See :meth:`SparkModel.fit`; None as for ``features``.
            sample_weight: See :meth:`SparkModel.fit`.
            verbose: 1 prints the result.
            group: See :meth:`SparkModel.fit`, for losses and metrics that compare rows.

        Returns:
            Name -> value, ``'loss'`` first: a float, or a list for a metric per class.

        Raises:
            DataError: The data do not fit the model, or there are none.
            ModelError: The model has no loss to compute.
        """
        refuse_labels_apart("evaluate", "batch_size", batch_size)
        require_descriptors("evaluate")
        compile_parts.require_evaluable(self.model)
        batch_size = self._batch_size(batch_size)
        signature = model_signature(self.model)
        columns = replace(self._columns_of(features, label, sample_weight), group=group)
        with removes_tables():
            form = form_of(data)
            arrays = form.arrays(signature, columns) if group is None else None
            if arrays is not None:
                state = evaluate_arrays(self.model, arrays, signature, batch_size=batch_size)
            else:
                source = form.open(signature, columns)
                with held():
                    prepare_metrics(self.model, source, batch_size)
                    archive = encode_model(self.model, self.custom_objects)
                state = evaluate_source(
                    source, archive, batch_size=batch_size, use_gpu=self.use_gpu
                )
        results = metric_state.metric_results(self.model, state)
        if verbosity(verbose, auto=0):
            print(" - ".join(f"{k}: {np.round(v, 4)}" for k, v in results.items()), flush=True)
        return results

    @lists_its_arguments
    def save(self, path: str, overwrite: bool = True) -> None:
        """Writes the model with its optimizer state as a ``.keras`` file.

        The rows of a model with tables are copied into the folder ``<path>.tables``; both can be
        copied elsewhere together.

        Args:
            path: As Spark understands it: ``hdfs://``, ``dbfs:/``, ``s3a://``, ... and, without a
                scheme, its default file system; ``file:/`` is this machine. Or any URI of pyarrow
                or fsspec.
            overwrite: False refuses an existing file.

        Raises:
            ResourceError: The path cannot be written.
            ConfigError: The path does not end in ``.keras``; or another process has changed the
                tables that this model has read from there.
        """
        path = require_path("path", path)
        require_descriptors("save")
        check_path(path, overwrite=require_flag("overwrite", overwrite))
        settings = self._file_settings()
        with self._trained.tables_lock:
            state = self._trained.beside(self._epochs_trained)
            save_beside(
                model_bytes(self.model), path, lambda it: write_model(path, it, settings, state)
            )

    def _file_settings(self) -> dict[str, Any]:
        columns = {"features": self._columns.features, "label": self._columns.label}
        return {**self._config.to_file(), COLUMNS: columns}

    @lists_its_arguments
    def export(self, path: str, file_format: str = "tf_saved_model") -> None:
        """Writes the forward pass and the weights for runtimes without Keras and sparkdl.

        Args:
            path: See :meth:`save`: a folder for ``'tf_saved_model'``, else a file.
            file_format: ``'tf_saved_model'`` (TensorFlow Serving, Triton; :func:`sparkdl.predict`
                takes it, too), ``'onnx'`` (ONNX Runtime, Triton, TensorRT; ``pip install
                'sparkdl-keras[onnx]'``), ``'openvino'`` (``pip install openvino``), ``'litert'``
                (phones) or ``'torch'`` (``torch.export``; with Keras on PyTorch): the formats of
                the installed Keras.

        Raises:
            UnknownNameError: No such format.
            ResourceError: A package that Keras needs is missing, or the path cannot be written.
            ModelError: Keras cannot export the model.
            ConfigError: The path is a folder with other files than those of a SavedModel, which is
                replaced.
        """
        path = require_path("path", path)
        require_name("format of an export", file_format, FORMATS)
        if not FORMATS[file_format]:
            _refuse_other_files(path)
        refuse_export(self.model)
        export_model(self.model, path, file_format)

    def _batch_size(self, batch_size: int | None) -> int:
        return self.batch_size if batch_size is None else require_int("batch_size", batch_size, 1)

    def _columns_of(self, features: Any, label: Any, sample_weight: Any) -> Columns:
        """The columns that the user names, and those of the last fit for what is None."""
        return Columns(
            self._columns.features if features is None else features,
            self._columns.label if label is None else label, sample_weight, self.decoder, self.pad,
        )  # fmt: skip


def _refuse_other_files(folder: str) -> None:
    """Refuses a folder of the user's, among whose files those of a SavedModel would be."""
    folder = folder.rstrip("/")
    if not storage.exists(folder) or storage.exists(f"{folder}/saved_model.pb"):
        return
    found = storage.list_files(folder, "")
    if found:
        raise ConfigError(
            "a SavedModel is a folder of its own",
            expected="a folder that is not there, is empty, or has a SavedModel, which is replaced",
            received=f"{folder!r}, a file"
            if found == [folder]
            else f"{folder!r}, which has {found[0].rpartition('/')[2]!r}",
            hint=f"export({folder + '/model'!r})",
        )
