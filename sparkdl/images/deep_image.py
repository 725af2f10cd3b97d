"""``DeepImageFeaturizer`` and ``DeepImagePredictor``: Spark's image column -> features, classes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
from pyspark.ml import Transformer
from pyspark.ml.functions import array_to_vector
from pyspark.ml.param.shared import HasInputCol, HasOutputCol
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.errors import ConfigError, ModelError, ResourceError
from sparkdl.files.model_file import HDF5, read_keras_file
from sparkdl.learner.archives.archive import ModelArchive, model_from_bytes
from sparkdl.learner.prediction import model_source
from sparkdl.learner.prediction.model_source import ModelSource, open_model
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.settings.values import FLAG, require_name, whole
from sparkdl.spark.forms.sources import Columns
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.inference.predict import predict_columns
from sparkdl.spark.ml.files import Loaded, SavedStage, StageContent, load_model
from sparkdl.spark.ml.stage import ParamSpec, Stage, has_params, taking
from sparkdl.spark.ml.training import archive_of
from sparkdl.spark.session.frames import column_named, require_frame

S = TypeVar("S", bound="ImageStage")


class ImageStage(Stage, HasInputCol, HasOutputCol, SavedStage):
    """A stage with arguments that are no Params (``PARTS``), which go into files with it."""

    FUNCTIONS: ClassVar[tuple[str, ...]] = ()
    """Parts that only a reader loads which is told to trust the file."""
    _model: Any = None
    _opened: tuple[str, ModelSource] | None = None
    """The path or name, and the model that is read already."""

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)
        self._check()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in cls.PARTS:
            setattr(cls, f"set{name[0].upper()}{name[1:]}", _setter(f"_{name}"))

    @classmethod
    def _empty(cls: type[S]) -> S:
        stage = cls.__new__(cls)
        Stage.__init__(stage)
        return stage

    def _check(self) -> None:
        """Refuses a stage whose arguments are too few."""

    def _given_model(self) -> Any:
        """The model of this stage: a Keras model, the path of one, or None."""
        return self._model

    def _predicted(self, frame: Any, archive: PredictorArchive, decoder: Any) -> Any:
        (name,) = archive.signature.outputs
        return predict_columns(
            frame, archive, Columns(self.getInputCol(), decoder=decoder),
            [OutputColumn(self.getOutputCol(), name)], batch_size=32,
        )  # fmt: skip

    def content(self) -> StageContent:
        plain: dict[str, Any] = {}
        code: dict[str, Any] = {}
        for name in self.PARTS:
            value = getattr(self, f"_{name}")
            if value is not None and name != "model":
                (code if name in self.FUNCTIONS or not is_json(value) else plain)[name] = value
        return StageContent({"parts": plain}, _archive_of(self._given_model()), code)

    def take(self, loaded: Loaded) -> None:
        saved: Mapping[str, Any] = {**loaded.plain["parts"], **loaded.code}
        for name in self.PARTS:
            setattr(self, f"_{name}", saved.get(name))
        found = load_model(loaded)
        self._model = None if found is None else found[0]


def _setter(attribute: str) -> Callable[[Any, Any], Any]:
    def set_to(self: Any, value: object) -> Any:
        setattr(self, attribute, value)
        self._opened = None
        return self

    return set_to


def is_json(value: object) -> bool:
    """Whether JSON gives the same value back."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _archive_of(model: object) -> ModelArchive | None:
    """A stage's model as it goes into the file; a path is read, so that the file has it all."""
    if model is None:
        return None
    if isinstance(model, (str, os.PathLike)):
        path = os.fspath(model)
        if not path.endswith((".keras", *HDF5)):
            raise ModelError(
                f"a stage with the model {path!r} cannot be saved",
                expected="a Keras model, or a path that ends in .keras or .h5",
                received="the folder of a SavedModel, or of something else",
                hint="save the Keras model as a .keras file",
            )
        content = read_keras_file(path)
        model = model_from_bytes(content, None, safe_mode=True, path=path, compiled=False)
    return archive_of(model)


