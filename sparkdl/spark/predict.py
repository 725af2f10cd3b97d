"""``predict``: a model's outputs for every row, compiled or not; the same as functions of SQL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import numpy as np
from pyspark.sql import SparkSession

from sparkdl.config import UseGpu, check_pad
from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.learner.framework import debug_limits
from sparkdl.learner.prediction.model_source import ModelSource, open_model
from sparkdl.learner.preprocessing import LayerEncoder
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require_int, require_objects
from sparkdl.spark.forms.arrays import ArraysForm, input_arrays
from sparkdl.spark.forms.frames import FrameForm
from sparkdl.spark.forms.matching import Decoder, InputColumns, decoders_of
from sparkdl.spark.forms.opening import form_of
from sparkdl.spark.forms.rdds import RddForm
from sparkdl.spark.forms.sequences import Pad, mask_inputs, paddings_of
from sparkdl.spark.forms.sources import Columns
from sparkdl.spark.inference.function import UdfTask, column_function, give_rows
from sparkdl.spark.inference.output_columns import Form
from sparkdl.spark.inference.predict import Names, PredictionChoice, predict_columns, predict_rdd
from sparkdl.spark.session.running import (
    context_of,
    require_running,
    require_running_rdd,
    this_interpreter,
)


@lists_its_arguments
def predict(
    model: object,
    data: object,
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
        data: A DataFrame of Spark (streams, too), ``pyspark.pandas``, pandas or polars, or an Arrow
            table; the path of Parquet or TFRecord files; an RDD, arrays or lists of inputs.
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
        decoder, use_gpu: As for :class:`sparkdl.SparkModel`.
        pad: See there; for the columns of a DataFrame or a path.
        custom_objects: Name -> class or function that the model uses.
        safe_mode: False also loads what runs code from a file (``Lambda`` layers).

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
    objects = require_objects(custom_objects)
    source = open_model(model, objects, safe_mode=safe_mode, decoder=decoder)
    inputs = Columns(features, decoder=decoder, pad=pad)
    return predict_data(source, data, inputs, choice, batch_size=batch_size, use_gpu=use_gpu)


def predict_data(
    source: ModelSource,
    data: object,
    inputs: Columns,
    choice: PredictionChoice,
    *,
    batch_size: int,
    use_gpu: UseGpu,
) -> Any:
    """See :func:`predict`.

    Args:
        choice: Which columns to append.
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
        given = inputs.decoder
        encoder = LayerEncoder.of(given.get("features") if isinstance(given, Mapping) else given)
        data = form.data if encoder is None else encoder.made(np.ravel(form.data), "features")
        x = data if signature.preprocessing else input_arrays(data, signature.inputs)
        return _predict_arrays(source, x, batch_size)
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
    if isinstance(form, FrameForm):
        form.tell_of_lost_columns()
    return predict_columns(
        frame, archive, inputs, choice.columns(archive, signature),
        batch_size=batch_size, use_gpu=use_gpu, handle_invalid=choice.invalid,
    )  # fmt: skip


def _predict_arrays(source: ModelSource, x: object, batch_size: int) -> Any:
    """The model's predictions for arrays, made here; nothing for no rows, of which Keras fails."""
    from sparkdl.learner.structure import map_arrays

    arrays = list(x.values()) if isinstance(x, dict) else x if isinstance(x, list) else [x]
    if not all(isinstance(a, np.ndarray) and a.shape[:1] == (0,) for a in arrays):
        return source.predict(x, batch_size)
    one = map_arrays(lambda array: np.zeros((1, *array.shape[1:]), array.dtype), x)
    return map_arrays(lambda array: array[:0], source.predict(one, batch_size))


RETURNS: tuple[str, ...] = tuple(name for name in get_args(Form) if name != "raw")


