"""``load_spark_model``: a saved model and its settings as a :class:`SparkModel`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from sparkdl.config import arguments_from_file, columns_from_file
from sparkdl.files.model_file import ModelFile, read_model
from sparkdl.learner.archives.archive import model_from_bytes
from sparkdl.settings.values import require_objects, require_path
from sparkdl.spark.fit.choice import is_default_rule, restore_rule
from sparkdl.spark.spark_model import SparkModel
from sparkdl.tables.checkpoints import found_beside

M = TypeVar("M", bound=SparkModel)


def load_spark_model(
    path: str,
    custom_objects: dict[str, Any] | None = None,
    safe_mode: bool = True,
    **overrides: object,
) -> SparkModel:
    """Loads what :meth:`SparkModel.save` wrote, or any ``.keras`` file.

    Args:
        path: See :meth:`SparkModel.save`.
        custom_objects: Name -> class or function that the model uses.
        safe_mode: False also loads what runs code from the file (``Lambda`` layers): only for
            files that you trust.
        **overrides: Arguments of :class:`SparkModel` to have instead of those saved, and
            ``decoder``, which is not saved.

    Returns:
        A SparkModel with the same mode and settings; its next ``fit`` goes on with the optimizer
        state and, in mode ``'allreduce'``, the outer momentum of rules like ``'diloco'``, and
        ``predict`` and ``evaluate`` read the columns of its last ``fit``.
        ``port`` and ``network`` have their defaults: where the driver and its workers listen, and
        whether they encrypt, is for their user to say, never for a file.

    Raises:
        ResourceError: The path cannot be read.
        ModelError: The file holds no compiled Keras model.
    """
    path = require_path("path", path)
    custom_objects = require_objects(custom_objects)
    return load_as(SparkModel, read_model(path), path, custom_objects, safe_mode, **overrides)


def load_as(
    cls: type[M],
    file: ModelFile,
    path: str,
    custom_objects: dict[str, Any] | None = None,
    safe_mode: bool = True,
    **overrides: object,
) -> M:
    """A model file as a ``SparkModel``, or a subclass that takes its arguments by name.

    Args:
        file: What was read.
        path: Path of the file, for messages.
        custom_objects, safe_mode, **overrides: See :func:`load_spark_model`.

    Raises:
        ModelError: The file holds no compiled Keras model.
    """
    settings = arguments_from_file(file.settings, path)
    content, tables = found_beside(file.content, f"{path}.tables")
    model = model_from_bytes(content, custom_objects, safe_mode=safe_mode, path=path)
    if "rule" not in overrides and settings.get("rule"):
        mode, rule = settings["mode"], settings["rule"]
        to_another = overrides.get("mode", mode) != mode
        frequency = settings.get("frequency", "auto")
        if to_another and is_default_rule(mode, frequency, rule, model.optimizer):
            settings["rule"] = None  # which nobody chose: the other mode has its own
        else:
            settings["rule"] = restore_rule(mode, rule)
    loaded = cls(model, custom_objects=custom_objects, **{**settings, **overrides})
    columns = columns_from_file(file.settings, path)
    loaded._columns = replace(loaded._columns, **columns)
    if file.state is not None:
        loaded._epochs_trained = file.state.epoch  # the next fit's row order is not the first's
        if not {"mode", "rule"} & set(overrides):
            loaded._trained.rule_state = file.state.rule if tables is None else tables.to_bytes()
    return loaded
