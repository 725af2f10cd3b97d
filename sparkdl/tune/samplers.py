"""Samplers: which values a new trial gets; ``Drawn`` by chance, ``OptunaSampler`` from experience.

A searcher decides how long trials train, a sampler what they train with. Both run on the driver.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sparkdl.errors import ConfigError
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require
from sparkdl.tune.suggestions import Draw, Space, Trial, Value

if TYPE_CHECKING:
    import optuna

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
                return _suggested(trial, name, space)

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
        low, high = int(space.low), int(space.high)
        return kinds.IntDistribution(low, high, log=space.log, step=_whole_step(space))
    step = None if space.log else space.step  # Optuna takes no step beside log
    return kinds.FloatDistribution(space.low, space.high, log=space.log, step=step)


def _whole_step(space: Space) -> int:
    return 1 if space.log or space.step is None else int(space.step)


def _suggested(trial: Any, name: str, space: Space) -> Value:
    value: Value
    if space.kind == "categorical":
        value = trial.suggest_categorical(name, space.choices)
    elif space.kind == "int":
        low, high = int(space.low), int(space.high)
        step = _whole_step(space)
        value = int(trial.suggest_int(name, low, high, step=step, log=space.log))
    else:
        between = None if space.log else space.step
        value = float(trial.suggest_float(name, space.low, space.high, step=between, log=space.log))
    return value


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
            "Optuna is not installed",
            expected="the package optuna on the driver",
            received=str(error),
            hint="pip install 'sparkdl-keras[tune]'",
        ) from error
    return optuna
