"""A Keras model in the format of another runtime, through Keras' own ``export``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.errors import ModelError, ResourceError, UnknownNameError
from sparkdl.files import storage
from sparkdl.files.temporary import TemporaryFolder
from sparkdl.learner.signature import model_signature

if TYPE_CHECKING:
    import keras

FORMATS = {
    "tf_saved_model": "", "onnx": ".onnx", "openvino": ".xml", "litert": ".tflite", "torch": ".pt2",
}  # fmt: skip
"""Format of Keras -> how the file's name ends; a SavedModel is a folder."""


def export_model(model: keras.Model, path: str, file_format: str) -> None:
    """Writes what a runtime without Keras can load: the forward pass and the weights.

    Args:
        path: A path or URI: of a folder for ``'tf_saved_model'``, else of a file. The weights of
            ``'openvino'`` are beside it, with ``.bin`` in place of ``.xml``.
        file_format: A key of :data:`FORMATS`.

    Raises:
        UnknownNameError: No such format.
        ResourceError: A package is missing that Keras needs for it, or the path cannot be written
            as other programs read it.
        ModelError: Keras cannot export the model.
    """
    if file_format not in FORMATS:
        raise UnknownNameError("format of an export", file_format, FORMATS)
    target = str(path).rstrip("/")
    storage.require_plain(target)
    with TemporaryFolder() as folder:
        local = os.path.join(folder.path, f"exported{FORMATS[file_format]}")
        try:
            _call_once(model)
            model.export(local, format=file_format, verbose=False)
        except ImportError as error:
            raise ResourceError(
                f"format {file_format!r} needs a package that is not installed",
                expected="what Keras' export needs for it",
                received=str(error),
                hint="pip install 'sparkdl-keras[onnx]'"
                if file_format == "onnx"
                else f"pip install {error.name or file_format}",
            ) from error
        except Exception as error:
            raise ModelError(
                f"model {model.name!r} cannot be exported as {file_format!r}",
                expected="a model that keras.Model.export can write",
                received=f"{type(error).__name__}: {str(error)[:600]}",
            ) from error
        stem = target.removesuffix(FORMATS[file_format])
        for place, _, names in os.walk(folder.path):
            for name in names:
                inside = os.path.relpath(os.path.join(place, name), folder.path)
                if not inside.startswith("exported"):
                    continue  # the folder's own
                ending = inside.removeprefix("exported").replace(os.sep, "/")
                written = target if ending == FORMATS[file_format] else stem + ending
                storage.write_bytes(written, Path(place, name).read_bytes())


def _call_once(model: keras.Model) -> None:
    """Calls a model with symbols, which computes nothing, if it was never called in this process.

    Keras exports to ONNX, and subclassed models at all, only what was called once: a model that
    executors have trained was not.
    """
    if model._called:
        return
    import keras

    signature = model_signature(model)
    specs = signature.inputs
    if signature.preprocessing or any(spec.shape is None for spec in specs.values()):
        return
    symbols = {n: keras.KerasTensor((None, *(s.shape or ())), s.dtype) for n, s in specs.items()}
    model(next(iter(symbols.values())) if len(symbols) == 1 else symbols)
