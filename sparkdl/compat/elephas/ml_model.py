"""ElephasEstimator and ElephasTransformer: Params in snake_case, files in HDF5."""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from pyspark.ml.base import Estimator, Model
from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol, HasOutputCol

from sparkdl import SparkModel
from sparkdl.compat.elephas.adapters import LossModelTypeMapper, ModelType
from sparkdl.errors import ConfigError, ModelError
from sparkdl.files import storage
from sparkdl.learner.archives.archive import making_models
from sparkdl.learner.checks.compiling import compile_model, from_plain_form, model_from_json
from sparkdl.learner.signature import model_signature
from sparkdl.settings.values import FLAG, require_objects, shown, whole
from sparkdl.spark.forms.fields import is_number
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.ml.files import Loaded, SavedStage, StageContent, load_model
from sparkdl.spark.ml.stage import ParamSpec, Stage, has_params, plain, taking, text
from sparkdl.spark.ml.trained import FittedStage, Trained
from sparkdl.spark.ml.training import archive_of
from sparkdl.spark.mllib import check_classes
from sparkdl.spark.session.frames import require_frame

_SETTINGS = "distributed_config"


@dataclass(frozen=True)
class StageFile:
    """The content of such a file."""

    config: dict[str, Any]
    weights: list[Any]
    model_type: str


def write_stage_file(path: str, class_name: str, saved: StageFile) -> None:
    """Writes a stage's file whole or not at all.

    Raises:
        ResourceError: The path cannot be written.
    """
    import h5py

    content = io.BytesIO()
    with h5py.File(content, mode="w") as file:
        file.attrs["model_type"] = saved.model_type
        for number, weight in enumerate(saved.weights):  # JSON would make them too large
            file.create_dataset(f"weights/{number:05d}", data=np.asarray(weight))
        settings = {"class_name": class_name, "config": saved.config}
        file.attrs[_SETTINGS] = json.dumps(settings).encode()
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
            f"{path!r} holds no {class_name}", expected=f"a file that {class_name}.save wrote",
            received=f"{type(error).__name__}: {str(error)[:200]}",
        ) from error  # fmt: skip
    if not isinstance(saved, dict) or saved.get("class_name") != class_name:
        raise ModelError(
            f"{path!r} holds no {class_name}", expected=f"a file that {class_name}.save wrote",
            received=shown(saved.get("class_name") if isinstance(saved, dict) else saved),
        )  # fmt: skip
    return StageFile(dict(saved["config"]), weights, kind)


S = TypeVar("S", bound="_ElephasStage")
E = TypeVar("E", bound="ElephasEstimator")
T = TypeVar("T", bound="ElephasTransformer")


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise TypeError("a share of the rows, 0 <= share < 1")
    return float(value)


def _name_or_number(value: object) -> str | int:
    value = getattr(value, "value", value)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError("'epoch', 'batch', 'auto', or batches between two exchanges")
    return value


def _mode(value: object) -> str:
    return text(getattr(value, "value", value))


