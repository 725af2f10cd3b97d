"""``Trial``: what a user's ``build(trial)`` asks, also in Keras Tuner's words; who suggests."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import numpy as np

from sparkdl.errors import ConfigError
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require

if TYPE_CHECKING:
    import keras
    import optuna


Value = bool | int | float | str | None
"""A hyper-parameter's value: plain, so that a study can be written and read again."""
T = TypeVar("T", bound=Value)


@dataclass(frozen=True)
class Space:
    """The values that one hyper-parameter can take.

    Args:
        kind: ``'float'``, ``'int'`` or ``'categorical'``.
        low: The smallest number.
        high: The largest number, included.
        step: Between two values; None for any float.
        log: Drawn evenly over the logarithm.
        choices: Choices of a categorical.
    """

    kind: str
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    choices: tuple[Value, ...] = ()

    def draw(self, rng: np.random.Generator) -> Value:
        """One value."""
        if self.kind == "categorical":
            return self.choices[int(rng.integers(len(self.choices)))]
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        elif self.step is not None:
            steps = math.floor((self.high - self.low) / self.step + 1e-9)
            value = self.low + self.step * int(rng.integers(steps + 1))
        else:
            value = rng.uniform(self.low, self.high)
        return self.nearest(value)

    def nearest(self, value: float) -> Value:
        """The value of this space that is nearest to a number."""
        if self.step is not None and not self.log:
            value = self.low + self.step * round((value - self.low) / self.step)
        value = min(max(value, self.low), self.high)
        return round(value) if self.kind == "int" else float(value)


Draw = Callable[[str, Space], Value]
"""Draws the value of a hyper-parameter, by its name and what it can be."""


