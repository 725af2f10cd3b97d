"""``DeepImageFeaturizer`` and ``DeepImagePredictor``: Spark's image column -> features, classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pyspark import keyword_only
from pyspark.ml import Transformer
from pyspark.ml.functions import array_to_vector
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasInputCol, HasOutputCol
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.errors import ConfigError, ModelError, ResourceError, UnknownNameError
from sparkdl.learner.prediction.model_source import LAYER, ModelSource, open_model
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.spark.forms.sources import Columns
from sparkdl.spark.images.pixels import SCALE_HINTS, ImageReader, Pixels, require_pillow
from sparkdl.spark.images.saved_stage import Part, SavedImageStage
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.inference.predict import predict_columns
from sparkdl.spark.session.frames import require_frame

_CAFFE_MEANS = np.array([103.939, 116.779, 123.68], np.float32)


@dataclass(frozen=True)
class Application:
    """A model of ``keras.applications``.

    Args:
        module: Its module there.
        size: Height and width of its images.
        caffe: Its pixels are blue, green, red, less their mean; else they are in [-1, 1].
    """

    module: str
    size: int
    caffe: bool

    def preprocess(self, pixels: Pixels) -> npt.NDArray[Any]:
        """The model's input, of RGB pixels in [0, 255]."""
        return pixels[..., ::-1] - _CAFFE_MEANS if self.caffe else pixels / 127.5 - 1


APPLICATIONS = {
    "InceptionV3": Application("inception_v3", 299, False),
    "Xception": Application("xception", 299, False),
    "ResNet50": Application("resnet50", 224, True),
    "VGG16": Application("vgg16", 224, True),
    "VGG19": Application("vgg19", 224, True),
}


def application(name: str) -> Application:
    """The application of that name.

    Raises:
        UnknownNameError: There is none.
    """
    if name not in APPLICATIONS:
        raise UnknownNameError("modelName", name, APPLICATIONS)
    return APPLICATIONS[name]


def make_model(name: str, *, features: bool) -> Any:
    """The application with the weights that Keras downloads.

    Args:
        name: A key of :data:`APPLICATIONS`.
        features: Without the classes: the output is the mean over the last layer's pixels.

    Raises:
        ResourceError: The weights cannot be downloaded.
    """
    from sparkdl.learner.prediction.model_source import pretrained

    found = application(name)
    try:
        return pretrained(found.module, name, features=features)
    except Exception as error:
        raise ResourceError(
            f"the weights of {name} cannot be loaded",
            expected="weights in Keras' cache (~/.keras/models), or a way to download them",
            received=f"{type(error).__name__}: {str(error)[:300]}",
            hint="model=... takes a Keras model or the path of one, and downloads nothing",
        ) from error


def class_names(name: str) -> list[tuple[str, str]]:
    """Identifier and description of ImageNet's classes, which Keras downloads.

    Raises:
        ResourceError: They cannot be downloaded.
    """
    from sparkdl.learner.prediction.model_source import imagenet_names

    try:
        return imagenet_names(application(name).module)
    except Exception as error:
        raise ResourceError(
            "the names of ImageNet's classes cannot be loaded",
            expected="the names in Keras' cache (~/.keras/models), or a way to download them",
            received=f"{type(error).__name__}: {str(error)[:300]}",
            hint="labels=[...] names the classes, and downloads nothing",
        ) from error


_BATCH_SIZE = 32


