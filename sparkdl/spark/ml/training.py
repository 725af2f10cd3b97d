"""``TrainingStage``: an estimator's Params and parts, their checks; the way to ``SparkModel``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from pyspark.ml.base import _FitMultipleIterator
from pyspark.ml.param import Param

from sparkdl.config import Limits
from sparkdl.errors import ConfigError, DataError, ModelError, NoParamError, ParamTypeError
from sparkdl.launch import interrupts
from sparkdl.learner.archives.archive import ModelArchive, decode_model, encode_model, making_models
from sparkdl.learner.checks.compile_parts import require_loadable
from sparkdl.learner.prediction.class_scores import ClassScores
from sparkdl.learner.signature import Shape, Signature
from sparkdl.process import payload
from sparkdl.settings.call_arguments import require_call
from sparkdl.settings.network import Network
from sparkdl.settings.values import declared, require_instance, require_objects, shown
from sparkdl.spark.fit.arguments import check_callbacks
from sparkdl.spark.forms.fields import require_booleans
from sparkdl.spark.ml.files import Loaded, SavedStage, StageContent, load_source
from sparkdl.spark.ml.stage import (
    BUILD_PARAMS,
    FIT_PARAMS,
    LIMITS_PARAMS,
    MODEL_PARAMS,
    ColumnsStage,
    camel,
    has_params,
    snake,
)
from sparkdl.spark.ml.trained import FittedStage, Trained, TrainingSummary
from sparkdl.spark.session.frames import require_frame
from sparkdl.spark.spark_model import SparkModel

_COMPILED = ("optimizer", "loss", "metrics")


@dataclass(frozen=True)
class Parts:
    """An estimator's parts; every fit makes its own objects of them, so that fits share nothing.

    Args:
        builder: In place of a model: makes one of ``builderArgs``.
        compiled: ``optimizer``, ``loss``, ``metrics`` -> plain form, or pickled.
        network: Where the driver and the workers listen; never saved.
    """

    archive: ModelArchive | None = None
    builder: Callable[..., Any] | None = None
    compiled: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Any, ...] = ()
    decoder: Any = None
    custom_objects: Mapping[str, Any] = field(default_factory=dict)
    network: Network = Network()

    def with_compiled(self, name: str, value: object) -> Parts:
        """With an ``optimizer``, a ``loss`` or ``metrics``."""
        from sparkdl.learner.checks.compiling import plain_form

        compiled = {k: v for k, v in self.compiled.items() if k != name}
        if value is not None:
            form = plain_form(value)
            compiled[name] = payload.dump(value) if form is None else form
        return replace(self, compiled=compiled)

    def apart(self) -> Parts:
        """Parts whose callbacks another fit can use at the same time."""
        from sparkdl.learner.checks.compiling import copy_callbacks

        if not self.callbacks:
            return self
        try:
            return replace(self, callbacks=tuple(copy_callbacks(self.callbacks)))
        except Exception as error:
            raise ConfigError(
                "a callback cannot be copied",
                expected="callbacks of which each fit of several can have its own copy",
                received=f"{type(error).__name__}: {error}",
                hint="open files and connections in on_train_begin, not in the constructor",
            ) from error

    def make_model(self, arguments: Mapping[str, Any] | None, rate: float | None) -> Any:
        """A new compiled Keras model.

        Raises:
            ConfigError: There is no model and no builder, or both; arguments without a builder.
            ModelError: What the builder returned is no built and compiled model.
        """
        from sparkdl.learner.checks.compiling import compile_model, set_learning_rate
        from sparkdl.learner.steps.keras_learner import require_compiled

        self._check(arguments)
        with making_models, interrupts.held():
            if self.archive is not None:
                model = decode_model(self.archive, own_code=True)
            else:
                model = self._build(arguments or {})
            if "loss" in self.compiled:
                compile_model(model, *(self._compiled(name) for name in _COMPILED))
            require_compiled(model)
            if rate is not None:
                set_learning_rate(model, rate)
        return model

    def _check(self, arguments: Mapping[str, Any] | None) -> None:
        if self.archive is None and self.builder is None:
            raise ConfigError(
                "the estimator has no model",
                expected="model=a keras.Model, or modelBuilder=a function that makes one",
                received="neither",
                hint="an estimator that was saved with modelBuilder has it again after "
                "read().trusted().load(path)",
            )
        if self.archive is not None and self.builder is not None:
            raise ConfigError(
                "the estimator has a model and a modelBuilder", expected="one of the two",
                received="both", hint="setModel(None) or setModelBuilder(None)",
            )  # fmt: skip
        if self.builder is None and arguments is not None:
            raise ConfigError(
                "builderArgs has no effect without modelBuilder",
                expected="modelBuilder=a function with these arguments",
                received=f"model=..., builderArgs={shown(arguments)}",
                hint="a grid can vary only what a fit uses",
            )
        if self.compiled and "loss" not in self.compiled:
            raise ConfigError(
                "optimizer and metrics compile a model together with a loss",
                expected="loss=..., beside " + " and ".join(self.compiled), received="no loss",
                hint="a model that is compiled already needs none of the three",
            )  # fmt: skip

    def _compiled(self, name: str) -> Any:
        from sparkdl.learner.checks.compiling import from_plain_form

        form = self.compiled.get(name)
        return payload.load(form) if isinstance(form, bytes) else from_plain_form(form)

    def _build(self, arguments: Mapping[str, Any]) -> Any:
        assert self.builder is not None
        require_call("modelBuilder", self.builder, (), arguments, "builderArgs are its arguments")
        model = self.builder(**arguments)
        if not hasattr(type(model), "train_on_batch"):
            raise ModelError(
                "modelBuilder returned no Keras model", expected="a keras.Model",
                received=shown(model),
            )  # fmt: skip
        return model


def archive_of(model: Any, custom_objects: Mapping[str, Any] | None = None) -> ModelArchive:
    """A Keras model's archive.

    Raises:
        ConfigError: It is no Keras model.
        ModelError: It is not built, or cannot be sent.
    """
    if not hasattr(type(model), "train_on_batch"):
        raise ConfigError(
            "model is the Keras model", expected="a keras.Model", received=shown(model),
            hint="modelBuilder=... takes a function that makes one",
        )  # fmt: skip
    if not model.built:
        raise ModelError(
            f"model {model.name!r} has no weights yet", expected="a model that is built",
            received="one whose input shape is not known", hint="start it with keras.Input(shape)",
        )  # fmt: skip
    if model.compiled:
        require_loadable(model)
    with making_models, interrupts.held():
        return encode_model(model, dict(custom_objects or {}))


def is_validated() -> bool:
    """Whether CrossValidator or TrainValidationSplit has called this thread's function.

    Stages are not told: in a pipeline they see one fit after the other, each on other rows.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "pyspark.ml.tuning":
            return True
        frame = frame.f_back
    return False


