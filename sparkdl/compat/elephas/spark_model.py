"""Elephas' SparkModel in both generations of its signature, on top of :class:`sparkdl.SparkModel`.

Elephas up to version 3: ``SparkModel(model, mode, frequency, parameter_server_mode, num_workers,
custom_objects, batch_size, port)``. Later: ``SparkModel(model, num_workers, custom_objects,
batch_size)`` for synchronous training, and ``AsynchronousSparkModel``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import sparkdl
from sparkdl.config import MODES, shown
from sparkdl.errors import ConfigError, ModelError, ResourceError
from sparkdl.files import storage
from sparkdl.spark.columns.sources import is_rdd
from sparkdl.spark.driver.trained_model import TrainedModel
from sparkdl.spark.mllib import SparkMLlibModel as _SparkMLlibModel

_OLDER = ("mode", "frequency", "parameter_server_mode", "num_workers", "custom_objects",
          "batch_size", "port")  # fmt: skip
_NEWER = ("num_workers", "custom_objects", "batch_size")
_HDF5 = (".h5", ".hdf5")
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
    def master_network(self, network: Any) -> None:
        self._trained = TrainedModel(network)

    @property
    def training_histories(self) -> list[Any]:
        """The History of the last ``fit``, in a list; empty before one."""
        return [] if self._history is None else [self._history]

    def predict(self, data: Any, *arguments: Any, **options: Any) -> Any:
        """Outputs for an RDD or NumPy arrays, in order, as a list of arrays (one per row).

        A DataFrame, a vector and a matrix are handled as sparkdl does.
        """
        predicted = super().predict(data, *arguments, **options)
        if is_rdd(predicted):
            return predicted.collect()
        return list(predicted) if isinstance(predicted, np.ndarray) else predicted

    def evaluate(  # type: ignore[override]
        self, x_test: Any, y_test: Any = None, **options: Any
    ) -> float | list[float]:
        """The loss, or a list of the loss and the metrics where there are metrics.

        Args:
            x_test: Features, ``(rows, ...)``; or what :meth:`sparkdl.SparkModel.evaluate` takes.
            y_test: Labels, ``(rows, ...)``.
            **options: Of :meth:`sparkdl.SparkModel.evaluate`.
        """
        data = x_test if y_test is None else (np.asarray(x_test), np.asarray(y_test))
        results = super().evaluate(data, **options)
        values = list(results.values())
        return values if len(values) > 1 else values[0]

    def save(self, file_name: str, overwrite: bool = False, to_hadoop: bool = False) -> None:
        """Writes a ``.keras`` or ``.h5`` file.

        Args:
            file_name: A path; ``.keras`` files also as a URI, e.g. ``hdfs://``.
            overwrite: False refuses an existing file.
            to_hadoop: The path is one of Hadoop's; ``.keras`` files only.

        Raises:
            ConfigError: Another kind of file.
            ResourceError: It exists and is not to be overwritten, or cannot be written.
        """
        path = _hadoop_path(file_name) if to_hadoop else str(file_name)
        if not path.endswith(_HDF5):
            super().save(path, overwrite=overwrite)
            return
        if to_hadoop:
            raise ConfigError(
                "an HDF5 file is written to a local path", expected="a path that ends in '.keras'",
                received=path,
            )  # fmt: skip
        if Path(path).exists() and not overwrite:
            raise ResourceError(
                f"{path!r} exists", expected="a new path", received="an existing one",
                hint="save(path, overwrite=True)",
            )  # fmt: skip
        import h5py

        self.model.save(path)
        config = self.get_config()
        settings = {name: config[name] for name in _SAVED}
        with h5py.File(path, mode="a") as file:
            file.attrs[_SETTINGS] = json.dumps(
                {"class_name": type(self).__name__, "config": settings}
            ).encode()


class SparkModel(_Names):
    """Elephas' ``SparkModel``.

    Args:
        model: A compiled Keras model.
        *arguments: In the order of either generation: a mode first, or a number of workers.
        **options: Elephas' or sparkdl's arguments by name. Without a mode: ``'synchronous'`` where
            the first argument after the model is a number of workers, else ``'asynchronous'``.
    """

    def __init__(self, model: Any, *arguments: Any, **options: Any) -> None:
        newer = bool(arguments) and arguments[0] not in MODES
        names = _NEWER if newer else _OLDER
        if len(arguments) > len(names):
            raise ConfigError(
                "SparkModel has too many arguments without a name",
                expected="model, " + ", ".join(names),
                received=shown(arguments),
            )
        given = dict(zip(names, arguments, strict=False))
        twice = sorted(set(given) & set(options))
        if twice:
            raise ConfigError(
                "an argument of SparkModel is there twice",
                expected="each once, by place or by name",
                received=", ".join(twice),
            )
        given |= options
        if newer:
            given.setdefault("mode", "synchronous")
        super().__init__(model, **_plain(given))


class AsynchronousSparkModel(_Names):
    """Elephas' ``AsynchronousSparkModel``: ``mode='asynchronous'`` or ``'hogwild'``."""

    def __init__(self, model: Any, mode: str = "asynchronous", *arguments: Any, **options: Any):
        given = dict(zip(_OLDER[1:], arguments, strict=False))
        super().__init__(model, **_plain({"mode": mode, **given, **options}))


