"""``predict``: a model's outputs for every row, also of models that were never compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sparkdl.config import UseGpu, check_pad
from sparkdl.errors import ConfigError
from sparkdl.learner.framework import debug_limits
from sparkdl.learner.prediction.model_source import ModelSource, open_model
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require_int, require_objects
from sparkdl.spark.forms.arrays import ArraysForm, input_arrays
from sparkdl.spark.forms.frames import PathForm
from sparkdl.spark.forms.matching import Decoder, InputColumns
from sparkdl.spark.forms.opening import form_of
from sparkdl.spark.forms.rdds import RddForm
from sparkdl.spark.forms.sequences import Pad
from sparkdl.spark.forms.sources import Columns
from sparkdl.spark.inference.predict import Names, PredictionChoice, predict_columns, predict_rdd
from sparkdl.spark.session.running import require_running_rdd


@lists_its_arguments
def predict(
    model: Any,
    data: Any,
    batch_size: int = 32,
    features: InputColumns = "features",
    output_column: str = "prediction",
    *,
    outputs: Iterable[str] | Mapping[str, str] | None = None,
    probability_column: Names = None,
    class_column: Names = None,
    layers: Mapping[str, str] | None = None,
    dtype: str | None = None,
    handle_invalid: str = "error",
    decoder: Decoder | Mapping[str, Decoder] | None = None,
    pad: Pad | None = None,
    custom_objects: dict[str, Any] | None = None,
    safe_mode: bool = True,
    use_gpu: UseGpu = "auto",
) -> Any:
    """A model's outputs for every row, in one pass; the model need not be compiled.

    ::

        scored = sparkdl.predict('model.keras', df, class_column='label', outputs=[],
                                 layers={'avg_pool': 'embedding'})

    Args:
        model: A built ``keras.Model``, or the path or URI of a ``.keras`` file, an HDF5 file
            (``.h5``) or the folder of a SavedModel, which is a program: load only those that you
            trust.
        data: A DataFrame of Spark, also a streaming one, of pandas or polars, or an Arrow table;
            the path of Parquet or TFRecord files; an RDD of inputs; or arrays or lists of them.
        batch_size: Rows per forward pass.
        features: See :meth:`sparkdl.SparkModel.fit`.
        output_column: Name of the column of a model with one output; several outputs become
            ``<output_column>_<output name>``.
        outputs: The outputs wanted as columns: names, or output name -> column; None for all.
        probability_column: A column of class probabilities (array), or output name -> column.
            Logits go through softmax or sigmoid first, as the loss of the compiled model says; a
            single unit p becomes ``[1 - p, p]``.
        class_column: A column of the most probable class (int), or output name -> column.
        layers: Layer name -> column of that layer's output (functional and Sequential models).
        dtype: Of all columns but classes: ``'float32'`` or ``'float64'``; None: that of the output
            (half precision as float32, booleans, integers and texts as such). An integer that the
            dtype does not hold is an error.
        handle_invalid: Rows that no model can take, with a null in a feature column (or in an
            array there), or whose value the decoder raises on: ``'error'``, ``'skip'`` (left out),
            or ``'keep'`` (their predictions are null). NaN is a number here.
        decoder: See :class:`sparkdl.SparkModel`.
        pad: See there; for the columns of a DataFrame or a path.
        custom_objects: Name -> class or function that the model uses.
        safe_mode: False also loads what runs code from a file (``Lambda`` layers).
        use_gpu: See :class:`sparkdl.SparkModel`.

    Returns:
        For a DataFrame or a path a DataFrame of Spark: the same rows in the same order with all
        their columns, and the columns asked for after them (lazy: Spark computes them when they are
        asked for). For an RDD an RDD of NumPy arrays. For arrays and lists a NumPy array.

    Raises:
        ModelError: No model that can predict.
        ResourceError: The path cannot be read.
        DataError: The data do not fit the model.
        ConfigError: Columns that the model has no outputs for, no form of data that is known, or
            ``pad`` has no effect.
    """
    batch_size = require_int("batch_size", batch_size, 1)
    check_pad(pad)
    choice = PredictionChoice(
        output_column, outputs, probability_column, class_column, layers or {}, dtype,
        handle_invalid,
    )  # fmt: skip
    source = open_model(model, require_objects(custom_objects), safe_mode=safe_mode)
    inputs = Columns(features, decoder=decoder, pad=pad)
    return predict_data(source, data, inputs, choice, batch_size=batch_size, use_gpu=use_gpu)


def predict_data(
    source: ModelSource,
    data: Any,
    inputs: Columns,
    choice: PredictionChoice,
    *,
    batch_size: int,
    use_gpu: UseGpu,
) -> Any:
    """See :func:`predict`.

    Args:
        source: The model.
        data: A DataFrame, an Arrow table, a path, an RDD of inputs, or arrays.
        inputs: Which columns the model reads.
        choice: Which columns to append.
        batch_size: Rows per forward pass.
        use_gpu: See :class:`sparkdl.SparkModel`.
    """
    form = form_of(data)
    if not form.has_columns and not choice.is_plain:
        raise ConfigError(
            "only a DataFrame can have several columns of predictions",
            expected="a DataFrame, or none of outputs, probability_column, class_column, layers, "
            "dtype and handle_invalid",
            received=f"{type(data).__module__}.{type(data).__qualname__}",
        )
    signature = source.signature
    if isinstance(form, ArraysForm):
        return _predict_arrays(source, input_arrays(form.data, signature.inputs), batch_size)
    if debug_limits()[1] is not None:
        raise ConfigError(
            "predict gives every row of a DataFrame or RDD a prediction",
            expected="keras.config.set_max_steps_per_epoch(None)",
            received=f"a limit of {debug_limits()[1]} batches",
            hint="predict(df.limit(rows)); the limit holds for fit, evaluate and arrays",
        )
    archive = source.encode(choice.outputs_of(signature), list(choice.layers))
    if isinstance(form, RddForm):
        require_running_rdd(form.data)
        return predict_rdd(form.data, archive, batch_size=batch_size, use_gpu=use_gpu)
    frame = form.frame()
    if isinstance(form, PathForm):
        form.warn_of_lost_columns()
    return predict_columns(
        frame, archive, inputs, choice.columns(archive, signature),
        batch_size=batch_size, use_gpu=use_gpu, handle_invalid=choice.invalid,
    )  # fmt: skip


def _predict_arrays(source: ModelSource, x: Any, batch_size: int) -> Any:
    """The model's predictions for arrays, made here; nothing for no rows, of which Keras fails."""
    from sparkdl.learner.structure import map_arrays

    arrays = list(x.values()) if isinstance(x, dict) else x if isinstance(x, list) else [x]
    if not all(isinstance(a, np.ndarray) and a.shape[:1] == (0,) for a in arrays):
        return source.predict(x, batch_size)
    one = map_arrays(lambda array: np.zeros((1, *array.shape[1:]), array.dtype), x)
    return map_arrays(lambda array: array[:0], source.predict(one, batch_size))
