"""Elephas' SparkModel in both generations of its signature, on top of :class:`sparkdl.SparkModel`.

The older: ``SparkModel(model, mode, frequency, parameter_server_mode, num_workers, custom_objects,
batch_size, port)``. The newer: ``SparkModel(model, num_workers, custom_objects, batch_size)`` for
synchronous training, ``SparkMLlibModel`` likewise, and ``AsynchronousSparkModel(model, num_workers,
custom_objects, batch_size, mode, frequency, parameter_server_mode, port)``.

A call belongs to the older generation if it begins with a mode, or names what only that one's
``SparkModel`` has; else to the newer.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import sparkdl
from sparkdl.config import CLASS_NAME, MODES
from sparkdl.errors import ConfigError, ModelError
from sparkdl.files import storage
from sparkdl.files.model_file import HDF5, read_model, require_writable
from sparkdl.files.temporary import TemporaryFolder
from sparkdl.learner.signature import TensorSpec, model_signature
from sparkdl.settings.values import shown
from sparkdl.spark.fit.trained_model import TrainedModel
from sparkdl.spark.mllib import SparkMLlibModel as _SparkMLlibModel
from sparkdl.spark.session.frames import is_rdd
from sparkdl.spark.spark_model import load_as

_OLDER = ("mode", "frequency", "parameter_server_mode", "num_workers", "custom_objects",
          "batch_size", "port")  # fmt: skip
_NEWER = ("num_workers", "custom_objects", "batch_size")
_NEWER_ASYNCHRONOUS = (*_NEWER, "mode", "frequency", "parameter_server_mode", "port")
_ONLY_OLDER = frozenset(_OLDER) - frozenset(_NEWER)
_SETTINGS = "distributed_config"
"""The attribute of an HDF5 file in which Elephas keeps a model's settings."""
_SAVED = ("mode", "frequency", "parameter_server_mode", "num_workers", "batch_size")


class _Names(sparkdl.SparkModel):
    """Elephas' attributes and methods, before those of :class:`sparkdl.SparkModel`."""

    @property
    def master_network(self) -> Any:
        """The Keras model."""
        return self.model

    @master_network.setter
    def master_network(self, network: object) -> None:
        self._trained = TrainedModel(network)

    @property
    def training_histories(self) -> list[Any]:
        """The History of the last ``fit``, in a list; empty before one."""
        return [] if self._history is None else [self._history]

    def predict(self, data: Any, *arguments: Any, **options: Any) -> Any:
        """Outputs for an RDD or NumPy arrays, in order, as a list of arrays (one per row).

        An array ``(rows, inputs)`` for a model with several inputs has a column for each. A
        DataFrame, a vector and a matrix are handled as sparkdl does.
        """
        data = by_input(data, model_signature(self.model).inputs)
        predicted = super().predict(data, *arguments, **options)
        if is_rdd(predicted):
            return predicted.collect()
        return list(predicted) if isinstance(predicted, np.ndarray) else predicted

    def evaluate(  # type: ignore[override]
        self, x_test: object, y_test: object = None, **options: Any
    ) -> float | list[float]:
        """The loss, or a list of the loss and the metrics where there are metrics.

        Args:
            x_test: Features, ``(rows, ...)``; for a model with several inputs also a list of
                arrays, or one array ``(rows, inputs)``; or what
                :meth:`sparkdl.SparkModel.evaluate` takes.
            y_test: Labels, ``(rows, ...)``.
            **options: Options of :meth:`sparkdl.SparkModel.evaluate`.
        """
        data = x_test
        if y_test is not None:
            inputs = model_signature(self.model).inputs
            x = by_input(x_test, inputs) if len(inputs) > 1 else np.asarray(x_test)
            y = y_test if isinstance(y_test, (list, Mapping)) else np.asarray(y_test)
            data = (x, y)
        results = super().evaluate(data, **options)
        values = list(results.values())
        return values if len(values) > 1 else values[0]

    def save(self, file_name: str, overwrite: bool = False, to_hadoop: bool = False) -> None:
        """Writes a ``.keras`` or ``.h5`` file, from which the same class is loaded.

        Args:
            file_name: See :meth:`sparkdl.SparkModel.save`.
            overwrite: False refuses an existing file.
            to_hadoop: No effect: a path without a scheme is one of Spark's default file system in
                any case, as it is for the command ``hadoop fs``, which Elephas calls.

        Raises:
            ConfigError: Another kind of file.
            ResourceError: It exists and is not to be overwritten, or cannot be written.
        """
        path = str(file_name)
        if not path.endswith(HDF5):
            super().save(path, overwrite=overwrite)
            return
        require_writable(path, overwrite=overwrite)
        storage.write_bytes(path, self._hdf5())

    def _hdf5(self) -> bytes:
        import h5py

        config = self.get_config()
        settings = {"class_name": type(self).__name__, "config": {n: config[n] for n in _SAVED}}
        with TemporaryFolder() as folder:
            path = Path(folder.path) / "model.h5"
            self.model.save(path)
            with h5py.File(path, mode="a") as file:
                file.attrs[_SETTINGS] = json.dumps(settings).encode()
            return path.read_bytes()

    def _file_settings(self) -> dict[str, Any]:
        return {**super()._file_settings(), CLASS_NAME: type(self).__name__}


def by_input(x: object, inputs: Mapping[str, TensorSpec]) -> Any:
    """One array for a model with several inputs as a list of an array for each; others as they are.

    Elephas' rows of such a model are ``([input, input], label)``, and an array of them is
    ``(rows, inputs)`` where each input is a number.
    """
    if not isinstance(x, np.ndarray) or len(inputs) < 2 or x.ndim < 2:
        return x
    sizes = [math.prod(d or 0 for d in spec.shape or ()) for spec in inputs.values()]
    if x.ndim == 2 and x.shape[1] == len(inputs) and set(sizes) == {1}:
        shapes = [spec.shape or () for spec in inputs.values()]
        return [x[:, i].reshape(len(x), *shape) for i, shape in enumerate(shapes)]
    return list(x) if len(x) == len(inputs) else x


