"""The parts of an estimator beside its Params: a model, or how to make one; callbacks; a
decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.errors import ConfigError, ModelError
from sparkdl.launch import interrupts
from sparkdl.learner.archives.archive import ModelArchive, decode_model, encode_model, making_models
from sparkdl.learner.checks.compile_parts import require_loadable
from sparkdl.process import payload
from sparkdl.settings.call_arguments import require_call
from sparkdl.settings.network import Network
from sparkdl.settings.values import shown

_COMPILED = ("optimizer", "loss", "metrics")


@dataclass(frozen=True)
class Parts:
    """An estimator's parts; every fit makes its own objects of them, so that fits share nothing.

    Args:
        builder: In place of a model: makes one of ``builderArgs``.
        compiled: ``optimizer``, ``loss``, ``metrics`` -> plain form, or pickled.
        decoder: See :class:`sparkdl.SparkModel`.
        custom_objects: Name -> class or function.
        network: Where the driver and the workers listen; never saved.
    """

    archive: ModelArchive | None = None
    builder: Callable[..., Any] | None = None
    compiled: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Any, ...] = ()
    decoder: Any = None
    custom_objects: Mapping[str, Any] = field(default_factory=dict)
    network: Network = Network()

    def with_model(self, model: object) -> Parts:
        """With a Keras model as it is now: what is done to it later changes nothing here.

        Raises:
            ConfigError: It is no Keras model.
            ModelError: It is not built, or cannot be sent.
        """
        archive = None if model is None else archive_of(model, self.custom_objects)
        return replace(self, archive=archive)

    def with_builder(self, builder: object) -> Parts:
        """With a function that makes the model."""
        if builder is not None and not callable(builder):
            raise ConfigError(
                "modelBuilder makes the Keras model",
                expected="a function that returns a keras.Model", received=shown(builder),
                hint="model=... takes a finished model",
            )  # fmt: skip
        return replace(self, builder=builder)

    def with_compiled(self, name: str, value: object) -> Parts:
        """With an ``optimizer``, a ``loss`` or ``metrics``."""
        from sparkdl.learner.checks.compiling import plain_form

        compiled = {k: v for k, v in self.compiled.items() if k != name}
        if value is not None:
            form = plain_form(value)
            compiled[name] = payload.dump(value) if form is None else form
        return replace(self, compiled=compiled)

    def with_callbacks(self, callbacks: object) -> Parts:
        """With these callbacks: one, several, or None."""
        from sparkdl.spark.fit.arguments import check_callbacks

        return replace(self, callbacks=tuple(check_callbacks(callbacks)))

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
        hint = "builderArgs are its arguments"
        require_call("modelBuilder", self.builder, (), arguments, hint)
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