def only_output(signature: Signature, stage: str) -> str:
    """The name of a model's only output."""
    if len(signature.outputs) != 1:
        raise ModelError(
            f"{stage} takes a model with one output", expected="one output",
            received=f"{len(signature.outputs)}: {', '.join(signature.outputs)}",
            hint="KerasEstimator takes any inputs and outputs",
        )  # fmt: skip
    return next(iter(signature.outputs))


def scores_of(
    known: ClassScores | None, shape: Shape | None, logits: bool | None, stage: str
) -> tuple[ClassScores, int]:
    """The meaning of the numbers of a classifier's output, and the number of classes.

    Args:
        known: What the loss, or the last activation, says; None where they say nothing.
        logits: Param ``fromLogits``, which has the last word; None: as ``known``.

    Raises:
        ModelError: The output says nothing about one class per row.
    """
    units = None if shape is None else (shape[-1] if shape else 1)
    if known is None and logits is not None:
        known = ClassScores(units != 1, logits, units)
    classes = None if known is None else known.num_classes
    if known is None or classes is None or len(shape or ()) > 1:
        raise ModelError(
            f"{stage} takes a model whose output is one class per row",
            expected="a last layer with a unit per class and a categorical cross-entropy (or "
            "softmax), or one unit and a binary cross-entropy (or sigmoid)",
            received=f"an output of shape {shape}, with another loss and activation",
            hint="fromLogits=True or False says what the output of a loss of your own is; "
            "KerasRegressor predicts numbers; KerasEstimator takes any inputs and outputs",
        )
    return (known if logits is None else replace(known, logits=logits)), classes


