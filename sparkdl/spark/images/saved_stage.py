"""``SavedImageStage``: image stages are saved and loaded as the stages of :mod:`sparkdl.ml` are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pyspark.ml.param import Params
from pyspark.ml.util import MLReadable, MLWritable

from sparkdl.errors import ModelError
from sparkdl.files.model_file import HDF5, read_keras_file
from sparkdl.learner.archives.archive import ModelArchive, model_from_bytes
from sparkdl.spark.ml.files import Loaded, StageContent, StageReader, StageWriter, load_model
from sparkdl.spark.ml.parts import archive_of

S = TypeVar("S", bound="SavedImageStage")


@dataclass(frozen=True)
class Part:
    """The parts of a stage that are no Params.

    Args:
        name: Of the constructor's argument, and in files.
        attribute: Of the stage.
        code: It is a function, so that only a reader that is told to trust the file loads it.
    """

    name: str
    attribute: str
    code: bool = False


class SavedImageStage(Params, MLWritable, MLReadable):  # type: ignore[misc]
    """A stage with a model and other parts, which goes into files with them."""

    SAVED_PARTS: ClassVar[tuple[Part, ...]] = ()
    _model: Any = None

    def _begin(self) -> None:
        """Makes an empty stage with its defaults; a constructor and a reader begin with it."""
        super().__init__()

    def _given_model(self) -> Any:
        """The model of this stage: a Keras model, the path of one, or None."""
        return self._model

    @classmethod
    def _empty(cls: type[S]) -> S:
        stage = cls.__new__(cls)
        stage._begin()
        return stage

    def write(self) -> StageWriter:
        """Saves the stage: ``write().overwrite().save(path)``; a model given as a path, too."""
        return StageWriter(self)

    @classmethod
    def read(cls: type[S]) -> StageReader[S]:
        """Loads what ``write`` saved: ``read().load(path)``; ``read().trusted()`` with code."""
        return StageReader(cls._empty)

    def content(self) -> StageContent:
        """The parts that are saved beside the Params."""
        plain: dict[str, Any] = {}
        code: dict[str, Any] = {}
        for part in self.SAVED_PARTS:
            value = getattr(self, part.attribute)
            if value is not None:
                (code if part.code or not is_json(value) else plain)[part.name] = value
        return StageContent({"parts": plain}, _archive_of(self._given_model()), code)

    def take(self, loaded: Loaded) -> None:
        """The counterpart of :meth:`content`."""
        saved: Mapping[str, Any] = {**loaded.plain["parts"], **loaded.code}
        for part in self.SAVED_PARTS:
            setattr(self, part.attribute, saved.get(part.name))
        found = load_model(loaded)
        self._model = None if found is None else found[0]


def is_json(value: Any) -> bool:
    """Whether JSON gives the same value back."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _archive_of(model: Any) -> ModelArchive | None:
    """A stage's model as it goes into the file; a path is read, so that the file has it all.

    Raises:
        ModelError: It is the folder of a SavedModel.
    """
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
