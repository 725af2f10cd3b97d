"""``SearchRuns``: a search as a run of MLflow, its trials as runs inside of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sparkdl.progress.events import (
    Event,
    Metrics,
    SearchBegan,
    SearchEnded,
    TrialBegan,
    TrialEnded,
    TrialEpochEnded,
)
from sparkdl.tracking.tensorboard import numbers_of

_MOST_CHARS = 6000
_STATUS = {"waiting": "FINISHED", "complete": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


@dataclass
class _TrialRun:
    """A trial's run: its id, and how many epochs have been logged."""

    run_id: str
    epochs: int = 0


class SearchRuns:
    """The runs of a search: the search's own has the best metric and the best hyper-parameters
    (``best_...``); each trial has one inside of it, with its hyper-parameters and its metrics once
    per epoch. A trial that was paused and goes on stays one run.

    Args:
        mlflow: The module.
        client: Its client.
        experiment: Id of the experiment.
        run_id: Of the search's run.
        began: What the search was asked to do.
    """

    def __init__(
        self, mlflow: Any, client: Any, experiment: str, run_id: str, began: SearchBegan
    ) -> None:
        self._mlflow, self._client = mlflow, client
        self._experiment, self._run_id, self._metric = experiment, run_id, began.metric
        self._trials: dict[int, _TrialRun] = {}
        self._params: dict[int, dict[str, Any]] = {}
        asked = {"metric": began.metric, "maximize": began.maximize, **began.parameters}
        self._log_params(run_id, asked)
        client.set_tag(run_id, "sparkdl.run_id", began.search_id)

    def handle(self, event: Event) -> None:
        """Logs an event of a trial, or the end of the search."""
        match event:
            case TrialBegan():
                self._begin(event)
            case TrialEpochEnded():
                trial = self._trials[event.trial]
                self._log_metrics(trial.run_id, event.metrics, event.epoch)
                trial.epochs = max(trial.epochs, event.epoch + 1)
            case TrialEnded():
                self._end(event)
            case SearchEnded() if event.best is not None and event.value is not None:
                self._log_metrics(self._run_id, {f"best_{self._metric}": event.value}, 0)
                best = {f"best_{n}": v for n, v in self._params[event.best].items()}
                self._log_params(self._run_id, {"best_trial": event.best, **best})
            case _:
                pass

    def _begin(self, event: TrialBegan) -> None:
        known = self._trials.get(event.trial)
        if known is not None:
            self._client.update_run(known.run_id, status="RUNNING")
            return
        tags = {"mlflow.parentRunId": self._run_id, "sparkdl.trial": str(event.trial)}
        name = f"trial {event.trial}"
        run = self._client.create_run(self._experiment, run_name=name, tags=tags)
        self._trials[event.trial] = _TrialRun(run.info.run_id)
        self._params[event.trial] = dict(event.params)
        self._log_params(run.info.run_id, self._params[event.trial])

    def _end(self, event: TrialEnded) -> None:
        trial = self._trials[event.trial]
        if event.metrics and event.epochs > trial.epochs:  # of a search that goes on
            self._log_metrics(trial.run_id, event.metrics, event.epochs - 1)
            trial.epochs = event.epochs
        if event.error:
            self._client.set_tag(trial.run_id, "sparkdl.error", event.error[:_MOST_CHARS])
        self._client.set_terminated(trial.run_id, _STATUS[event.state])

    def _log_params(self, run_id: str, params: dict[str, Any]) -> None:
        param = self._mlflow.entities.Param
        found = [param(name, str(value)[:_MOST_CHARS]) for name, value in params.items()]
        self._client.log_batch(run_id, params=found)

    def _log_metrics(self, run_id: str, metrics: Metrics, step: int) -> None:
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        numbers = dict(numbers_of("", metrics))
        found = [metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(run_id, metrics=found)
