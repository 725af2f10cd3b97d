"""``MLflow``: a fit as a run of MLflow, written by the driver alone.

MLflow's own automatic logging patches ``keras.Model.fit``, which no driver calls here; executors
open no runs. Needs ``mlflow`` or ``mlflow-skinny``: ``pip install 'sparkdl-keras[mlflow]'``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import numpy as np

from sparkdl.errors import ConfigError, TransportError
from sparkdl.process.user_warnings import warn_user
from sparkdl.progress import events
from sparkdl.tracking import sinks
from sparkdl.tracking.event_files import numbers_of
from sparkdl.tracking.sinks import Thinning

_STATUS = {"waiting": "FINISHED", "complete": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


@dataclass
class _Run:
    """A run of MLflow: the search's or a fit's, or a trial's with what has been logged of it."""

    mlflow: Any
    client: Any
    run_id: str
    params: dict[str, Any] = field(default_factory=dict)
    epochs: int = 0

    def log_params(self, params: Iterable[tuple[str, object]]) -> None:
        make = self.mlflow.entities.Param
        found = [make(name, str(value)[:_MOST_CHARS]) for name, value in params]
        for first in range(0, len(found), _PARAMS_AT_ONCE):
            self.client.log_batch(self.run_id, params=found[first : first + _PARAMS_AT_ONCE])

    def log_metrics(self, numbers: Iterable[tuple[str, float]], step: int) -> None:
        make, now = self.mlflow.entities.Metric, int(time.time() * 1000)
        metrics = [make(name, value, now, step) for name, value in numbers]
        self.client.log_batch(self.run_id, metrics=metrics)

    def tag(self, name: str, text: str) -> None:
        if text:
            self.client.set_tag(self.run_id, f"sparkdl.{name}", text[:_MOST_CHARS])


class SearchRuns:
    """The runs of a search: the search's own has the best metric and the best hyper-parameters
    (``best_...``); each trial has one inside of it, with its hyper-parameters and its metrics once
    per epoch. A trial that was paused and goes on stays one run.
    """

    def __init__(self, run: _Run, experiment: str, began: events.SearchBegan) -> None:
        self._run, self._experiment, self._metric = run, experiment, began.metric
        self._trials: dict[int, _Run] = {}
        asked = {"metric": began.metric, "maximize": began.maximize, **began.parameters}
        run.log_params(asked.items())
        run.tag("run_id", began.search_id)

    def handle(self, event: events.Event) -> None:
        """Logs an event of a trial, or the end of the search."""
        match event:
            case events.TrialBegan():
                self._begin(event)
            case events.TrialEpochEnded():
                trial = self._trials[event.trial]
                trial.log_metrics(numbers_of("", event.metrics), event.epoch)
                trial.epochs = max(trial.epochs, event.epoch + 1)
            case events.TrialEnded():
                self._end(event)
            case events.SearchEnded() if event.best is not None and event.value is not None:
                best = {f"best_{n}": v for n, v in self._trials[event.best].params.items()}
                self._run.log_metrics(numbers_of("best_", {self._metric: event.value}), 0)
                self._run.log_params({"best_trial": event.best, **best}.items())

    def _begin(self, event: events.TrialBegan) -> None:
        known = self._trials.get(event.trial)
        if known is not None:
            known.client.update_run(known.run_id, status="RUNNING")
            return
        tags = {"mlflow.parentRunId": self._run.run_id, "sparkdl.trial": str(event.trial)}
        name = f"trial {event.trial}"
        made = self._run.client.create_run(self._experiment, run_name=name, tags=tags)
        trial = replace(self._run, run_id=made.info.run_id, params=dict(event.params))
        self._trials[event.trial] = trial
        trial.log_params(trial.params.items())

    def _end(self, event: events.TrialEnded) -> None:
        trial = self._trials[event.trial]
        if event.metrics and event.epochs > trial.epochs:  # of a search that goes on
            trial.log_metrics(numbers_of("", event.metrics), event.epochs - 1)
            trial.epochs = event.epochs
        trial.tag("error", event.error)
        trial.client.set_terminated(trial.run_id, _STATUS[event.state])


_PORTS = {"http": 80, "https": 443}
_CONNECT_S = 3.0


def require_server(uri: str, patience_s: float) -> None:
    """Returns if something listens where the server should be, or the URI is of another kind.

    Raises:
        TransportError: Nothing does.
    """
    parts = urlsplit(uri)
    port = _PORTS.get(parts.scheme)
    if port is None or not parts.hostname:
        return
    if parts.scheme in getproxies() and not proxy_bypass(parts.hostname):
        return  # the proxy reaches it, and perhaps this process does not
    address = parts.hostname, parts.port or port
    until = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection(address, _CONNECT_S).close()
            return
        except OSError as error:
            if time.monotonic() < until:
                time.sleep(0.5)
                continue
            raise TransportError(
                "MLflow's tracking server does not answer",
                expected=f"a server at {parts.hostname}:{address[1]}", received=str(error),
                hint="mlflow.set_tracking_uri, MLFLOW_TRACKING_URI; mlflow server starts one",
            ) from error  # fmt: skip


