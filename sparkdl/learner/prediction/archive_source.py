"""A model that is known by its architecture; its weights stay in the file until they are needed."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sparkdl.learner.archives.archive import ModelArchive, decode_model, lenient_constructors
from sparkdl.learner.prediction.class_scores import ClassScores, class_scores
from sparkdl.learner.prediction.model_source import KerasSource, kept_positions
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.learner.signature import Signature, gives_otherwise, has_own, model_signature


@dataclass(frozen=True)
class Outline:
    """The facts about its model in a ``.keras`` file, beside the weights.

    Args:
        signature: The model's inputs and outputs.
        scores: Output name -> which classes its numbers are about, where that is known.
        loss: What the model was compiled with; None if it was not compiled.
        compiled: Whether the file has compile settings, and so may have optimizer state.
        one_tensor: The model gives one tensor, not a list or a dict.
        positions: See :class:`PredictorArchive`.
    """

    signature: Signature
    scores: Mapping[str, ClassScores]
    loss: Any
    compiled: bool
    one_tensor: bool
    positions: Mapping[str, str]


class ArchiveSource:
    """An archived model; see :class:`sparkdl.learner.prediction.model_source.ModelSource`.

    A model without compile settings travels to those who predict as the file that it is: Keras
    neither loads nor saves it here.

    Args:
        objects: Name -> class or function that it uses.
        digest: Digest of the archive's content.
    """

    def __init__(
        self, archive: ModelArchive, objects: Mapping[str, Any], outline: Outline, digest: str
    ) -> None:
        self._archive, self._objects = archive, dict(objects)
        self._outline, self._digest = outline, digest

    @property
    def signature(self) -> Signature:
        return self._outline.signature

    def encode(self, outputs: Sequence[str], layers: Sequence[str] = ()) -> PredictorArchive:
        outline, archive = self._outline, self._archive
        every = list(outputs) == list(outline.signature.outputs)
        if outline.compiled or layers or not every or not outline.one_tensor:
            source = KerasSource(self._load(), self._objects, outline.loss)
            return source.encode(outputs, layers)
        digest = hashlib.sha256(f"{archive.key} {self._digest}".encode()).hexdigest()
        return PredictorArchive(
            archive, "keras", digest, outline.signature, outline.scores, outline.positions
        )

    def predict(self, x: object, batch_size: int) -> Any:
        return self._load().predict(x, batch_size=batch_size, verbose=0)

    def _load(self) -> Any:
        return decode_model(self._archive, compiled=False, own_code=True)


def outline_of(content: bytes, objects: Mapping[str, Any], *, safe_mode: bool) -> Outline | None:
    """The outline of a ``.keras`` file; its weights are neither read nor given a place in memory.

    Args:
        objects: Name -> class or function that the model uses.
        safe_mode: False also takes what runs code from the file.

    Returns:
        None if Keras cannot make such a model, or not without its variables' values: loading it
        whole tells which.
    """
    # Keras keeps the variables that wait for their first value per thread. Those of the outline
    # must never get one, so the outline has a thread of its own.
    with ThreadPoolExecutor(1, "sparkdl-outline") as thread:
        try:
            return thread.submit(_outline, content, dict(objects), safe_mode).result()
        except Exception:  # told by whoever then loads the model whole
            return None


def _outline(content: bytes, objects: dict[str, Any], safe_mode: bool) -> Outline | None:
    import keras

    with zipfile.ZipFile(io.BytesIO(content)) as parts:
        config = json.loads(parts.read("config.json"))
    settings, config["compile_config"] = config.get("compile_config"), None
    given = {"custom_objects": objects, "safe_mode": safe_mode}
    loss = None
    with lenient_constructors(objects):
        with keras.StatelessScope(initialize_variables=False):
            model = keras.saving.deserialize_keras_object(config, **given)
        if has_own(model, "compile", "compile_from_config") or gives_otherwise(model):
            return None
        if settings:
            loss = keras.saving.deserialize_keras_object(settings, **given).get("loss")
            model.compile(optimizer=None, loss=loss)
        with keras.StatelessScope(initialize_variables=False):
            signature = model_signature(model)
            scores = class_scores(model, signature.outputs)
            positions = kept_positions(model, signature.inputs, signature.outputs)
    structure = getattr(model, "_outputs_struct", None)
    one_tensor = structure is not None and not isinstance(structure, (dict, list, tuple))
    one_tensor = one_tensor or (type(model) is keras.Sequential and len(signature.outputs) == 1)
    return Outline(signature, scores, loss, bool(settings), one_tensor, positions)