_any_plain = partial(plain, (str, dict, list), "a name, or a configuration")
_COLUMNS = (
    ParamSpec("keras_model_config", "the model as JSON: model.to_json()", text, optional=True),
)
_TRAINING = (
    ParamSpec("optimizer_config", "keras.optimizers.serialize(optimizer), or a name", _any_plain,
              optional=True),
    ParamSpec("mode", "asynchronous, hogwild or synchronous", _mode, "asynchronous"),
    ParamSpec("frequency", "'epoch', 'batch', or batches between two exchanges", _name_or_number,
              "auto"),
    ParamSpec("nb_classes", "classes of categorical labels: as many as the last layer has units; "
              "None: not checked", taking(whole(1)), optional=True),
    ParamSpec("categorical", "labels are class numbers, made one-hot where the last layer has "
              "several units; False: numbers, for one unit or a sparse loss", taking(FLAG), True),
    ParamSpec("epochs", "passes over the rows", taking(whole(1)), 10),
    ParamSpec("batch_size", "rows per step and worker", taking(whole(1)), 32),
    ParamSpec("verbose", "0, 1 or 2", taking(whole(0)), 0),
    ParamSpec("validation_split", "share of the rows held out for validation", _share, 0.1),
    ParamSpec("num_workers", "workers; None: as many as there are task slots", taking(whole(1)),
              optional=True),
    ParamSpec("loss", "name of the loss", _any_plain, optional=True),
    ParamSpec("metrics", "names of the metrics", partial(plain, (list,), "a list of names"),
              optional=True),
)  # fmt: skip
_SCORING = (
    ParamSpec("inference_batch_size", "rows per forward pass", taking(whole(1)), optional=True),
)
_SETTERS = {"categorical": "categorical_labels", "verbose": "verbosity"}
"""Params whose setter in Elephas has another name."""


def _with_elephas_setters(cls: Any) -> Any:
    """Adds ``set_<param>`` and ``get_<param>``, as Elephas calls them."""
    own = (spec for spec in cls.SPECS if spec.name.islower())
    for spec in own:
        name = _SETTERS.get(spec.name, spec.name)
        setattr(cls, f"set_{name}", _setter(spec.name))
        setattr(cls, f"get_{name}", _getter(spec.name))
    return cls


