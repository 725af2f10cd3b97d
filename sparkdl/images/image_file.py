"""Paths of files -> outputs: a transformer, an estimator; a classifier as a function of SQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pyspark import keyword_only
from pyspark.ml import Estimator, Transformer
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasInputCol, HasLabelCol, HasOutputCol

from sparkdl.config import without_network
from sparkdl.errors import ConfigError, ModelError, UnknownNameError
from sparkdl.files.model_file import read_keras_file
from sparkdl.images.deep_image import (
    ImageReader,
    Part,
    SavedImageStage,
    as_vector,
    is_json,
    require_pillow,
)
from sparkdl.launch import interrupts
from sparkdl.learner.archives.archive import making_models, model_bytes, model_from_bytes
from sparkdl.learner.prediction.model_source import ModelSource, open_model
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.spark.forms.sources import Columns
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.inference.predict import predict_columns
from sparkdl.spark.ml.files import Loaded, StageWriter
from sparkdl.spark.predict import register_udf
from sparkdl.spark.session.frames import require_frame
from sparkdl.spark.session.running import session_of
from sparkdl.spark.spark_model import SparkModel

OUTPUT_MODES = ("vector", "image")
_BATCH_SIZE = 32


class _ImageFile(SavedImageStage, HasInputCol, HasOutputCol):
    """The base of both: a model, and a function that loads one image."""

    SAVED_PARTS: ClassVar[tuple[Part, ...]] = (Part("imageLoader", "_loader", code=True),)

    modelFile: Param[str] = Param(
        Params._dummy(), "modelFile", "path of a saved Keras model", TypeConverters.toString
    )

    def _begin(self) -> None:
        super()._begin()
        self._loader: Any = None
        self._setDefault(outputMode="vector")

    def _given_model(self) -> Any:
        return self._model if self._model is not None else self.getModelFile() or None

    def _take(self, given: dict[str, Any]) -> None:
        if given.get("outputMode", "vector") not in OUTPUT_MODES:
            raise UnknownNameError("outputMode", given["outputMode"], OUTPUT_MODES)
        self._model = given.pop("model", None)
        self._loader = given.pop("imageLoader", None)
        if self._model is None and given.get("modelFile") is None:
            raise ConfigError(
                f"{type(self).__name__} needs a model",
                expected="modelFile='path', or model=a Keras model", received="neither",
            )  # fmt: skip
        if not callable(self._loader):
            raise ConfigError(
                f"{type(self).__name__} needs a function that loads an image",
                expected="imageLoader, a function from the value of the input column (the path of "
                "a file, or its bytes) to one array of the model's input shape",
                received=repr(self._loader),
            )
        self._set(**given)

    def getModelFile(self) -> str:
        """The path of the model; '' where the model itself was given."""
        return str(self.getOrDefault(self.modelFile)) if self.isSet(self.modelFile) else ""

    def getImageLoader(self) -> Callable[[Any], Any]:
        loader: Callable[[Any], Any] = self._loader
        return loader


class KerasImageFileTransformer(_ImageFile, Transformer):
    """A column of paths (or of bytes) -> a model's output, each image loaded by a function.

    Args:
        inputCol: A column of strings, which ``imageLoader`` takes one by one, or of bytes
            (``content`` of ``spark.read.format('binaryFile')``, which reaches any file system).
        outputCol: Column of vectors, or of nested arrays with ``outputMode='image'``.
        modelFile: See :func:`sparkdl.predict`.
        imageLoader: From one value to one array of the model's input shape; runs on executors.
        outputMode: ``'vector'`` (the output, one number after the other) or ``'image'`` (the
            output in its shape).
        model: A Keras model instead of ``modelFile``.

    Raises:
        ConfigError: No model, or no loader.
        UnknownNameError: No such output mode.
    """

    __module__ = "sparkdl"
    outputMode: Param[str] = Param(
        Params._dummy(), "outputMode", "'vector' or 'image'", TypeConverters.toString
    )

    @lists_its_arguments
    @keyword_only  # type: ignore[untyped-decorator]
    def __init__(
        self, *, inputCol: str | None = None, outputCol: str | None = None,
        modelFile: str | None = None, imageLoader: Callable[[Any], Any] | None = None,
        outputMode: str = "vector", model: object = None,
    ) -> None:  # fmt: skip
        self._begin()
        self._take(dict(self._input_kwargs))

    def _begin(self) -> None:
        super()._begin()
        self._opened: tuple[str, ModelSource] | None = None

    def _transform(self, dataset: object) -> Any:
        require_frame(f"{type(self).__name__}.transform", dataset)
        path = self.getModelFile()
        with making_models, interrupts.held():  # copies in other threads share the model
            if self._opened is None or self._opened[0] != path:
                self._opened = path, open_model(self._given_model())
            source = self._opened[1]
            archive = source.encode(list(source.signature.outputs))
        (name,) = archive.signature.outputs
        column = self.getOutputCol()
        predicted = predict_columns(
            dataset, archive, Columns(self.getInputCol(), decoder=self._loader),
            [OutputColumn(column, name)], batch_size=_BATCH_SIZE,
        )  # fmt: skip
        as_is = self.getOrDefault(self.outputMode) == "image"
        return predicted if as_is else as_vector(predicted, column)


class KerasImageFileEstimator(_ImageFile, Estimator, HasLabelCol):
    """Trains a model on files of images; ``fit`` gives a :class:`KerasImageFileTransformer`.

    Args:
        inputCol: See :class:`KerasImageFileTransformer`, as for ``outputCol``, ``imageLoader`` and
            ``outputMode``.
        outputCol: See there.
        labelCol: A column of labels; integer classes do where the loss wants one-hot vectors.
        modelFile: A saved Keras model, where training begins; the file stays as it is.
        imageLoader: See there.
        kerasOptimizer: A name, or an optimizer.
        kerasLoss: A name, or a loss.
        kerasFitParams: Arguments of :meth:`sparkdl.SparkModel.fit`: ``{'epochs': 5}``.
        outputMode: See there.
        model: A Keras model instead of ``modelFile``; it stays as it is.
        sparkModelParams: Arguments of :class:`sparkdl.SparkModel`: ``{'mode': 'allreduce'}``.
            No file holds those that say where the driver and the workers listen (``port``,
            ``network``).

    Raises:
        ConfigError: No model, or no loader.
    """

    __module__ = "sparkdl"
    SAVED_PARTS = (
        *_ImageFile.SAVED_PARTS,
        Part("sparkModelParams", "_spark_model_params"),
        Part("otherParams", "_objects"),
    )
    outputMode: Param[str] = Param(
        Params._dummy(), "outputMode", "'vector' or 'image'", TypeConverters.toString
    )
    _spark_model_params: dict[str, Any]
    _objects: dict[str, Any] | None
    """What is no JSON among the Params, in a copy that goes into a file."""
    kerasOptimizer: Param[Any] = Param(Params._dummy(), "kerasOptimizer", "name, or optimizer")
    kerasLoss: Param[Any] = Param(Params._dummy(), "kerasLoss", "name, or loss")
    kerasFitParams: Param[Any] = Param(Params._dummy(), "kerasFitParams", "arguments of fit")

    @lists_its_arguments
    @keyword_only  # type: ignore[untyped-decorator]
    def __init__(
        self, *, inputCol: str | None = None, outputCol: str | None = None,
        labelCol: str | None = None, modelFile: str | None = None,
        imageLoader: Callable[[Any], Any] | None = None, kerasOptimizer: object = "adam",
        kerasLoss: object = None, kerasFitParams: dict[str, Any] | None = None,
        outputMode: str = "vector", model: object = None,
        sparkModelParams: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._begin()
        given: dict[str, Any] = dict(self._input_kwargs)
        self._spark_model_params = dict(given.pop("sparkModelParams", None) or {})
        self._take(given)
        if self.getOrDefault(self.kerasLoss) is None:
            raise ConfigError(
                "KerasImageFileEstimator needs a loss",
                expected="kerasLoss, e.g. 'sparse_categorical_crossentropy'", received="None",
            )  # fmt: skip

    def _begin(self) -> None:
        super()._begin()
        self._spark_model_params = {}
        self._objects = None
        self._setDefault(kerasOptimizer="adam", kerasLoss=None, kerasFitParams={})

    def write(self) -> StageWriter:
        """Saves the stage; an optimizer, a loss and arguments of fit that are objects, too."""
        saved = self.copy()
        saved._spark_model_params = without_network(self._spark_model_params)
        saved._objects = {}
        for name in ("kerasOptimizer", "kerasLoss", "kerasFitParams"):
            value = self.getOrDefault(name)
            if not is_json(value):
                saved.clear(saved.getParam(name))
                saved._objects[name] = value
        return StageWriter(saved)

    def take(self, loaded: Loaded) -> None:
        super().take(loaded)
        self._spark_model_params = without_network(self._spark_model_params or {})
        self._set(**(self._objects or {}))
        self._objects = None

    @interrupts.heard()
    def _fit(self, dataset: object) -> KerasImageFileTransformer:
        with making_models, interrupts.held():
            model = self._compiled()
        spark_model = SparkModel(model, decoder=self._loader, **self._spark_model_params)
        arguments = {"verbose": 0, **dict(self.getOrDefault(self.kerasFitParams) or {})}
        spark_model.fit(dataset, features=self.getInputCol(), label=self.getLabelCol(), **arguments)
        fitted: KerasImageFileTransformer = KerasImageFileTransformer(
            inputCol=self.getInputCol(), outputCol=self.getOutputCol(), imageLoader=self._loader,
            outputMode=self.getOrDefault(self.outputMode), model=spark_model.model,
        )  # fmt: skip
        return fitted

    def _compiled(self) -> Any:
        if self._model is not None:
            content, path = model_bytes(self._model), "model.keras"
        else:
            path = self.getModelFile()
            content = read_keras_file(path)
        model = model_from_bytes(content, None, safe_mode=True, path=path, compiled=False)
        optimizer = self.getOrDefault(self.kerasOptimizer)
        if not isinstance(optimizer, str):  # an optimizer belongs to one model
            optimizer = type(optimizer).from_config(optimizer.get_config())
        model.compile(optimizer, self.getOrDefault(self.kerasLoss))
        return model


@dataclass(frozen=True)
class LoadedByUser:
    """Makes a model's input of an image struct through a function of the user's."""

    preprocessor: Callable[[npt.NDArray[Any]], Any]

    def __call__(self, image: Mapping[str, Any]) -> Any:
        from sparkdl.images.deep_image import rgb_of

        return np.asarray(self.preprocessor(rgb_of(image)))


@lists_its_arguments
def registerKerasImageUDF(
    udf_name: str,
    keras_model_or_file_path: object,
    preprocessor: Callable[[Any], Any] | None = None,
    *,
    spark: object = None,
) -> Callable[..., Any]:
    """Makes an image model a function of SQL over Spark's image column; a name is replaced.

    ::

        registerKerasImageUDF('classes', 'cnn.keras')
        spark.sql('SELECT image.origin, classes(image) FROM pictures')

    Args:
        udf_name: Name of the function.
        keras_model_or_file_path: See :func:`sparkdl.predict`.
        preprocessor: Makes the model's input of uint8 RGB pixels ``(height, width, 3)``; None:
            pixels are resized to the model's input (float32 in [0, 255]).
        spark: The session; None for the active one.

    Returns:
        The function: an array of numbers per image.

    Raises:
        ModelError: The model's input has no fixed size, and there is no preprocessor.
    """
    session = session_of() if spark is None else spark
    decoder: Callable[[Any], Any]
    if preprocessor is not None:
        decoder = LoadedByUser(preprocessor)
    else:
        (given,) = open_model(keras_model_or_file_path).signature.inputs.values()
        shape = given.shape or ()
        if len(shape) != 3 or shape[0] is None or shape[1] is None:
            raise ModelError(
                "images cannot be resized for this model",
                expected="an input of a fixed shape (height, width, 3), or a preprocessor",
                received=f"an input of shape {given.shape}",
            )
        require_pillow()
        decoder = ImageReader(shape[0], shape[1])
    return register_udf(session, udf_name, keras_model_or_file_path, decoder=decoder)