Pixels = npt.NDArray[np.float32]
SCALE_HINTS = {
    "SCALE_AREA_AVERAGING": "BOX",
    "SCALE_DEFAULT": "BILINEAR",
    "SCALE_FAST": "NEAREST",
    "SCALE_REPLICATE": "NEAREST",
    "SCALE_SMOOTH": "BICUBIC",
}
"""Databricks' names of filters -> Pillow's."""


@dataclass(frozen=True)
class ImageReader:
    """Makes a model's input of an image struct: RGB pixels, resized and preprocessed.

    Args:
        height: Height of the model's input.
        width: Width of the model's input.
        scale_hint: A key of :data:`SCALE_HINTS`.
        preprocess: Makes the input of float32 RGB pixels ``(height, width, 3)`` in [0, 255];
            None: they are the input.
    """

    height: int
    width: int
    scale_hint: str = "SCALE_AREA_AVERAGING"
    preprocess: Callable[[Pixels], npt.NDArray[Any]] | None = None

    def __call__(self, image: Mapping[str, Any]) -> npt.NDArray[Any]:
        """Reads one image.

        Args:
            image: Spark's struct: ``height``, ``width``, ``nChannels``, ``data`` (BGR(A) or grey).
        """
        pixels = _resized(rgb_of(image), self.height, self.width, SCALE_HINTS[self.scale_hint])
        return pixels if self.preprocess is None else np.asarray(self.preprocess(pixels))


