"""Keras Tuner's names for hyper-parameters: ``build(hp)`` with ``hp.Int``, ``hp.Float``, ..."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sparkdl.errors import ConfigError
from sparkdl.tune.suggestions import T, Trial, Value

if TYPE_CHECKING:
    import keras


class HyperParameters:
    """A trial that is asked in Keras Tuner's words; no more than names, values are the trial's.

    What has no counterpart is refused: ``sampling='reverse_log'``, a ``step`` beside
    ``sampling='log'``, and conditional scopes (a plain ``if`` does).
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def Int(
        self, name: str, min_value: int, max_value: int, step: int | None = None,
        sampling: str | None = None, default: int | None = None,
    ) -> int:  # fmt: skip
        """A whole number; ``default`` has no effect: a search draws from its first trial on."""
        log = _is_log(name, step, sampling)
        return self._trial.suggest_int(name, min_value, max_value, step=step or 1, log=log)

    def Float(
        self, name: str, min_value: float, max_value: float, step: float | None = None,
        sampling: str | None = None, default: float | None = None,
    ) -> float:  # fmt: skip
        """A number; see :meth:`Int`."""
        log = _is_log(name, step, sampling)
        return self._trial.suggest_float(name, min_value, max_value, step=step, log=log)

    def Choice(
        self, name: str, values: Sequence[T], ordered: bool | None = None, default: T | None = None
    ) -> T:
        """One of several values; see :meth:`Int`. ``ordered`` has no effect."""
        return self._trial.suggest_categorical(name, values)

    def Boolean(self, name: str, default: bool = False) -> bool:
        """True or False; see :meth:`Int`."""
        return self._trial.suggest_categorical(name, [False, True])

    def Fixed(self, name: str, value: T) -> T:
        return self._trial.suggest_categorical(name, [value])

    def get(self, name: str) -> Value:
        """The value of a hyper-parameter that was asked before.

        Raises:
            ConfigError: It was not.
        """
        if name not in self._trial.params:
            raise ConfigError(
                f"the hyper-parameter {name!r} has no value yet",
                expected="hp.Int, hp.Float, hp.Choice or hp.Boolean with that name before",
                received=f"asked were {', '.join(self._trial.params) or 'none'}",
            )
        return self._trial.params[name]


class HyperModel(Protocol):
    """An object that builds a model, as ``keras_tuner.HyperModel`` does."""

    def build(self, hp: Any, /) -> keras.Model:
        """A compiled model for the values of a trial."""


def from_keras_tuner(
    build: Callable[[HyperParameters], keras.Model] | HyperModel,
) -> Callable[[Trial], keras.Model]:
    """``build(trial)`` for :func:`sparkdl.tune.search` from Keras Tuner's ``build(hp)``.

    ::

        def build(hp):
            model = keras.Sequential([keras.layers.Dense(hp.Int('units', 16, 256, step=16)), ...])
            model.compile(keras.optimizers.Adam(hp.Float('rate', 1e-4, 1e-1, sampling='log')), ...)
            return model

        tune.search(tune.from_keras_tuner(build), df, metric='val_accuracy')

    Args:
        build: As for ``keras_tuner.RandomSearch``: a function, or a ``HyperModel``.

    Raises:
        ConfigError: Neither, or a ``HyperModel`` with a ``fit`` of its own: the search fits.
    """
    make = build if callable(build) else getattr(build, "build", None)
    fit = getattr(type(build), "fit", None)
    own_fit = fit is not None and not str(fit.__module__).startswith(("keras_tuner", "kerastuner"))
    if make is None or own_fit:
        raise ConfigError(
            "from_keras_tuner takes what builds a model",
            expected="a function build(hp), or a HyperModel with the method build(hp)",
            received=f"{type(build).__name__} with a method fit" if own_fit else repr(build)[:200],
            hint="arguments of fit are given to tune.search",
        )

    def build_of(trial: Trial) -> keras.Model:
        return make(HyperParameters(trial))

    return build_of


def _is_log(name: str, step: float | None, sampling: str | None) -> bool:
    if sampling not in (None, "linear", "log") or (sampling == "log" and step is not None):
        raise ConfigError(
            f"the hyper-parameter {name!r} cannot be drawn so",
            expected="sampling='linear', or sampling='log' without step",
            received=f"sampling={sampling!r}, step={step!r}",
        )
    return sampling == "log"