_PARAMS_AT_ONCE = 100
_MOST_CHARS = 6000
"""Bounds of MLflow's stores: parameters in one request, characters in one value."""
_SYSTEM_INTERVAL_S = 10.0


class MLflow:
    """A sink that logs a fit as a run of MLflow: into the run that is active in the thread that
    calls ``fit``, else into a new one.

    Parameters are the settings of ``SparkModel`` and ``fit``, the model's size and the optimizer's
    settings (``optimizer_learning_rate``, ...); metrics come once per epoch; ``model_summary.txt``
    has the layers. A search (``tune.search``) is a run with a run inside of it for each trial
    (:class:`sparkdl.tracking.mlflow_sink.SearchRuns`), and the best model.

    Args:
        log_models: Log the trained model as ``model``, with the signature that
            ``mlflow.pyfunc.spark_udf`` needs.
        log_system_metrics: Log each worker's processor use and memory, and the memory and GPUs of
            its host under MLflow's names, every 10 s.
        registered_model_name: Register the model under this name.
        run_name: Run name of a new run; None for the model's name.

    Raises:
        ConfigError: MLflow is not installed.
    """

    def __init__(
        self,
        *,
        log_models: bool = True,
        log_system_metrics: bool = False,
        registered_model_name: str | None = None,
        run_name: str | None = None,
    ) -> None:
        self.wants_progress = log_system_metrics
        self._log_models, self._registered_name = log_models, registered_model_name
        self._run_name = run_name
        self._mlflow = _require_mlflow()
        self._run = _Run(self._mlflow, None, "")
        self._own = self._off = False
        self._last_epoch = 0
        self._model: Callable[[], Any] = lambda: None
        self._search: SearchRuns | None = None
        self._thinning = Thinning(_SYSTEM_INTERVAL_S)
        self._looks = 0
        self._before: dict[int, tuple[float, float]] = {}

    def take_model(self, model: Callable[[], object]) -> None:
        """Keeps the function that gives the model."""
        self._model = model

    def handle(self, event: events.Event) -> None:
        """Logs the event. Where the run cannot be opened it warns, and logs nothing of this fit."""
        if self._off:
            return
        begins = isinstance(event, (events.TrainingBegan, events.SearchBegan))
        try:
            require_server(self._mlflow.get_tracking_uri(), 0.0 if begins else 10.0)
            self._log(event)
        except Exception as error:
            if not begins:
                raise
            self._off, self.wants_progress = True, False
            warn_user(f"MLflow logs nothing of this fit, which goes on: {error}", RuntimeWarning)

    def _log(self, event: events.Event) -> None:
        match event:
            case events.TrainingBegan():
                self._begin(event)
            case events.WorkersProgressed():
                self._log_system(event)
            case events.EpochEnded():
                numbers = dict(numbers_of("", event.metrics))
                if event.rows_per_s is not None:
                    numbers["rows_per_s"] = event.rows_per_s
                self._run.log_metrics(numbers.items(), event.epoch)
                self._last_epoch = event.epoch
            case events.TrainingEnded():
                try:
                    if self._log_models:
                        self._log_model()
                finally:
                    self._end("FINISHED")
            case events.SearchBegan():
                experiment = self._open("search")
                self._search = SearchRuns(self._run, experiment, event)
            case events.TrialBegan() | events.TrialEpochEnded() | events.TrialEnded():
                if self._search is not None:
                    self._search.handle(event)
            case events.SearchEnded():
                self._end_search(event)
            case events.TrainingFailed():
                self._run.tag("error", event.error)
                self._end("FAILED")

    def _open(self, name: str) -> str:
        """Takes the active run, or makes one; returns the id of its experiment."""
        mlflow = self._mlflow
        client = mlflow.MlflowClient()
        active = mlflow.active_run()
        self._own = active is None
        if active is None:
            experiment = mlflow.tracking.fluent._get_experiment_id()
            active = client.create_run(experiment, run_name=self._run_name or name or None)
        self._run = _Run(mlflow, client, active.info.run_id)
        return str(active.info.experiment_id)

    def _end_search(self, event: events.SearchEnded) -> None:
        if self._search is None:
            return
        try:
            self._search.handle(event)
            self._run.tag("error", event.error)
            if not event.error and self._log_models and event.best is not None:
                self._log_model()
        finally:
            self._end("FAILED" if event.error else "FINISHED")

    def _begin(self, event: events.TrainingBegan) -> None:
        self._open(event.run.model)
        self._run.tag("run_id", event.run.run_id)
        self._run.log_params(flat_parameters(event.run.parameters))
        lines: list[str] = []
        model = self._model()
        if model is not None:
            model.summary(print_fn=lambda line, **_: lines.append(line))
            self._run.client.log_text(self._run.run_id, "\n".join(lines), "model_summary.txt")

    def _log_system(self, event: events.WorkersProgressed) -> None:
        now = time.monotonic()
        if not self._thinning.due(now):
            return
        numbers: dict[str, float] = {}
        for worker in event.workers:
            numbers |= self._system_of(worker, now)
        if numbers:
            self._looks += 1
            self._run.log_metrics(numbers.items(), self._looks)

    def _system_of(self, worker: events.WorkerView, now: float) -> dict[str, float]:
        if worker.usage is None:
            return {}
        before = self._before.get(worker.rank)
        self._before[worker.rank] = now, worker.usage.cpu_s
        place = f"system/worker_{worker.rank}"
        numbers = {f"{place}/memory_usage_megabytes": worker.usage.memory_bytes / 1e6}
        if before is not None and now > before[0]:
            share = max(0.0, worker.usage.cpu_s - before[1]) / (now - before[0])
            numbers[f"{place}/cpu_utilization_percentage"] = 100 * share
        if (load := worker.load) is not None:  # of its whole host
            numbers[f"{place}/system_memory_usage_percentage"] = load.memory_percent
            for gpu, percent in enumerate(load.gpu_percents):
                numbers[f"{place}/gpu_{gpu}_utilization_percentage"] = percent
            for gpu, percent in enumerate(load.gpu_memory_percents):
                numbers[f"{place}/gpu_{gpu}_memory_usage_percentage"] = percent
        return numbers

    def _log_model(self) -> None:
        mlflow, model = self._mlflow, self._model()
        flavour = importlib.import_module("mlflow.keras")  # imports keras, which made the model
        with self._active():
            flavour.log_model(
                model,
                name="model",
                signature=_signature(mlflow, model),
                registered_model_name=self._registered_name,
                pip_requirements=_requirements(),
                step=self._last_epoch,  # whose metrics MLflow gives the model too
            )

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """The run is the active one of this thread: MLflow logs models into that only."""
        active = self._mlflow.active_run()
        if active is not None and active.info.run_id == self._run.run_id:
            yield
            return
        with self._mlflow.start_run(run_id=self._run.run_id, nested=active is not None):
            yield

    def _end(self, status: str) -> None:
        if self._own:
            self._run.client.set_terminated(self._run.run_id, status)