class SparkMLlibModel(_Names, _SparkMLlibModel):
    """Elephas' ``SparkMLlibModel``: trains on LabeledPoints, predicts vectors and matrices."""

    def __init__(self, model: Any, *arguments: Any, **options: Any) -> None:
        names = _OLDER if not arguments or arguments[0] in MODES else _NEWER
        given = {**dict(zip(names, arguments, strict=False)), **options}
        super().__init__(model, **_plain(given))


def load_spark_model(
    file_name: str, from_hadoop: bool = False, **overrides: Any
) -> SparkModel | SparkMLlibModel | AsynchronousSparkModel:
    """Loads what ``save`` wrote: a ``.keras`` or ``.h5`` file, also one of Elephas' own.

    Args:
        file_name: A path; see ``save``.
        from_hadoop: The path is one of Hadoop's.
        **overrides: Of :func:`sparkdl.load_spark_model` for ``.keras`` files, else of the model.

    Raises:
        ResourceError: The path cannot be read.
        ModelError: The file holds no compiled Keras model.
    """
    from sparkdl.learner.archive import model_from_bytes

    path = _hadoop_path(file_name) if from_hadoop else str(file_name)
    custom_objects = overrides.pop("custom_objects", None)
    if not path.endswith(_HDF5):
        loaded = sparkdl.load_spark_model(path, custom_objects, **overrides)
        config = {k: v for k, v in loaded.get_config().items() if k in _SAVED}
        if config["mode"] == "allreduce":
            config.pop("parameter_server_mode")
        made = SparkModel(loaded.model, custom_objects=custom_objects, rule=loaded.rule, **config)
        made._trained = loaded._trained
        return made
    content = storage.read_bytes(path)
    model = model_from_bytes(content, custom_objects, safe_mode=True, path=path)
    settings = _settings_in(path)
    kinds = {cls.__name__: cls for cls in (SparkModel, AsynchronousSparkModel, SparkMLlibModel)}
    cls = kinds.get(str(settings.get("class_name")), SparkModel)
    config = {k: v for k, v in dict(settings.get("config") or {}).items() if k in _SAVED}
    return cls(model, custom_objects=custom_objects, **{**config, **overrides})


def _settings_in(path: str) -> dict[str, Any]:
    """What the HDF5 file of a model says about its training; empty if plain Keras wrote it."""
    import h5py

    with h5py.File(path.removeprefix("file://"), mode="r") as file:
        saved = file.attrs.get(_SETTINGS)
    if saved is None:
        return {}
    try:
        settings = json.loads(saved)
    except ValueError as error:
        raise ModelError(
            f"{path!r} has malformed settings", expected="JSON", received=str(error)
        ) from error
    return settings if isinstance(settings, dict) else {}


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Enums as their names."""
    return {k: getattr(v, "value", v) if k in ("mode", "frequency") else v
            for k, v in arguments.items()}  # fmt: skip


def _hadoop_path(path: str) -> str:
    """A path of Hadoop's default file system as a URI."""
    return str(path) if "://" in str(path) else f"hdfs://{path}"


__all__ = [
    "AsynchronousSparkModel",
    "SparkMLlibModel",
    "SparkModel",
    "load_spark_model",
]
