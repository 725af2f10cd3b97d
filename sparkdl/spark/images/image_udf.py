"""``registerKerasImageUDF``: an image classifier as a function of SQL, by Databricks' name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ModelError
from sparkdl.learner.prediction.model_source import open_model
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.spark.images.deep_image import ImageReader, require_pillow
from sparkdl.spark.session.running import session_of
from sparkdl.spark.udf import register_udf


@dataclass(frozen=True)
class LoadedByUser:
    """Makes a model's input of an image struct through a function of the user's."""

    preprocessor: Callable[[npt.NDArray[Any]], Any]

    def __call__(self, image: Mapping[str, Any]) -> Any:
        from sparkdl.spark.images.deep_image import rgb_of

        return np.asarray(self.preprocessor(rgb_of(image)))


@lists_its_arguments
def registerKerasImageUDF(
    udf_name: str,
    keras_model_or_file_path: Any,
    preprocessor: Callable[[Any], Any] | None = None,
    *,
    spark: Any = None,
) -> Callable[..., Any]:
    """Makes an image model a function of SQL over Spark's image column; a name is replaced.

    ::

        registerKerasImageUDF('classes', 'cnn.keras')
        spark.sql('SELECT image.origin, classes(image) FROM pictures')

    Args:
        udf_name: Of the function.
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