def check_number(shape: Shape | None, stage: str) -> None:
    """Refuses an output that is not one number per row."""
    if shape is not None and tuple(shape) not in ((), (1,)):
        raise ModelError(
            f"{stage} takes a model whose output is one number per row",
            expected="a last layer with one unit", received=f"an output of shape {shape}",
            hint="KerasClassifier predicts classes; KerasEstimator takes any inputs and outputs",
        )  # fmt: skip


def check_labels(schema: Any, label: Any, num_classes: int) -> None:
    """Refuses a label column whose metadata name more classes than the model has."""
    field = next((f for f in schema.fields if f.name == label), None)
    values = ((field.metadata or {}) if field else {}).get("ml_attr", {}).get("vals")
    if values is not None and len(values) > num_classes:
        raise DataError(
            f"label {label!r} has more classes than the model",
            expected=f"at most {num_classes} classes, as many as the model has units",
            received=f"{len(values)}: {', '.join(map(str, values[:8]))}",
            hint="a last layer with as many units as classes",
        )


E = TypeVar("E", bound="TrainingStage")


@dataclass(frozen=True)
class StageFit:
    """The plan of an estimator's fit: a model, the settings of its ``SparkModel``, and the
    arguments of that one's ``fit``."""

    model: Any
    settings: dict[str, Any]
    arguments: dict[str, Any]