def rgb_of(image: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
    """The pixels of an image struct, uint8 ``(height, width, 3)`` in the order red, green, blue.

    Raises:
        ValueError: Not 8 bits per channel, or not 1, 3 or 4 channels.
    """
    height, width, channels = (int(image[name]) for name in ("height", "width", "nChannels"))
    data = np.frombuffer(image["data"], np.uint8)
    if channels not in (1, 3, 4) or data.size != height * width * channels:
        raise ValueError(
            f"{data.size} bytes are no image of {height} x {width} pixels and {channels} channels "
            "of 8 bits"
        )
    pixels = data.reshape(height, width, channels)
    return np.repeat(pixels, 3, axis=-1) if channels == 1 else pixels[..., 2::-1]


def require_pillow() -> None:
    """Raises ResourceError where Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ResourceError(
            "images cannot be resized without Pillow",
            expected="Pillow, on the driver and on the executors", received=f"ImportError: {error}",
            hint="pip install 'sparkdl-keras[images]'",
        ) from error  # fmt: skip


def _resized(pixels: npt.NDArray[np.uint8], height: int, width: int, name: str) -> Pixels:
    if pixels.shape[:2] != (height, width):
        require_pillow()
        from PIL import Image

        image = Image.fromarray(np.ascontiguousarray(pixels))
        pixels = np.asarray(image.resize((width, height), getattr(Image.Resampling, name)))
    return pixels.astype(np.float32)


_CAFFE_MEANS = np.array([103.939, 116.779, 123.68], np.float32)


@dataclass(frozen=True)
class Application:
    """A model of ``keras.applications``.

    Args:
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


@contextmanager
def _downloading(what: str, files: str, hint: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ResourceError(
            f"{what} cannot be loaded",
            expected=f"{files} in Keras' cache (~/.keras/models), or a way to download them",
            received=f"{type(error).__name__}: {str(error)[:300]}", hint=hint,
        ) from error  # fmt: skip


@has_params(
    ParamSpec(
        "modelName", "one of " + ", ".join(APPLICATIONS),
        partial(require_name, "modelName", known=APPLICATIONS),
    )
)  # fmt: skip
class _DeepImage(ImageStage, Transformer):
    """The base of both: which model, and how images become its inputs."""

    FUNCTIONS = ("preprocess",)
    _preprocess: Any = None

    def _check(self) -> None:
        if self._model is None and not self.getModelName():
            raise ConfigError(
                f"{type(self).__name__} needs a model",
                expected=f"modelName, one of {list(APPLICATIONS)}, or model=a Keras model or path",
                received="neither",
            )

    def getModelName(self) -> str:
        return str(self.getOrDefault("modelName")) if self.isSet("modelName") else ""

    def _source(self, *, features: bool) -> ModelSource:
        """The model; one of Keras' own is downloaded if it is not in the cache."""
        name, model = self.getModelName(), self._model
        if self._opened is None or self._opened[0] != name:
            if model is None:
                module = APPLICATIONS[name].module
                hint = "model=... takes a Keras model or the path of one, and downloads nothing"
                with _downloading(f"the weights of {name}", "weights", hint):
                    model = model_source.pretrained(module, name, features=features)
            self._opened = name, open_model(model)
        return self._opened[1]

    def _reader(self, source: ModelSource, scale_hint: str) -> ImageReader:
        """How a value of the image column becomes the model's input."""
        (given,) = source.signature.inputs.values()
        shape = given.shape or ()
        name = self.getModelName()
        known = APPLICATIONS[name] if name else None
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


@has_params(
    ParamSpec(
        "scaleHint", "one of " + ", ".join(SCALE_HINTS),
        partial(require_name, "scaleHint", known=SCALE_HINTS), "SCALE_AREA_AVERAGING",
    )
)  # fmt: skip
class DeepImageFeaturizer(_DeepImage):
    """Spark's image column -> a vector of features, for a classifier of Spark's after it.

    ::

        featurizer = DeepImageFeaturizer(inputCol='image', outputCol='features',
                                         modelName='InceptionV3', model='headless.keras')

    Args:
        inputCol: A column of ``spark.read.format('image')``; images are resized on the executors.
        outputCol: Column of vectors: the model's output, one after the other.
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
    PARTS = ("layer", "model", "preprocess")
    _layer: str | None = None

    def _transform(self, dataset: object) -> Any:
        require_frame(f"{type(self).__name__}.transform", dataset)
        source = self._source(features=True)
        reader = self._reader(source, str(self.getOrDefault("scaleHint")))
        layers = [self._layer] if self._layer else []
        archive = source.encode([] if layers else list(source.signature.outputs), layers)
        return as_vector(self._predicted(dataset, archive, reader), self.getOutputCol())


@has_params(
    ParamSpec("decodePredictions", "return names of classes", taking(FLAG), False),
    ParamSpec("topK", "how many classes are returned", taking(whole(0)), 5),
)
class DeepImagePredictor(_DeepImage):
    """Spark's image column -> class probabilities, or the most probable classes by name.

    Args:
        inputCol: A column of ``spark.read.format('image')``; images are resized on the executors.
        outputCol: A vector of probabilities; with ``decodePredictions`` an array of structs
            ``(class, description, probability)``.
        modelName, preprocess: As for :class:`DeepImageFeaturizer`.
        decodePredictions: The names of ImageNet's classes, for a model with its 1000 classes;
            Keras downloads the names, unless ``labels`` are given.
        topK: The number of most probable classes that are returned.
        model: A Keras model, or the path of one.
        labels: Names of the classes of ``model``, in their order.

    Raises:
        ConfigError: No model is named.
        UnknownNameError: No such application.
    """

    __module__ = "sparkdl"
    PARTS = ("labels", "model", "preprocess")
    _labels: list[str] | None = None

    def _transform(self, dataset: object) -> Any:
        require_frame(f"{type(self).__name__}.transform", dataset)
        source = self._source(features=False)
        reader = self._reader(source, "SCALE_AREA_AVERAGING")
        archive = source.encode(list(source.signature.outputs))
        predicted = self._predicted(dataset, archive, reader)
        column = self.getOutputCol()
        if not self.getOrDefault("decodePredictions"):
            return as_vector(predicted, column)
        top = _most_probable(column, self._names(), int(self.getOrDefault("topK")))
        return predicted.withColumn(column, top)

    def _names(self) -> list[tuple[str, str]]:
        if self._labels is not None:
            return [(str(number), str(name)) for number, name in enumerate(self._labels)]
        if not self.getModelName():
            raise ConfigError(
                "DeepImagePredictor does not know what the classes are called",
                expected="labels=[...], one name per class, or a modelName",
                received="decodePredictions=True, and neither",
            )
        hint = "labels=[...] names the classes, and downloads nothing"
        with _downloading("the names of ImageNet's classes", "the names", hint):
            return model_source.imagenet_names(APPLICATIONS[self.getModelName()].module)


def as_vector(frame: Any, column: str) -> Any:
    """The frame with a column of numbers or (nested) arrays as ML vectors."""
    kind, values = frame.schema[column].dataType, column_named(column)
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
        column_named(column),
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
