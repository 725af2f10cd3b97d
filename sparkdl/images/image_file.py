"""Paths of files -> outputs: a transformer, an estimator; a classifier as a function of SQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.ml import Estimator, Transformer
from pyspark.ml.param.shared import HasLabelCol

from sparkdl.config import without_network
from sparkdl.errors import ConfigError, ModelError
from sparkdl.files.model_file import read_keras_file
from sparkdl.images.deep_image import (
    ImageReader,
    ImageStage,
    as_vector,
    is_json,
    require_pillow,
    rgb_of,
)
from sparkdl.launch import interrupts
from sparkdl.learner.archives.archive import making_models, model_bytes, model_from_bytes
from sparkdl.learner.prediction.model_source import open_model
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require_name
from sparkdl.spark.ml.files import Loaded, StageContent, StageWriter
from sparkdl.spark.ml.stage import ParamSpec, has_params, text
from sparkdl.spark.predict import register_udf
from sparkdl.spark.session.frames import require_frame
from sparkdl.spark.session.running import session_of
from sparkdl.spark.spark_model import SparkModel


def _as_it_is(value: Any) -> Any:
    return value


@has_params(
    ParamSpec("modelFile", "path of a saved Keras model", text),
    ParamSpec(
        "outputMode", "'vector' or 'image'",
        partial(require_name, "outputMode", known=("vector", "image")), "vector",
    ),
)  # fmt: skip
class _ImageFile(ImageStage):
    """The base of both: a model, and a function that loads one image."""

    PARTS: tuple[str, ...] = ("imageLoader", "model")
    FUNCTIONS = ("imageLoader",)
    _imageLoader: Any = None

    def _given_model(self) -> Any:
        return self._model if self._model is not None else self.getModelFile() or None

    def _check(self) -> None:
        if self._given_model() is None:
            raise ConfigError(
                f"{type(self).__name__} needs a model",
                expected="modelFile='path', or model=a Keras model", received="neither",
            )  # fmt: skip
        if not callable(self._imageLoader):
            raise ConfigError(
                f"{type(self).__name__} needs a function that loads an image",
                expected="imageLoader, a function from the value of the input column (the path of "
                "a file, or its bytes) to one array of the model's input shape",
                received=repr(self._imageLoader),
            )

    def getModelFile(self) -> str:
        """The path of the model, or ``''``."""
        return str(self.getOrDefault("modelFile")) if self.isSet("modelFile") else ""

    def getImageLoader(self) -> Callable[[Any], Any]:
        loader: Callable[[Any], Any] = self._imageLoader
        return loader


@has_params()
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

    def _transform(self, dataset: object) -> Any:
        require_frame(f"{type(self).__name__}.transform", dataset)
        path = self.getModelFile()
        with making_models, interrupts.held():  # copies in other threads share the model
            if self._opened is None or self._opened[0] != path:
                self._opened = path, open_model(self._given_model())
            source = self._opened[1]
            archive = source.encode(list(source.signature.outputs))
        predicted = self._predicted(dataset, archive, self._imageLoader)
        as_is = self.getOrDefault("outputMode") == "image"
        return predicted if as_is else as_vector(predicted, self.getOutputCol())


@has_params(
    ParamSpec("kerasOptimizer", "name, or optimizer", _as_it_is, "adam"),
    ParamSpec("kerasLoss", "name, or loss", _as_it_is, optional=True),
    ParamSpec("kerasFitParams", "arguments of fit", _as_it_is, {}),
)
class KerasImageFileEstimator(_ImageFile, Estimator, HasLabelCol):
    """Trains a model on files of images; ``fit`` gives a :class:`KerasImageFileTransformer`.

    Args:
        inputCol, outputCol, imageLoader, outputMode: As for :class:`KerasImageFileTransformer`.
        labelCol: A column of labels; integer classes do where the loss wants one-hot vectors.
        modelFile: A saved Keras model, where training begins; the file stays as it is.
        kerasOptimizer: A name, or an optimizer.
        kerasLoss: A name, or a loss.
        kerasFitParams: Arguments of :meth:`sparkdl.SparkModel.fit`: ``{'epochs': 5}``.
        model: A Keras model instead of ``modelFile``; it stays as it is.
        sparkModelParams: Arguments of :class:`sparkdl.SparkModel`: ``{'mode': 'allreduce'}``.
            No file holds those that say where the driver and the workers listen (``port``,
            ``network``).

    Raises:
        ConfigError: No model, or no loader.
    """

    __module__ = "sparkdl"
    PARTS = ("imageLoader", "model", "sparkModelParams")
    _sparkModelParams: dict[str, Any] | None = None
    _objects: dict[str, Any] | None = None
    """Values of Params that JSON cannot hold, in a copy that goes into a file."""

    def _check(self) -> None:
        super()._check()
        if self.getOrDefault("kerasLoss") is None:
            raise ConfigError(
                "KerasImageFileEstimator needs a loss",
                expected="kerasLoss, e.g. 'sparse_categorical_crossentropy'", received="None",
            )  # fmt: skip

    def write(self) -> StageWriter:
        """Saves the stage; an optimizer, a loss and arguments of fit that are objects, too."""
        saved = self.copy()
        saved._sparkModelParams = without_network(self._sparkModelParams or {})
        saved._objects = {}
        for name in ("kerasOptimizer", "kerasLoss", "kerasFitParams"):
            value = self.getOrDefault(name)
            if not is_json(value):
                saved.clear(saved.getParam(name))
                saved._objects[name] = value
        return StageWriter(saved)

    def content(self) -> StageContent:
        found = super().content()
        if not self._objects:
            return found
        return replace(found, code={**found.code, "otherParams": self._objects})

    def take(self, loaded: Loaded) -> None:
        super().take(loaded)
        self._sparkModelParams = without_network(self._sparkModelParams or {})
        self._set(**loaded.code.get("otherParams", {}))

    @interrupts.heard()
    def _fit(self, dataset: object) -> KerasImageFileTransformer:
        with making_models, interrupts.held():
            model = self._compiled()
        spark_model = SparkModel(model, decoder=self._imageLoader, **(self._sparkModelParams or {}))
        arguments = {"verbose": 0, **dict(self.getOrDefault("kerasFitParams") or {})}
        spark_model.fit(dataset, features=self.getInputCol(), label=self.getLabelCol(), **arguments)
        fitted: KerasImageFileTransformer = KerasImageFileTransformer(
            inputCol=self.getInputCol(), outputCol=self.getOutputCol(),
            imageLoader=self._imageLoader, outputMode=self.getOrDefault("outputMode"),
            model=spark_model.model,
        )  # fmt: skip
        return fitted

    def _compiled(self) -> Any:
        if self._model is not None:
            content, path = model_bytes(self._model), "model.keras"
        else:
            path = self.getModelFile()
            content = read_keras_file(path)
        model = model_from_bytes(content, None, safe_mode=True, path=path, compiled=False)
        optimizer = self.getOrDefault("kerasOptimizer")
        if not isinstance(optimizer, str):  # an optimizer belongs to one model
            optimizer = type(optimizer).from_config(optimizer.get_config())
        model.compile(optimizer, self.getOrDefault("kerasLoss"))
        return model


@dataclass(frozen=True)
class LoadedByUser:
    """Makes a model's input of an image struct through a function of the user's."""

    preprocessor: Callable[[npt.NDArray[Any]], Any]

    def __call__(self, image: Mapping[str, Any]) -> Any:
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