_standing: list[sinks.SinkMaker] = []


def autolog(
    log_models: bool = True,
    log_system_metrics: bool = False,
    registered_model_name: str | None = None,
    *,
    disable: bool = False,
) -> None:
    """From now on every fit of this process is logged to MLflow; see :class:`MLflow`.

    A second call takes the place of the first.

    Raises:
        ConfigError: MLflow is not installed.
    """
    while _standing:
        sinks.remove_standing(_standing.pop())
    if disable:
        return
    _require_mlflow()
    make = partial(
        MLflow, log_models=log_models, log_system_metrics=log_system_metrics,
        registered_model_name=registered_model_name,
    )  # fmt: skip
    _standing.append(make)
    sinks.add_standing(make)


def flat_parameters(parameters: dict[str, events.Json]) -> list[tuple[str, events.Json]]:
    """Names and values; a group of settings has a name for each.

    >>> flat_parameters({'mode': 'hogwild', 'rule': {'name': 'easgd', 'alpha': 0.5}})
    [('mode', 'hogwild'), ('rule_name', 'easgd'), ('rule_alpha', 0.5)]
    """
    flat: list[tuple[str, events.Json]] = []
    for key, value in parameters.items():
        if isinstance(value, dict):
            flat += [(f"{key}_{name}", inner) for name, inner in flat_parameters(value)]
        else:
            flat.append((key, value))
    return flat


def _signature(mlflow: Any, model: Any) -> Any:
    """Tensors whose first dimension is free: MLflow's Keras flavour takes no others."""
    from mlflow.types import Schema, TensorSpec

    def schema(tensors: Any) -> Any:
        specs = []
        for tensor in tensors:
            shape = (-1, *(-1 if size is None else size for size in tensor.shape[1:]))
            name = tensor.name if len(tensors) > 1 else None
            specs.append(TensorSpec(np.dtype(str(tensor.dtype)), shape, name))
        return Schema(specs)

    return mlflow.models.ModelSignature(schema(model.inputs), schema(model.outputs))


def _requirements() -> list[str]:
    """The packages that the logged model needs; MLflow would load the model again to find them."""
    backend = sys.modules["keras"].config.backend()  # it is there: it made the model
    found = []
    for package in ("keras", backend, "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package}=={importlib.metadata.version(package)}")
    return found


def _require_mlflow() -> Any:
    try:
        import mlflow
    except ImportError as error:
        raise ConfigError(
            "MLflow is not installed", expected="the package mlflow or mlflow-skinny on the driver",
            received=str(error), hint="pip install 'sparkdl-keras[mlflow]'",
        ) from error  # fmt: skip
    return mlflow