class SparkModel(_Names):
    """Elephas' ``SparkModel``.

    Args:
        model: A compiled Keras model.
        *arguments: In the order of either generation: a mode first, or a number of workers.
        **options: Elephas' or sparkdl's arguments by name. Without ``mode``: ``'asynchronous'``
            where the call is one of the older generation (``frequency``, ``parameter_server_mode``
            or ``port`` by name), else ``'synchronous'``.
    """

    def __init__(self, model: object, *arguments: object, **options: object) -> None:
        super().__init__(model, **_given("SparkModel", arguments, options))


class AsynchronousSparkModel(_Names):
    """Elephas' ``AsynchronousSparkModel``: ``mode='asynchronous'`` or ``'hogwild'``.

    Args:
        model: A compiled Keras model.
        *arguments: ``num_workers, custom_objects, batch_size, mode, frequency,
            parameter_server_mode, port``; with a mode first, the order of the older ``SparkModel``.
        **options: Elephas' or sparkdl's arguments by name.
    """

    def __init__(self, model: object, *arguments: object, **options: object) -> None:
        given = _given("AsynchronousSparkModel", arguments, options, _NEWER_ASYNCHRONOUS)
        super().__init__(model, **given)


class SparkMLlibModel(_Names, _SparkMLlibModel):
    """Elephas' ``SparkMLlibModel``: trains on LabeledPoints, predicts vectors and matrices.

    Its arguments are those of :class:`SparkModel`.
    """

    def __init__(self, model: object, *arguments: object, **options: object) -> None:
        super().__init__(model, **_given("SparkMLlibModel", arguments, options))


_Model: TypeAlias = SparkModel | SparkMLlibModel | AsynchronousSparkModel


def load_spark_model(file_name: str, from_hadoop: bool = False, **overrides: Any) -> _Model:
    """Loads what ``save`` wrote: a ``.keras`` or ``.h5`` file, also an HDF5 file of Elephas' own.

    Args:
        file_name: A path; see ``save``.
        from_hadoop: No effect; see ``save``.
        **overrides: Arguments of :func:`sparkdl.load_spark_model` for ``.keras`` files.

    Returns:
        A model of the class that was saved; a :class:`SparkModel` where the file does not say.

    Raises:
        ResourceError: The path cannot be read.
        ModelError: The file holds no compiled Keras model.
    """
    from sparkdl.learner.archives.archive import model_from_bytes

    path = str(file_name)
    custom_objects = overrides.pop("custom_objects", None)
    if not path.endswith(HDF5):
        file = read_model(path)
        cls = _class_named(file.settings.get(CLASS_NAME))
        return load_as(cls, file, path, custom_objects, **overrides)
    content = storage.read_bytes(path)
    safe_mode = overrides.pop("safe_mode", True)
    model = model_from_bytes(content, custom_objects, safe_mode=safe_mode, path=path)
    settings = _settings_in(content, path)
    saved = settings.get("config") or {}
    if not isinstance(saved, dict):
        raise ModelError(
            f"{path!r} has malformed settings", expected="config: a JSON object",
            received=f"a {type(saved).__name__}",
        )  # fmt: skip
    config = {name: value for name, value in saved.items() if name in _SAVED}
    cls = _class_named(settings.get("class_name"))
    return cls(model, custom_objects=custom_objects, **{**config, **overrides})


def _class_named(name: object) -> type[_Model]:
    """The class of a saved model; :class:`SparkModel` for a name that is none of Elephas'."""
    kinds: tuple[type[_Model], ...] = (AsynchronousSparkModel, SparkMLlibModel)
    return next((cls for cls in kinds if cls.__name__ == name), SparkModel)


def _settings_in(content: bytes, path: str) -> dict[str, Any]:
    """The settings of training in a model's HDF5 file; empty if plain Keras wrote it."""
    import h5py

    try:
        with h5py.File(io.BytesIO(content), mode="r") as file:
            saved = file.attrs.get(_SETTINGS)
        settings = {} if saved is None else json.loads(saved)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{path!r} has malformed settings", expected="a HDF5 file with JSON",
            received=f"{type(error).__name__}: {str(error)[:200]}",
        ) from error  # fmt: skip
    return settings if isinstance(settings, dict) else {}


def _given(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any], newer: tuple[str, ...] = _NEWER
) -> dict[str, Any]:
    is_older = bool(_ONLY_OLDER & set(options))
    if arguments:
        is_older = isinstance(arguments[0], str) and arguments[0] in MODES
    names = _OLDER if is_older else newer
    if len(arguments) > len(names):
        raise ConfigError(
            f"{name} has too many arguments without a name", expected="model, " + ", ".join(names),
            received=shown(arguments),
        )  # fmt: skip
    given = dict(zip(names, arguments, strict=False))
    twice = sorted(set(given) & set(options))
    if twice:
        raise ConfigError(
            f"an argument of {name} is there twice", expected="each once, by place or by name",
            received=", ".join(twice),
        )  # fmt: skip
    waits = not is_older and newer is _NEWER
    given = {"mode": "synchronous" if waits else "asynchronous", **given, **options}
    for name in given.keys() & {"mode", "frequency"}:  # each may be a member of an Enum
        given[name] = getattr(given[name], "value", given[name])
    return given


__all__ = ["AsynchronousSparkModel", "SparkMLlibModel", "SparkModel", "load_spark_model"]