class _DeepImage(SavedImageStage, Transformer, HasInputCol, HasOutputCol):  # type: ignore[misc]
    """The base of both: which model, and how images become its inputs."""

    SAVED_PARTS: ClassVar[tuple[Part, ...]] = (Part("preprocess", "_preprocess", code=True),)

    modelName: Param[str] = Param(
        Params._dummy(), "modelName", "one of " + ", ".join(APPLICATIONS), TypeConverters.toString
    )

    def _begin(self) -> None:
        super()._begin()
        self._preprocess: Any = None
        self._opened: tuple[str, ModelSource] | None = None

    def _take(self, given: dict[str, Any]) -> None:
        """Params, and what is none as it is no JSON."""
        if "model" in given:
            self._model = given.pop("model")
        if "preprocess" in given:
            self._preprocess = given.pop("preprocess")
        name = given.get("modelName")
        if name is not None:
            application(name)
        if self._model is None and name is None:
            raise ConfigError(
                f"{type(self).__name__} needs a model",
                expected=f"modelName, one of {list(APPLICATIONS)}, or model=a Keras model or path",
                received="neither",
            )
        self._set(**given)

    def getModelName(self) -> str:
        """The name of the application; '' where only a model was given."""
        return str(self.getOrDefault(self.modelName)) if self.isSet(self.modelName) else ""

    def setModelName(self, value: str) -> _DeepImage:
        """Sets the name of the application."""
        application(value)
        return self._set(modelName=value)  # type: ignore[no-any-return]

    def _source(self, *, features: bool) -> ModelSource:
        """The model, opened once for each name."""
        name = self.getModelName()
        if self._opened is None or self._opened[0] != name:
            model = self._model if self._model is not None else make_model(name, features=features)
            self._opened = name, open_model(model)
        return self._opened[1]

    def _reader(self, source: ModelSource, scale_hint: str) -> ImageReader:
        """How a value of the image column becomes the model's input."""
        (given,) = source.signature.inputs.values()
        shape = given.shape or ()
        name = self.getModelName()
        known = application(name) if name else None
        size = shape[:2] if len(shape) == 3 else ()
        if len(size) != 2 or (None in size and known is None):
            raise ModelError(
                f"{type(self).__name__} needs a model for images of one size",
                expected="an input of shape (height, width, 3), or a modelName that tells the size",
                received=f"an input of shape {given.shape}",
            )
        height, width = (d if d is not None else known.size if known else 0 for d in size)
        preprocess = self._preprocess
        if preprocess is None and known is not None:
            preprocess = known.preprocess
        require_pillow()
        return ImageReader(height, width, scale_hint, preprocess)

    def _predicted(self, frame: Any, source: ModelSource, reader: Any, output: str) -> Any:
        signature = source.signature
        if output.startswith(LAYER):
            archive = source.encode([], [output.removeprefix(LAYER)])
        else:
            archive = source.encode(list(signature.outputs))
        (name,) = archive.signature.outputs
        return predict_columns(
            frame, archive, Columns(self.getInputCol(), decoder=reader),
            [OutputColumn(self.getOutputCol(), name)], batch_size=_BATCH_SIZE,
        )  # fmt: skip


