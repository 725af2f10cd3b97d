"""On executors: a value of Spark's image column -> pixels of the size that a model wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ResourceError

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
        height: Of the model's input.
        width: Of the model's input.
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

        Raises:
            ValueError: Not 8 bits per channel, or not 1, 3 or 4 channels.
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
            expected="Pillow, on the driver and on the executors",
            received=f"ImportError: {error}",
            hint="pip install 'sparkdl-keras[images]'",
        ) from error


def _resized(pixels: npt.NDArray[np.uint8], height: int, width: int, name: str) -> Pixels:
    if pixels.shape[:2] != (height, width):
        require_pillow()
        from PIL import Image

        image = Image.fromarray(np.ascontiguousarray(pixels))
        pixels = np.asarray(image.resize((width, height), getattr(Image.Resampling, name)))
    return pixels.astype(np.float32)