class Trial:
    """One set of hyper-parameters; ``build(trial)`` asks it for each by name.

    The same seed, number and name give the same value, in any order and on any machine. A name that
    is asked again gives the same value again.

    Args:
        number: Number of the trial, from 0.
        seed: Seed of the search.
        given: Values that are not drawn (a grid's, or those of a resumed trial).
        draw: Draws the others; None for :meth:`draw`.
    """

    def __init__(
        self,
        number: int,
        seed: int = 0,
        given: Mapping[str, Value] | None = None,
        draw: Draw | None = None,
    ) -> None:
        self.number = number
        self.params: dict[str, Value] = {}
        self.spaces: dict[str, Space] = {}
        self._seed = seed
        self._given = dict(given or {})
        self._draw = draw or self.draw

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A float in ``[low, high]``.

        Args:
            name: Name of the hyper-parameter.
            low: The smallest value.
            high: The largest value.
            step: Only ``low``, ``low + step``, ... are drawn.
            log: Drawn evenly over the logarithm; ``low`` must be above 0.

        Raises:
            ConfigError: The range is empty, or the name was asked with another range.
        """
        _check_range(name, low, high, step, log)
        return cast(float, self._suggest(name, Space("float", low, high, step, log)))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """A whole number in ``[low, high]``; see :meth:`suggest_float`."""
        _check_range(name, low, high, step, log)
        return cast(int, self._suggest(name, Space("int", low, high, step, log)))

    def suggest_categorical(self, name: str, choices: Sequence[T]) -> T:
        """One of ``choices``: strings, numbers, booleans or None.

        Raises:
            ConfigError: There are none, or one is of another kind.
        """
        if not choices or any(c is not None and not isinstance(c, Value) for c in choices):
            raise ConfigError(
                f"{name!r} has no such choices",
                expected="at least one string, number, boolean or None", received=repr(choices),
                hint="choose a name, and make the object from the name in build",
            )  # fmt: skip
        return cast(T, self._suggest(name, Space("categorical", choices=tuple(choices))))

    def draw(self, name: str, space: Space) -> Value:
        """A value by chance, the same for the same seed, number and name."""
        seed = (self._seed, self.number, zlib.crc32(name.encode()))
        return space.draw(np.random.default_rng(seed))

    def _suggest(self, name: str, space: Space) -> Value:
        if self.spaces.setdefault(name, space) != space:
            raise ConfigError(
                f"the hyper-parameter {name!r} was asked twice, with other values to choose from",
                expected=repr(self.spaces[name]), received=repr(space),
                hint="one name for each hyper-parameter",
            )  # fmt: skip
        if name not in self.params:
            given = name in self._given
            self.params[name] = self._given[name] if given else self._draw(name, space)
        return self.params[name]


def _check_range(name: str, low: float, high: float, step: float | None, log: bool) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low <= high) or (log and low <= 0):
        raise ConfigError(
            f"the range of the hyper-parameter {name!r} has no values",
            expected="low <= high" + ", and low > 0 for log=True" * log,
            received=f"low={low!r}, high={high!r}",
        )
    if step is not None and not step > 0:
        raise ConfigError(
            f"the step of the hyper-parameter {name!r} leads nowhere", expected="a number above 0",
            received=f"step={step!r}",
        )  # fmt: skip


Outcome = Literal["running", "paused", "complete", "failed"]


@dataclass(frozen=True)
class Experience:
    """The facts about an earlier trial when a new one begins.

    Args:
        params: Its hyper-parameters.
        spaces: What they were drawn from; the same names.
        scores: Epochs done -> score; larger is better.
        outcome: ``'running'`` before its first score or between two, ``'paused'`` (it may go on),
            ``'complete'`` (trained to the end) or ``'failed'``.
    """

    params: Mapping[str, Value]
    spaces: Mapping[str, Space]
    scores: Mapping[int, float]
    outcome: Outcome


class Sampler(Protocol):
    """Gives the values of new trials.

    It keeps nothing from trial to trial: what it may learn from is handed to it. So the same seed
    and the same experience give the same values, also after the driver was lost.
    """

    def draws(self, number: int, seed: int, experience: Sequence[Experience]) -> Draw:
        """How the hyper-parameters of a new trial are drawn."""


class Drawn:
    """Every value by chance, whatever came before: the default."""

    def draws(self, number: int, seed: int, experience: Sequence[Experience]) -> Draw:
        return Trial(number, seed).draw


class OptunaSampler:
    """Values by a sampler of Optuna, which learns from the trials before (Akiba et al., KDD 2019).

    ::

        study = tune.search(build, df, metric='val_accuracy', sampler=tune.OptunaSampler(),
                            searcher=tune.Asha(max_trials=64, max_epochs=27))

    For each new trial the trials before are told to a new study of Optuna in memory: those trained
    to the end as complete, those that were not as pruned with their scores after each rung, those
    that train right now as running (the tree-structured Parzen estimator takes them as bad, so that
    trials side by side differ). With trials side by side the values depend on which of them ends
    first; with ``max_concurrent=1`` the same seed gives the same trials.

    Needs ``optuna``: ``pip install 'sparkdl-keras[tune]'``.

    Args:
        make: Seed -> a sampler of Optuna that learns from the trials alone (``TPESampler``,
            ``GPSampler``, ``RandomSampler``; not ``CmaEsSampler`` or ``GridSampler``, which keep
            notes of their own); None for ``TPESampler`` (Bergstra et al., NeurIPS 2011).

    Raises:
        ConfigError: Optuna is not installed, or ``make`` is no function.
    """

    @lists_its_arguments
    def __init__(self, make: Callable[[int], optuna.samplers.BaseSampler] | None = None) -> None:
        require(
            make is None or (callable(make) and not isinstance(make, type)),
            "OptunaSampler", "make", "a function: seed -> sampler of Optuna", make,
        )  # fmt: skip
        self._optuna = _require_optuna()
        self._make = make or self._parzen

    def draws(self, number: int, seed: int, experience: Sequence[Experience]) -> Draw:
        optuna = self._optuna
        own = zlib.crc32(f"{seed} {number}".encode())
        with _quiet(optuna):
            study = optuna.create_study(direction="maximize", sampler=self._make(own))
            for known in experience:
                if known.spaces:
                    study.add_trial(self._told(known))
            trial = study.ask()

        def draw(name: str, space: Space) -> Value:
            with _quiet(optuna):
                return _suggested(optuna, trial, name, space)

        return draw

    def _parzen(self, seed: int) -> Any:
        return self._optuna.samplers.TPESampler(seed=seed, constant_liar=True)

    def _told(self, known: Experience) -> Any:
        optuna = self._optuna
        states = optuna.trial.TrialState
        scores = {e: s for e, s in sorted(known.scores.items()) if math.isfinite(s)}
        state = {
            "running": states.RUNNING, "paused": states.PRUNED,
            "complete": states.COMPLETE if scores else states.FAIL, "failed": states.FAIL,
        }[known.outcome]  # fmt: skip
        return optuna.trial.create_trial(
            state=state,
            value=scores[max(scores)] if state == states.COMPLETE else None,
            params=dict(known.params),
            distributions={n: _distribution(optuna, s) for n, s in known.spaces.items()},
            intermediate_values=scores,
        )


def _distribution(optuna: Any, space: Space) -> Any:
    kinds = optuna.distributions
    if space.kind == "categorical":
        return kinds.CategoricalDistribution(space.choices)
    if space.kind == "int":
        whole = 1 if space.log or space.step is None else int(space.step)
        return kinds.IntDistribution(int(space.low), int(space.high), log=space.log, step=whole)
    step = None if space.log else space.step  # Optuna takes no step beside log
    return kinds.FloatDistribution(space.low, space.high, log=space.log, step=step)


def _suggested(optuna: Any, trial: Any, name: str, space: Space) -> Value:
    values = _distribution(optuna, space)
    if space.kind == "categorical":
        return cast(Value, trial.suggest_categorical(name, values.choices))
    limits = {"low": values.low, "high": values.high, "step": values.step, "log": values.log}
    if space.kind == "int":
        return int(trial.suggest_int(name, **limits))
    return float(trial.suggest_float(name, **limits))


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Without Optuna's line for each new study, and its warnings of what is experimental."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def _require_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            "Optuna is not installed", expected="the package optuna on the driver",
            received=str(error), hint="pip install 'sparkdl-keras[tune]'",
        ) from error  # fmt: skip
    return optuna


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

    def build(self, hp: object, /) -> keras.Model:
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
    return lambda trial: make(HyperParameters(trial))


def _is_log(name: str, step: float | None, sampling: str | None) -> bool:
    if sampling not in (None, "linear", "log") or (sampling == "log" and step is not None):
        raise ConfigError(
            f"the hyper-parameter {name!r} cannot be drawn so",
            expected="sampling='linear', or sampling='log' without step",
            received=f"sampling={sampling!r}, step={step!r}",
        )
    return sampling == "log"
