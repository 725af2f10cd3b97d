"""TensorFlow's SavedModel: a program in a folder, with signatures that name inputs and outputs."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparkdl.errors import ModelError, UnknownNameError
from sparkdl.files import storage
from sparkdl.files.model_file import errors_named
from sparkdl.files.temporary import TemporaryFolder
from sparkdl.learner.archives.archive import ModelArchive
from sparkdl.learner.prediction.predictor import filled
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.learner.signature import Signature, TensorSpec
from sparkdl.process.payload import Bytes, joined
from sparkdl.training.learning import Arrays

_SIGNATURES = ("serving_default", "serve")
"""The signature that is called: the first of these that a SavedModel has."""


class SavedModelSource:
    """The folder of a SavedModel; see :class:`sparkdl.learner.prediction.model_source.ModelSource`.

    Args:
        path: A path or URI.

    Raises:
        ModelError: It cannot be loaded, or has no signature to call.
        ResourceError: It cannot be read.
    """

    def __init__(self, path: str) -> None:
        files = _read(path.rstrip("/"))
        self._content = _pack(files)
        with errors_named(path):
            self._predictor = SavedModelPredictor(self._content)
        digest = hashlib.sha256()
        for name, content in sorted(files.items()):
            digest.update(f"{name} {len(content)} ".encode())
            digest.update(content)
        self._digest = digest.hexdigest()
        self.signature = self._predictor.signature()

    def encode(self, outputs: Sequence[str], layers: Sequence[str] = ()) -> PredictorArchive:
        if layers:
            raise ModelError(
                "the layers of a SavedModel cannot be read",
                expected="a .keras file, or a Keras model",
                received="a SavedModel, which is a compiled program",
            )
        for name in outputs:
            if name not in self.signature.outputs:
                raise UnknownNameError("output of the model", name, self.signature.outputs)
        archive = ModelArchive(self._content, b"", "tensorflow", self._digest)
        return PredictorArchive(archive, "saved_model", self._digest, self.signature)

    def predict(self, x: object, batch_size: int) -> Any:
        if not isinstance(x, dict):
            x = dict(zip(self.signature.inputs, x if isinstance(x, list) else [x], strict=True))
        arrays = {name: np.asarray(array) for name, array in x.items()}
        rows = len(next(iter(arrays.values())))
        parts = []
        for start in range(0, rows, batch_size):
            part = {name: array[start : start + batch_size] for name, array in arrays.items()}
            parts.append(self._predictor.predict(part, batch_size))
        outputs = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
        return outputs if len(outputs) > 1 else next(iter(outputs.values()))


class SavedModelPredictor:
    """A SavedModel in this process; see :class:`sparkdl.training.learning.Predictor`.

    Args:
        content: Its files, as :class:`SavedModelSource` packs them.

    Raises:
        ModelError: It cannot be loaded, or has no signature to call.
    """

    passes = 1

    def __init__(self, content: Bytes) -> None:
        import tensorflow as tf

        self._tf = tf
        with TemporaryFolder() as folder:
            with zipfile.ZipFile(io.BytesIO(joined(content))) as files:
                files.extractall(folder.path)
            try:
                self._loaded = tf.saved_model.load(folder.path)
            except Exception as error:
                raise ModelError(
                    "the SavedModel cannot be loaded",
                    expected="a folder that tf.saved_model.save or Keras' model.export wrote",
                    received=f"{type(error).__name__}: {str(error)[:600]}",
                ) from error
        signatures = dict(self._loaded.signatures)
        name = next((name for name in _SIGNATURES if name in signatures), None)
        if name is None:
            raise ModelError(
                "the SavedModel has no signature to call",
                expected=" or ".join(map(repr, _SIGNATURES)), received=str(sorted(signatures)),
                hint="model.export(folder) of Keras writes one",
            )  # fmt: skip
        self._function = signatures[name]
        _, self._inputs = self._function.structured_input_signature

    def signature(self) -> Signature:
        """The inputs and outputs of the signature."""
        inputs = {n: _spec(n, t) for n, t in self._inputs.items()}
        outputs = {n: _spec(n, t) for n, t in sorted(self._function.structured_outputs.items())}
        return Signature(inputs, outputs, dict.fromkeys(outputs, "dense"), True)

    def predict(self, x: Arrays, batch_size: int) -> Arrays:
        rows = len(next(iter(x.values())))
        tensors = {
            name: self._tf.convert_to_tensor(
                array if rows == batch_size else filled(array, batch_size), self._inputs[name].dtype
            )
            for name, array in x.items()
        }
        return {name: tensor.numpy()[:rows] for name, tensor in self._function(**tensors).items()}

    def reload(self) -> None:
        """Nothing to do: its variables are not anybody else's."""


def _spec(name: str, tensor: Any) -> TensorSpec:
    known = tensor.shape.rank is not None
    shape = tuple(tensor.shape.as_list()[1:]) if known else None
    return TensorSpec(name, shape, str(tensor.dtype.name))


def _read(path: str) -> dict[str, bytes]:
    found = {}
    for folder in ("", "variables/", "assets/"):
        if storage.exists(f"{path}/{folder}"):
            for file in storage.list_files(f"{path}/{folder}".rstrip("/"), ""):
                found[f"{folder}{file.rpartition('/')[2]}"] = storage.read_bytes(file)
    return found


def _pack(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()