class DeepImageFeaturizer(_DeepImage):
    """Spark's image column -> a vector of features, for a classifier of Spark's after it.

    ::

        featurizer = DeepImageFeaturizer(inputCol='image', outputCol='features',
                                         modelName='InceptionV3', model='headless.keras')

    Args:
        inputCol: A column of ``spark.read.format('image')``; images are resized on the executors.
        outputCol: Of vectors: the model's output, one after the other.
        modelName: ``InceptionV3``, ``Xception``, ``ResNet50``, ``VGG16`` or ``VGG19``: how pixels
            are preprocessed, and the size of images where the model leaves it free. Without
            ``model`` Keras downloads the weights.
        scaleHint: How images are resized: ``SCALE_AREA_AVERAGING``, ``SCALE_DEFAULT``,
            ``SCALE_FAST``, ``SCALE_REPLICATE`` or ``SCALE_SMOOTH``.
        model: A Keras model whose output are the features, or the path of one.
        layer: The features are the output of this layer of ``model``.
        preprocess: Makes the model's input of RGB pixels, float32 ``(height, width, 3)`` in
            [0, 255]; by default what the application wants, or the pixels.

    Raises:
        ConfigError: No model is named.
        UnknownNameError: No such application, or filter.
    """

    __module__ = "sparkdl"
    SAVED_PARTS = (*_DeepImage.SAVED_PARTS, Part("layer", "_layer"))
    scaleHint: Param[str] = Param(
        Params._dummy(), "scaleHint", "one of " + ", ".join(SCALE_HINTS), TypeConverters.toString
    )

    def _begin(self) -> None:
        super()._begin()
        self._layer: str | None = None
        self._setDefault(scaleHint="SCALE_AREA_AVERAGING")

    @lists_its_arguments
    @keyword_only  # type: ignore[untyped-decorator]
    def __init__(
        self, *, inputCol: str | None = None, outputCol: str | None = None,
        modelName: str | None = None, scaleHint: str = "SCALE_AREA_AVERAGING", model: Any = None,
        layer: str | None = None, preprocess: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self._begin()
        given: dict[str, Any] = dict(self._input_kwargs)
        self._layer = given.pop("layer", None)
        if given.get("scaleHint", "SCALE_AREA_AVERAGING") not in SCALE_HINTS:
            raise UnknownNameError("scaleHint", given["scaleHint"], SCALE_HINTS)
        self._take(given)

    def _transform(self, dataset: Any) -> Any:
        require_frame(f"{type(self).__name__}.transform", dataset)
        source = self._source(features=True)
        reader = self._reader(source, str(self.getOrDefault(self.scaleHint)))
        output = LAYER + self._layer if self._layer else ""
        predicted = self._predicted(dataset, source, reader, output)
        return as_vector(predicted, self.getOutputCol())


class DeepImagePredictor(_DeepImage):
    """Spark's image column -> class probabilities, or the most probable classes by name.

    Args:
        inputCol: A column of ``spark.read.format('image')``; images are resized on the executors.
        outputCol: A vector of probabilities; with ``decodePredictions`` an array of structs
            ``(class, description, probability)``.
        modelName: See :class:`DeepImageFeaturizer`.
        decodePredictions: The names of ImageNet's classes, for a model with its 1000 classes;
            Keras downloads the names, unless ``labels`` are given.
        topK: The number of most probable classes that are returned.
        model: A Keras model, or the path of one.
        labels: Names of the classes of ``model``, in their order.
        preprocess: See :class:`DeepImageFeaturizer`.

    Raises:
        ConfigError: No model is named.
        UnknownNameError: No such application.
    """

    __module__ = "sparkdl"
    SAVED_PARTS = (*_DeepImage.SAVED_PARTS, Part("labels", "_labels"))
    decodePredictions: Param[bool] = Param(
        Params._dummy(), "decodePredictions", "return names of classes", TypeConverters.toBoolean
    )
    topK: Param[int] = Param(
        Params._dummy(), "topK", "how many classes are returned", TypeConverters.toInt
    )

    def _begin(self) -> None:
        super()._begin()
        self._labels: list[str] | None = None
        self._setDefault(decodePredictions=False, topK=5)

    @lists_its_arguments
    @keyword_only  # type: ignore[untyped-decorator]
    def __init__(
        self, *, inputCol: str | None = None, outputCol: str | None = None,
        modelName: str | None = None, decodePredictions: bool = False, topK: int = 5,
        model: Any = None, labels: list[str] | None = None,
        preprocess: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self._begin()
        given: dict[str, Any] = dict(self._input_kwargs)
        self._labels = given.pop("labels", None)
        self._take(given)

    def _transform(self, dataset: Any) -> Any:
        require_frame(f"{type(self).__name__}.transform", dataset)
        source = self._source(features=False)
        reader = self._reader(source, "SCALE_AREA_AVERAGING")
        predicted = self._predicted(dataset, source, reader, "")
        column = self.getOutputCol()
        if not self.getOrDefault(self.decodePredictions):
            return as_vector(predicted, column)
        top = _most_probable(column, self._names(), int(self.getOrDefault(self.topK)))
        return predicted.withColumn(column, top)

    def _names(self) -> list[tuple[str, str]]:
        """Identifier and description of each class."""
        if self._labels is not None:
            return [(str(number), str(name)) for number, name in enumerate(self._labels)]
        if not self.getModelName():
            raise ConfigError(
                "DeepImagePredictor does not know what the classes are called",
                expected="labels=[...], one name per class, or a modelName",
                received="decodePredictions=True, and neither",
            )
        return class_names(self.getModelName())


def as_vector(frame: Any, column: str) -> Any:
    """The frame with a column of numbers or (nested) arrays as ML vectors."""
    kind, values = frame.schema[column].dataType, F.col(_quoted(column))
    if not isinstance(kind, T.ArrayType):
        values = F.array(values)
        kind = T.ArrayType(kind)
    while isinstance(kind.elementType, T.ArrayType):
        values, kind = F.flatten(values), kind.elementType
    return frame.withColumn(column, array_to_vector(values.cast("array<double>")))


def _most_probable(column: str, names: list[tuple[str, str]], top: int) -> Any:
    """The ``top`` classes of a column of probabilities, as structs, the most probable first."""
    ids = F.array(*[F.lit(identifier) for identifier, _ in names])
    texts = F.array(*[F.lit(text) for _, text in names])
    every = F.transform(
        F.col(_quoted(column)),
        lambda p, i: F.struct(
            p.alias("probability"), F.get(ids, i).alias("class"), F.get(texts, i).alias("text")
        ),
    )
    return F.transform(
        F.slice(F.sort_array(every, asc=False), 1, top),
        lambda found: F.struct(
            found["class"].alias("class"), found["text"].alias("description"),
            found["probability"].alias("probability"),
        ),
    )  # fmt: skip


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
