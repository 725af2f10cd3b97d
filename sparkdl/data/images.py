"""Spark's image struct -> RGB arrays.

Spark stores images as OpenCV does: rows of uint8 pixels, channels in the order blue, green, red
(, alpha). The model gets red, green, blue, as every Keras application expects.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.data.conform import ValuePlace
from sparkdl.data.ragged import Array
from sparkdl.errors import DataError

# OpenCV's codes for 8-bit unsigned pixels with 1, 3 and 4 channels.
_CHANNELS_OF_MODE = {0: 1, 16: 3, 24: 4}
_FIELDS = ("height", "width", "nChannels", "mode", "data")


def decode_images(array: Any, place: ValuePlace) -> Array:
    """Image structs -> uint8 ``(num_rows, height, width, channels)`` in RGB(A) or grey.

    Grey images fill all three channels of a model that wants three; an alpha channel is dropped
    where three are wanted. Sizes must agree within the batch: nothing is resized.

    Raises:
        DataError: No image struct, an image that Spark could not decode, or one of another size
            than the model's input.
    """

    def error(problem: str, row: int | None, expected: str, received: str) -> DataError:
        hint = "a decoder can resize and convert: it gets the struct as a dict"
        return place.error(problem, row=row, expected=expected, received=received, hint=hint)

    spec = place.spec
    kind = array.type
    if not pa.types.is_struct(kind) or not set(_FIELDS) <= {f.name for f in kind}:
        raise error("no image", None, f"a struct with the fields {_FIELDS}", f"Arrow type {kind}")
    if len(spec.value_shape) != 3:
        raise error(
            "a model input that is no image",
            None,
            "a shape (height, width, channels)",
            f"shape {spec.value_shape}",
        )
    fields = dict(zip([f.name for f in kind], array.flatten(), strict=True))
    for name in _FIELDS:
        if fields[name].null_count:
            raise error(
                f"nulls in field {name!r}", None, "no nulls", f"{fields[name].null_count} nulls"
            )
    heights, widths, channels, modes = (fields[n].to_numpy() for n in _FIELDS[:4])
    rows = len(array)
    if rows == 0:
        return np.empty((0, *(d or 0 for d in spec.value_shape)), np.uint8)
    expected = np.select([modes == m for m in _CHANNELS_OF_MODE], [*_CHANNELS_OF_MODE.values()], 0)
    unknown = (expected != channels) | (expected == 0)
    if unknown.any():
        row = int(np.argmax(unknown))
        raise error(
            "an image of unknown pixel format",
            row,
            "mode 0, 16 or 24: uint8 with 1, 3 or 4 channels",
            f"mode {modes[row]} with {channels[row]} channels",
        )
    height, width, wanted = spec.value_shape
    height = int(heights[0]) if height is None else height
    width = int(widths[0]) if width is None else width
    wanted = int(channels[0]) if wanted is None else wanted
    lengths = np.diff(_offsets(fields["data"]))
    bad = (heights != height) | (widths != width)
    bad |= (channels != wanted) & ~((wanted == 3) & ((channels == 1) | (channels == 4)))
    bad |= lengths != heights.astype(np.int64) * widths * channels
    if bad.any():
        row = int(np.argmax(bad))
        raise error(
            "an image whose size is not the model's",
            row,
            f"shape {(height, width, wanted)}",
            f"shape {(int(heights[row]), int(widths[row]), int(channels[row]))}"
            f" in {lengths[row]} bytes",
        )
    if (channels == channels[0]).all():
        return _to_rgb(_pixels(fields["data"], height, width, int(channels[0])), wanted)
    out = np.empty((rows, height, width, wanted), np.uint8)
    for count in np.unique(channels):
        index = np.flatnonzero(channels == count)
        data = fields["data"].take(pa.array(index))
        out[index] = _to_rgb(_pixels(data, height, width, int(count)), wanted)
    return out


def _offsets(data: Any) -> Array:
    size = np.int64 if pa.types.is_large_binary(data.type) else np.int32
    offsets = np.frombuffer(data.buffers()[1], size)
    return offsets[data.offset : data.offset + len(data) + 1]


def _pixels(data: Any, height: int, width: int, channels: int) -> Array:
    offsets = _offsets(data)
    flat = np.frombuffer(data.buffers()[2] or b"", np.uint8)[int(offsets[0]) : int(offsets[-1])]
    return flat.reshape(len(data), height, width, channels)


def _to_rgb(pixels: Array, wanted: int) -> Array:
    channels = pixels.shape[-1]
    if channels == 1:
        return pixels if wanted == 1 else np.repeat(pixels, wanted, axis=-1)
    order = [2, 1, 0, 3][:wanted]
    out = np.empty((*pixels.shape[:-1], wanted), np.uint8)
    for target, source in enumerate(order):
        out[..., target] = pixels[..., source]
    return out