def _setter(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, value: self._set(**{name: value})


def _getter(name: str) -> Callable[[Any], Any]:
    return lambda self: self.getOrDefault(name)


def _deprecated_setter(name: str) -> Callable[[Any, str], Any]:
    def set_to(self: Any, value: str) -> Any:
        warnings.warn(
            f"set{name[0].upper()}{name[1:]} is deprecated; pass {name}= to the constructor",
            DeprecationWarning,
            stacklevel=2,
        )
        return self._set(**{name: value})

    set_to.__doc__ = f"Deprecated, as in Elephas: pass ``{name}=`` to the constructor."
    return set_to


class _ElephasStage(Stage):
    """The base of both stages: a model's architecture as JSON, and custom objects."""

    PARTS: tuple[str, ...] = ("custom_objects",)
    _custom_objects: dict[str, Any]

    def _prepare(self) -> None:
        super()._prepare()
        self._custom_objects = {}
        self._setDefault(outputCol="prediction")

    def set_params(self: S, **arguments: object) -> S:
        for name in self.PARTS:
            if name in arguments:
                getattr(self, f"set_{name}")(arguments.pop(name))
        return self._set(**arguments)

    setParams = set_params

    def set_custom_objects(self: S, objects: object) -> S:
        """Sets name -> class or function that the model uses."""
        self._custom_objects = require_objects(objects)
        return self

    def get_custom_objects(self) -> dict[str, Any]:
        """Name -> class or function that the model uses."""
        return dict(self._custom_objects)

    def get_model(self) -> Any:
        """The Keras model without trained weights.

        Raises:
            ConfigError: ``keras_model_config`` is not set.
        """
        config = self.getOrDefault("keras_model_config")
        if config is None:
            raise ConfigError(
                f"{type(self).__name__} has no model",
                expected="keras_model_config=model.to_json()", received="None",
            )  # fmt: skip
        with making_models:
            return model_from_json(config, self._custom_objects)

    setFeaturesCol = _deprecated_setter("featuresCol")
    setLabelCol = _deprecated_setter("labelCol")
    setOutputCol = _deprecated_setter("outputCol")

    def get_config(self) -> dict[str, Any]:
        """The Params that have a value, by name."""
        return {p.name: v for p, v in self.extractParamMap().items() if v is not None}

    def save(self, file_name: str) -> None:
        """Writes the stage to an HDF5 file, whole; ``write().save(path)`` writes as Spark does.

        Args:
            file_name: A path or URI; a file that is there is replaced.

        Raises:
            ResourceError: It cannot be written.
        """
        saved = StageFile(self.get_config(), *self._trained_part())
        write_stage_file(file_name, type(self).__name__, saved)

    def _trained_part(self) -> tuple[list[Any], str]:
        """The weights, and the name of the type of model; none of an estimator."""
        return [], ""


@_with_elephas_setters
@has_params(*_COLUMNS, *_TRAINING)
class ElephasEstimator(
    _ElephasStage, SavedStage, Estimator, HasFeaturesCol, HasLabelCol, HasOutputCol
):
    """Elephas' estimator: trains a model given as JSON; :class:`ElephasTransformer` results.

    Args:
        **Params: In snake_case, with ``featuresCol``, ``labelCol``, ``outputCol``;
            ``custom_objects`` is a dict.
    """

    def setNumWorkers(self: E, value: int | None) -> E:
        return self._set(num_workers=value)

    def _fit(self, df: Any) -> ElephasTransformer:
        require_frame(f"{type(self).__name__}.fit", df)
        model, get = self.get_model(), self.getOrDefault
        loss, optimizer = get("loss"), get("optimizer_config")
        if loss is None:
            raise ConfigError(
                "ElephasEstimator has no loss", expected="loss='categorical_crossentropy', ...",
                received="None",
            )  # fmt: skip
        if isinstance(optimizer, dict):
            optimizer = from_plain_form(optimizer)
        compile_model(model, optimizer, loss, get("metrics"))
        self._check_labels(model, df.schema)
        spark_model = SparkModel(
            model, get("mode"), get("frequency"), num_workers=get("num_workers"),
            custom_objects=self._custom_objects, batch_size=get("batch_size"),
        )  # fmt: skip
        history = spark_model.fit(
            df, epochs=get("epochs"), verbose=get("verbose"), features=get("featuresCol"),
            label=get("labelCol"), validation_split=get("validation_split"),
        )  # fmt: skip
        return ElephasTransformer(
            labelCol=get("labelCol"), outputCol=get("outputCol"), featuresCol=get("featuresCol"),
            keras_model_config=get("keras_model_config"), custom_objects=self._custom_objects,
            weights=spark_model.model.get_weights(), history=[history.history],
            model_type=LossModelTypeMapper().get_model_type(loss),
        )  # fmt: skip

    def _check_labels(self, model: object, schema: Any) -> None:
        """Refuses Params of the labels that the model contradicts, before a job starts."""
        if self.getOrDefault("categorical"):
            if self.getOrDefault("nb_classes") is not None:
                check_classes(model, self.getOrDefault("nb_classes"))
            return
        label = self.getOrDefault("labelCol")
        if not any(f.name == label and is_number(f.dataType) for f in schema.fields):
            return
        signature = model_signature(model)
        for name, spec in signature.outputs.items():
            units = math.prod(size or 1 for size in spec.shape or ())
            if units > 1 and signature.label_kinds.get(name) in ("dense", "binary"):
                raise ConfigError(
                    f"labels that are no classes do not fit output {name!r}",
                    expected="one number per row, or a sparse loss",
                    received=f"categorical=False, an output of shape {spec.shape}",
                    hint="set_categorical_labels(True) makes class numbers one-hot",
                )

    def content(self) -> StageContent:
        objects = self._custom_objects
        return StageContent({}, None, {"customObjects": objects} if objects else {})

    def take(self, loaded: Loaded) -> None:
        """The counterpart of :meth:`content`."""
        self._custom_objects = dict(loaded.code.get("customObjects", {}))


@_with_elephas_setters
@has_params(*_COLUMNS, *_SCORING)
class ElephasTransformer(
    _ElephasStage, FittedStage, Model, HasFeaturesCol, HasLabelCol, HasOutputCol
):
    """Elephas' model: ``transform`` adds ``outputCol``, the outputs of a trained model.

    A number (double) for ``ModelType.REGRESSION``, else an array of doubles per row.

    Args:
        weights: Arrays, in the order of ``model.get_weights()``.
        model_type: A :class:`ModelType`, or None.
        history: Metrics of the training.
        **Params: ``keras_model_config``, ``inference_batch_size``, ``featuresCol``, ``labelCol``,
            ``outputCol``, and ``custom_objects``.
    """

    PARTS = ("custom_objects", "weights", "model_type", "history")

    def _prepare(self) -> None:
        super()._prepare()
        self.weights: list[Any] = []
        self.model_type: ModelType | None = None
        self._history: list[Any] = []

    def set_weights(self: T, weights: Iterable[Any] | None) -> T:
        self.weights, self._trained = list(weights or []), None
        return self

    def set_model_type(self: T, model_type: ModelType | None) -> T:
        self.model_type = model_type
        return self

    def set_history(self: T, history: Iterable[Any] | None) -> T:
        """Sets the metrics of the training."""
        self._history = list(history or [])
        return self

    @property
    def history(self) -> list[Any]:  # type: ignore[override]
        """Metrics of the training: a dict per fit."""
        return self._history

    @property
    def trained(self) -> Trained:
        """The model with the weights; made when it is first asked for."""
        if self._trained is None:
            model = self.get_model()
            if self.weights:
                try:
                    model.set_weights(self.weights)
                except ValueError as error:
                    raise ModelError(
                        "the weights are of another model",
                        expected=f"{len(model.get_weights())} arrays for keras_model_config",
                        received=shown(error),
                    ) from error
            self._trained = Trained.of(model, archive_of(model, self._custom_objects))
        return self._trained

    def _columns(self) -> list[OutputColumn]:
        outputs = self.trained.signature.outputs
        name = str(self.getOrDefault("outputCol"))
        names = {o: name if len(outputs) == 1 else f"{name}_{o}" for o in outputs}
        return [OutputColumn(name, o, "values", "float64") for o, name in names.items()]

    def _transform(self, df: object) -> Any:
        self._setDefault(inferenceBatchSize=self.getOrDefault("inference_batch_size") or 256)
        return super()._transform(df)

    def _trained_part(self) -> tuple[list[Any], str]:
        return self.weights, "" if self.model_type is None else self.model_type.name

    def content(self) -> StageContent:
        kind = None if self.model_type is None else self.model_type.name
        plain_part = {"model_type": kind, "history": self._history}
        return StageContent(plain_part, self.trained.archive)

    def take(self, loaded: Loaded) -> None:
        found = load_model(loaded)
        if found is not None:
            self._with(Trained.of(*found))
            self.weights = found[0].get_weights()
        kind = loaded.plain.get("model_type")
        self.model_type = None if kind is None else ModelType[kind]
        self._history = list(loaded.plain.get("history", ()))
        self._custom_objects = dict(loaded.objects)


def load_ml_estimator(file_name: str) -> ElephasEstimator:
    """Loads an estimator from the HDF5 file that its ``save`` wrote.

    Raises:
        ResourceError: The file cannot be read.
        ModelError: Another stage is in the file, or none.
    """
    return ElephasEstimator(**read_stage_file(file_name, "ElephasEstimator").config)


def load_ml_transformer(file_name: str) -> ElephasTransformer:
    """Loads a transformer from the HDF5 file that its ``save`` wrote, or Elephas' own.

    Raises:
        SparkDLError: As :func:`load_ml_estimator`.
    """
    file = read_stage_file(file_name, "ElephasTransformer")
    config = dict(file.config)
    saved = config.pop("weights", None)  # Elephas' own files have lists here
    kind = file.model_type or str((config.pop("model_type", None) or {}).get("__enum__", ""))
    config.pop("model_type", None)
    return ElephasTransformer(
        **config, weights=[np.array(w) for w in saved] if saved else file.weights,
        model_type=ModelType[kind.rpartition(".")[2]] if kind else None,
    )  # fmt: skip
