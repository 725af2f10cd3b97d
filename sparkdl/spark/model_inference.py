"""``ModelInference``: how a ``SparkModel`` predicts, evaluates, and is written to files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sparkdl.config import COLUMNS
from sparkdl.errors import ConfigError
from sparkdl.files import storage
from sparkdl.files.model_file import check_path, write_model
from sparkdl.launch.interrupts import heard, held
from sparkdl.learner.archives.archive import encode_model, model_bytes
from sparkdl.learner.checks import compile_parts
from sparkdl.learner.prediction.export import FORMATS, export_model
from sparkdl.learner.prediction.model_source import KerasSource
from sparkdl.learner.signature import model_signature
from sparkdl.learner.state import metric_state
from sparkdl.process.host_load import require_descriptors
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require_flag, require_int, require_name, require_path
from sparkdl.spark.fit.arguments import refuse_labels_apart, verbosity
from sparkdl.spark.fit.tables import refuse_export
from sparkdl.spark.fit.trained_model import prepare_metrics
from sparkdl.spark.forms.arrays import takes_labels_apart
from sparkdl.spark.forms.opening import form_of
from sparkdl.spark.forms.shipped import removes_tables
from sparkdl.spark.forms.sources import Columns
from sparkdl.spark.inference.evaluate import evaluate_arrays, evaluate_source
from sparkdl.spark.inference.predict import Names, PredictionChoice
from sparkdl.spark.model_settings import ModelSettings
from sparkdl.spark.predict import predict_data
from sparkdl.tables.beside import save_beside


class ModelInference(ModelSettings):
    """The inference of a ``SparkModel``: all that it does with its model beside training."""

    @lists_its_arguments
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
            outputs: See :func:`sparkdl.predict`, as for the arguments after it.
            probability_column: See there.
            class_column: See there.
            layers: See there.
            dtype: See there.
            handle_invalid: See there.

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
            data: See :meth:`SparkModel.fit`, also for ``evaluate(x, y)``.
            batch_size: Rows per forward pass; None for the constructor's.
            features: See :meth:`SparkModel.fit`; None for those of the last ``fit`` on a DataFrame.
            label: See :meth:`SparkModel.fit`; None as for ``features``.
            sample_weight: See :meth:`SparkModel.fit`.
            verbose: 1 prints the result.

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
        columns = self._columns_of(features, label, sample_weight)
        with removes_tables():
            form = form_of(data)
            arrays = form.arrays(signature)
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
        """The settings in a model file, beside the model."""
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
            self._columns.label if label is None else label,
            sample_weight,
            self.decoder,
            self.pad,
        )


def _refuse_other_files(folder: str) -> None:
    """Refuses a folder of the user's, among whose files those of a SavedModel would be.

    Raises:
        ConfigError: It has files, and is no SavedModel.
    """
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