@lists_its_arguments
def predict_udf(
    model: object,
    *,
    batch_size: int = 64,
    output: str | None = None,
    layer: str | None = None,
    returns: str = "values",
    dtype: str | None = None,
    name: str | None = None,
    handle_invalid: str = "error",
    decoder: Decoder | Mapping[str, Decoder] | None = None,
    pad: Pad | None = None,
    custom_objects: dict[str, Any] | None = None,
    safe_mode: bool = True,
    use_gpu: UseGpu = "auto",
) -> Callable[..., Any]:
    """A function of columns that gives a model's predictions.

    ::

        churn = sparkdl.predict_udf('churn.keras', returns='probability')
        df.select('id', churn('features'))            # an array, vector, image or binary column
        df.select('id', churn('age', 'income'))       # several numbers

    A model with several inputs takes a column for each by name, ``churn(age='age', city='c')``, or
    a struct with a field for each, in SQL ``churn(named_struct('age', age, 'city', c))``. So do a
    ``FeatureSpace`` as the decoder, and a preprocessor that takes a dict. Columns without names are
    the inputs in the order of the model's maker: of the dict or list that ``keras.Model`` (or
    ``FeatureSpace``) was given. A column that cannot be its input's is an error. The model is
    loaded once per Python worker; each function in a query has workers of its own, so that several
    columns of one model come sooner from :func:`sparkdl.predict`. Spark may run a function on more
    rows than it shows: ``df.limit(10).cache()`` comes first where only ten rows are wanted.
    On Spark 4.2 and newer the session's setting
    ``spark.sql.execution.arrow.pythonUDF.columnarInput.enabled`` becomes false, unless it was set:
    Spark's column batches cannot hold ML vectors.
    Before Spark 4.1 the function is one of pandas', for which NaN is a null.

    Args:
        model, safe_mode: As for :func:`sparkdl.predict`.
        batch_size: Rows per forward pass.
        output: Which output; not needed where the model has one.
        layer: A layer whose output is returned instead.
        returns: ``'values'`` (the output as it is), ``'probability'`` (array of class
            probabilities) or ``'class'`` (the number of the most probable class).
        dtype: See :func:`sparkdl.predict`; classes are integers.
        name: Of the function, in plans of Spark.
        handle_invalid: Rows that no model can take: ``'error'``, or ``'keep'`` (null).
        decoder, pad, use_gpu: As for :class:`sparkdl.SparkModel`.
        custom_objects: Name -> class or function that the model uses.

    Returns:
        A user-defined function of Spark: number, array of numbers, or nested arrays.

    Raises:
        ModelError: No model that can predict.
        ConfigError: What it shall return cannot be had of the model, or ``pad`` has no effect.
    """
    batch_size = require_int("batch_size", batch_size, 1)
    check_pad(pad)
    if returns not in RETURNS:
        raise UnknownNameError("kind of result", returns, RETURNS)
    if handle_invalid == "skip":
        raise ConfigError(
            "a function of SQL must return something for every row",
            expected="handle_invalid='error' or 'keep'", received="handle_invalid='skip'",
            hint="sparkdl.predict(model, df, handle_invalid='skip') leaves rows out",
        )  # fmt: skip
    objects = require_objects(custom_objects)
    source = open_model(model, objects, safe_mode=safe_mode, decoder=decoder)
    signature = source.signature
    masks = mask_inputs(pad, None, signature.inputs)
    padded = {name: spec for name, spec in signature.inputs.items() if name not in masks}
    paddings_of(pad, padded)  # an error now, and not where the function is called
    decoders = decoders_of(decoder, signature.inputs, signature)
    if layer is not None:
        if output is not None or returns != "values":
            raise ConfigError(
                "a layer has no other form than its output",
                expected="layer, without output and returns",
                received=f"layer={layer!r}, output={output!r}, returns={returns!r}",
            )
    elif output is None and len(signature.outputs) > 1:
        raise ConfigError(
            f"the model has {len(signature.outputs)} outputs, and a function returns one",
            expected=f"output=, one of {list(signature.outputs)}", received="output=None",
        )  # fmt: skip
    output = next(iter(signature.outputs)) if output is None else output
    column = {output: "prediction"} if layer is None else {}
    choice = PredictionChoice(
        outputs=column if returns == "values" else {},
        probability_column=column if returns == "probability" else None,
        class_column=column if returns == "class" else None,
        layers={} if layer is None else {layer: "prediction"},
        dtype=dtype, handle_invalid=handle_invalid,
    )  # fmt: skip
    archive = source.encode(choice.outputs_of(signature), list(choice.layers))
    (result,) = choice.columns(archive, signature)
    task = UdfTask(
        archive, result.typed(archive), batch_size, use_gpu, choice.invalid, decoders, pad
    )
    session = SparkSession.getActiveSession()
    if session is not None:
        give_rows(session)
    made, takes = column_function(task, session, name or "sparkdl_predict"), task.inputs

    @functools.wraps(made)  # with all that Spark looks for to register it
    def function(*columns: object, **named: object) -> Any:
        return made(*takes.columns(columns, named))

    return function


def register_udf(spark: Any, name: str, model: Any, **options: Any) -> Callable[..., Any]:
    """Makes a model a function of SQL; one of the same name is replaced.

    ::

        sparkdl.register_udf(spark, 'churn', model)
        spark.sql('SELECT id, churn(features) FROM customers')

    Args:
        spark: The session whose SQL gets the function.
        name: Of the function.
        model: See :func:`sparkdl.predict`.
        **options: Of :func:`predict_udf`.

    Returns:
        The function, for DataFrame expressions.

    Raises:
        ConfigError, ModelError: See :func:`predict_udf`.
    """
    require_running(spark)
    give_rows(spark)
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(
            "a SQL function must have a name that SQL can say",
            expected="letters, digits and underscores", received=repr(name),
        )  # fmt: skip
    made = predict_udf(model, name=name, **options)
    with this_interpreter(context_of(spark)):
        spark.udf.register(name, made)
    return made
