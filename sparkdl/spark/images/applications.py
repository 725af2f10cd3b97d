"""What the image classifiers of ``keras.applications`` want, by Databricks' names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ResourceError, UnknownNameError
from sparkdl.spark.images.pixels import Pixels

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
    from sparkdl.learner.applications import pretrained

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
    from sparkdl.learner.applications import imagenet_names

    try:
        return imagenet_names(application(name).module)
    except Exception as error:
        raise ResourceError(
            "the names of ImageNet's classes cannot be loaded",
            expected="the names in Keras' cache (~/.keras/models), or a way to download them",
            received=f"{type(error).__name__}: {str(error)[:300]}",
            hint="labels=[...] names the classes, and downloads nothing",
        ) from error
