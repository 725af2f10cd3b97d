"""The HDF5 files of Elephas' stages: Params as JSON, weights as arrays."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkdl.errors import ModelError
from sparkdl.files import storage
from sparkdl.values import shown

_SETTINGS = "distributed_config"


@dataclass(frozen=True)
class StageFile:
    """What such a file holds.

    Args:
        config: The Params that have a value, by name.
        weights: Arrays, in the order of ``model.get_weights()``.
        model_type: The name of a ``ModelType``; empty for none.
    """

    config: dict[str, Any]
    weights: list[Any]
    model_type: str


def write_stage_file(path: str, class_name: str, saved: StageFile) -> None:
    """Writes a stage's file whole or not at all.

    Args:
        path: A path or URI; a file that is there is replaced.
        class_name: Of the stage.
        saved: What the file is to hold.

    Raises:
        ResourceError: The path cannot be written.
    """
    import h5py

    content = io.BytesIO()
    with h5py.File(content, mode="w") as file:
        file.attrs["model_type"] = saved.model_type
        for number, weight in enumerate(saved.weights):  # JSON would make them too large
            file.create_dataset(f"weights/{number:05d}", data=np.asarray(weight))
        file.attrs[_SETTINGS] = json.dumps(
            {"class_name": class_name, "config": saved.config}
        ).encode()
    storage.write_bytes(path, content.getvalue())


def read_stage_file(path: str, class_name: str) -> StageFile:
    """The counterpart of :func:`write_stage_file`; also reads Elephas' own files.

    Raises:
        ResourceError: The path cannot be read.
        ModelError: The file is of another stage, or of none.
    """
    import h5py

    content = io.BytesIO(storage.read_bytes(path))
    try:
        with h5py.File(content, mode="r") as file:
            saved = json.loads(file.attrs.get(_SETTINGS, "{}"))
            stored = file.get("weights")
            weights = [] if stored is None else [np.array(stored[name]) for name in sorted(stored)]
            kind = str(file.attrs.get("model_type", ""))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{path!r} holds no {class_name}",
            expected=f"a file that {class_name}.save wrote",
            received=f"{type(error).__name__}: {str(error)[:200]}",
        ) from error
    if not isinstance(saved, dict) or saved.get("class_name") != class_name:
        raise ModelError(
            f"{path!r} holds no {class_name}",
            expected=f"a file that {class_name}.save wrote",
            received=shown(saved.get("class_name") if isinstance(saved, dict) else saved),
        )
    return StageFile(dict(saved["config"]), weights, kind)