@has_params(*MODEL_PARAMS, *LIMITS_PARAMS, *FIT_PARAMS, *BUILD_PARAMS)
class TrainingStage(ColumnsStage, SavedStage):
    """The base of the estimators. Training goes through :class:`sparkdl.SparkModel`."""

    PARTS = (
        "customObjects", "model", "modelBuilder", "optimizer", "loss", "metrics", "callbacks",
        "decoder", "network",
    )  # fmt: skip
    REFUSED: ClassVar[Mapping[str, str]] = {
        "sinks": "callbacks=[...] hear of each epoch; sparkdl.SparkModel(...).fit has sinks",
        "timeline": "sparkdl.SparkModel(...).fit(timeline=...) draws a fit of the same model",
        "profile": "sparkdl.SparkModel(...).fit(profile=True) prints where the time went",
        "initialEpoch": "resume=True with checkpointDir goes on in the epoch where it ended",
        **{camel(name): f"network=Network({name}=...)" for name in declared(Network)},
    }
    MODEL: ClassVar[type[FittedStage]]
    """The class of the fitted stages."""
    _parts: Parts

    def _prepare(self) -> None:
        super()._prepare()
        self._parts = Parts()
        self._setDefault(seed=0)

    def setModel(self: E, model: object) -> E:
        """Sets the Keras model to begin with, as it is now; it is never changed itself."""
        archive = None if model is None else archive_of(model, self._parts.custom_objects)
        return self._with(replace(self._parts, archive=archive))

    def setModelBuilder(self: E, builder: Callable[..., Any] | None) -> E:
        """Sets a function that makes the model of each fit from ``builderArgs``."""
        if builder is not None and not callable(builder):
            raise ConfigError(
                "modelBuilder makes the Keras model",
                expected="a function that returns a keras.Model", received=shown(builder),
                hint="model=... takes a finished model",
            )  # fmt: skip
        return self._with(replace(self._parts, builder=builder))

    def setOptimizer(self: E, optimizer: object) -> E:
        """Sets the optimizer that the model is compiled with; needs a loss."""
        return self._with(self._parts.with_compiled("optimizer", optimizer))

    def setLoss(self: E, loss: object) -> E:
        """Sets the loss that the model is compiled with; None leaves it as it was compiled."""
        return self._with(self._parts.with_compiled("loss", loss))

    def setMetrics(self: E, metrics: object) -> E:
        """Sets the metrics that the model is compiled with; needs a loss."""
        return self._with(self._parts.with_compiled("metrics", metrics))

    def setCallbacks(self: E, callbacks: object) -> E:
        """Sets Keras callbacks. ``fit(df)`` calls these; copies of the estimator have their own."""
        return self._with(replace(self._parts, callbacks=tuple(check_callbacks(callbacks))))

    def setDecoder(self: E, decoder: object) -> E:
        """Sets what makes the model's input from a binary or image value."""
        return self._with(replace(self._parts, decoder=decoder))

    def setCustomObjects(self: E, objects: object) -> E:
        """Sets name -> class or function, beside those found in the model itself."""
        return self._with(replace(self._parts, custom_objects=require_objects(objects)))

    def setNetwork(self: E, network: Network | None) -> E:
        """Sets where driver and workers listen, and whether they encrypt; no file holds it."""
        network = Network() if network is None else require_instance("network", network, Network)
        return self._with(replace(self._parts, network=network))

    def _with(self: E, parts: Parts) -> E:
        self._parts = parts
        return self

    def __getattr__(self, name: str) -> Any:
        """Says why a grid cannot vary what is no Param; asked for nothing else that is there.

        Raises:
            NoParamError: The name is one of :attr:`PARTS`.
        """
        if name in type(self).PARTS:
            raise NoParamError(
                f"{name!r} of {type(self).__name__} is no Param, so that no grid can vary it",
                expected="one of the Params: " + ", ".join(p.name for p in self.params),
                received=name,
                hint="a grid over builderArgs, the arguments of modelBuilder, varies the model "
                "and how it is compiled; learningRate is a Param; "
                f"set{name[0].upper()}{name[1:]} sets {name}",
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def copy(self: E, extra: Any = None) -> E:
        """A copy with callbacks of its own, which a fit in another thread can use.

        Raises:
            ParamTypeError: A key of ``extra`` is no Param.
        """
        strange = [key for key in extra or {} if not isinstance(key, Param)]
        if strange:
            raise ParamTypeError(
                f"a map of Params for {type(self).__name__} has a key that is no Param",
                expected=f"Params, such as {type(self).__name__}().epochs",
                received=f"{type(strange[0]).__name__} {strange[0]!r}",
            )
        copied: E = super().copy(extra)
        copied._parts = self._parts.apart()
        return copied

    def fitMultiple(self, dataset: object, paramMaps: Sequence[Any]) -> Iterator[Any]:
        """A model for each map of Params; fits in several threads share nothing.

        Raises:
            ConfigError: They would all write their checkpoints into one folder, or go on from the
                checkpoints of one.
        """
        maps = list(paramMaps)
        fits = [self.copy(extra) for extra in maps]
        for fit in fits:
            fit._refuse_resume()
        folders = [fit.getOrDefault("checkpointDir") for fit in fits]
        shared = [folder for folder in folders if folder is not None and folders.count(folder) > 1]
        if shared:
            raise ConfigError(
                "several fits would write their checkpoints into one folder",
                expected="a checkpointDir for each, or none",
                received=f"{len(shared)} fits with {shared[0]!r}",
                hint="checkpointDir=None while Params are being compared",
            )
        return _FitMultipleIterator(  # type: ignore[no-any-return]
            lambda index: fits[index]._fit(dataset), len(maps)
        )

    def plan_fit(self, schema: object) -> StageFit:
        """The plan of ``fit`` for rows of a schema; its model is a new one.

        Raises:
            ConfigError: There is no model, or what the Params say cannot go together.
            DataError: The schema has no such columns.
        """
        parts = self._parts
        model = parts.make_model(
            self.getOrDefault("builderArgs"), self.getOrDefault("learningRate")
        )
        self._check_model(model, schema)
        settings = {
            "custom_objects": dict(parts.custom_objects), "decoder": parts.decoder,
            "seed": self.getOrDefault("seed"), "use_gpu": self.getOrDefault("useGpu"),
            "pad": self.getOrDefault("pad"),
            **{snake(spec.name): self.getOrDefault(spec.name) for spec in MODEL_PARAMS},
            "limits": Limits(
                **{snake(spec.name): self.getOrDefault(spec.name) for spec in LIMITS_PARAMS}
            ),
            "network": parts.network,
        }  # fmt: skip
        arguments = {
            "validation_data": self._validation(schema), "callbacks": list(parts.callbacks) or None,
            "features": self.features, "label": self.labels, "sample_weight": self.weights,
            **{snake(spec.name): self.getOrDefault(spec.name) for spec in FIT_PARAMS},
        }  # fmt: skip
        return StageFit(model, settings, arguments)

    def _refuse_resume(self) -> None:
        """Refuses to go on from checkpoints where Params are compared on several sets of rows."""
        if self.getOrDefault("resume") and self.getOrDefault("checkpointDir") is not None:
            raise ConfigError(
                "a fit of several would go on from the model of another",
                expected="resume=False in a validator and in fitMultiple: each fold, and the fit "
                "on all rows, begins anew",
                received=f"resume=True, checkpointDir={self.getOrDefault('checkpointDir')!r}",
                hint="validate without resume, and fit the best Params with it on all rows",
            )

    @interrupts.heard()
    def _fit(self, dataset: Any) -> Any:
        if is_validated():  # also as a stage of a pipeline, whose fits know nothing of each other
            self._refuse_resume()
        require_frame(f"{type(self).__name__}.fit", dataset)
        parts, plan = self._parts, self.plan_fit(dataset.schema)
        spark_model = SparkModel(plan.model, **plan.settings)
        history = spark_model.fit(dataset, **plan.arguments)
        trained = Trained.of(
            spark_model.model, archive_of(spark_model.model, parts.custom_objects),
            decoder=parts.decoder, summary=_summary(history, spark_model),
        )  # fmt: skip
        return self.make_stage(trained)

    def make_stage(self, trained: Trained) -> Any:
        """The fitted stage of a trained model, with this estimator's Params."""
        fitted = self.MODEL()._with(trained)
        fitted._resetUid(self.uid)
        return self._copyValues(fitted)

    def _validation(self, schema: Any) -> str | None:
        """The indicator column, true in the rows to validate on; None for none."""
        name = ""
        if self.isDefined("validationIndicatorCol"):
            name = self.getOrDefault("validationIndicatorCol")
        if not name:
            return None
        require_booleans(schema, name, "validationIndicatorCol", "a boolean column")
        if self.getOrDefault("validationSplit"):
            raise ConfigError(
                "validationIndicatorCol and validationSplit both choose the rows to validate on",
                expected="one of them",
                received=f"{name!r} and {self.getOrDefault('validationSplit')}",
            )
        return str(name)

    @property
    def labels(self) -> Any:
        """The column of labels, or output name -> column."""
        return self.getOrDefault("labelCol")

    @property
    def weights(self) -> Any:
        """The column of sample weights, or output name -> column; None for none."""
        return (self.getOrDefault("weightCol") if self.isDefined("weightCol") else None) or None

    def _check_model(self, model: object, schema: object) -> None:
        """Refuses a model, or a schema, that this estimator cannot use, before a job starts."""
        raise NotImplementedError

    def content(self) -> StageContent:
        parts = self._parts
        compiled = sorted(parts.compiled.items())
        plain = {name: form for name, form in compiled if not isinstance(form, bytes)}
        code = {
            **{name: form for name, form in compiled if isinstance(form, bytes)},
            "modelBuilder": parts.builder,
            "callbacks": list(parts.apart().callbacks),
            "decoder": parts.decoder,
            "customObjects": dict(parts.custom_objects),
        }
        given = {name: thing for name, thing in code.items() if thing}
        return StageContent({"compiled": plain}, parts.archive, given)

    def take(self, loaded: Loaded) -> None:
        code = dict(loaded.code)
        compiled = {**loaded.plain["compiled"]}
        compiled |= {n: code[n] for n in _COMPILED if n in code}
        found = load_source(loaded)
        archive: ModelArchive | None = None if found is None else found[1]
        self._parts = Parts(
            archive, code.get("modelBuilder"), compiled, tuple(code.get("callbacks", ())),
            code.get("decoder"), code.get("customObjects", {}),
        )  # fmt: skip


def _summary(history: Any, spark_model: SparkModel) -> TrainingSummary:
    stage = spark_model.summary
    plain = {
        name: [_plain_number(value) for value in values] for name, values in history.history.items()
    }
    if stage is None:  # nothing was left to train
        return TrainingSummary(plain, 0, 0.0, 0, ())
    transports = tuple(sorted(stage.transports))
    return TrainingSummary(plain, stage.rows, stage.seconds, len(stage.pids), transports)


def _plain_number(value: Any) -> Any:
    return [float(v) for v in value] if hasattr(value, "__len__") else float(value)
