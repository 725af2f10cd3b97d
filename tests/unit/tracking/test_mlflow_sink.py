"""A fit as a run of MLflow, read by MLflow's own client."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tracking_cases import busy_fit, small_fit, small_search

from sparkdl.errors import TransportError
from sparkdl.progress.events import Event, TrainingFailed, TrialBegan, TrialEnded, TrialEpochEnded
from sparkdl.tracking import mlflow_sink
from sparkdl.tracking.mlflow_sink import MLflow, flat_parameters, require_server

mlflow = pytest.importorskip("mlflow")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # set_tracking_uri sets it
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield mlflow.MlflowClient()
    mlflow.set_tracking_uri(before)


class Model:
    def summary(self, print_fn: Any) -> None:
        print_fn("Layer: dense")


def log(events: list[Event], **options: Any) -> None:
    sink = MLflow(log_models=False, **options)
    sink.take_model(Model)
    for event in events:
        if sink.wants_progress or "Progressed" not in type(event).__name__:
            sink.handle(event)


def test_a_fit_is_a_run_with_parameters_and_metrics_per_epoch(store: Any) -> None:
    log(small_fit())
    (run,) = store.search_runs(["0"])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "digits"
    assert run.data.params["optimizer_learning_rate"] == "0.5"
    assert run.data.params["rule_name"] == "mean"
    history = store.get_metric_history(run.info.run_id, "val_loss")
    assert [(m.step, m.value) for m in history] == [(0, 1.25), (1, 0.75)]
    assert run.data.metrics["f1/1"] == 1.0
    assert run.data.metrics["rows_per_s"] == 50.0
    assert [f.path for f in store.list_artifacts(run.info.run_id)] == ["model_summary.txt"]
    assert mlflow.active_run() is None


def test_the_active_run_of_the_user_is_taken_and_stays_open(store: Any) -> None:
    with mlflow.start_run() as mine:
        log(small_fit())
        assert mlflow.active_run().info.run_id == mine.info.run_id
    (run,) = store.search_runs(["0"])
    assert run.info.run_id == mine.info.run_id
    assert run.data.metrics["loss"] == 0.5


def test_a_fit_that_fails_is_a_failed_run_with_the_error(store: Any) -> None:
    log([*small_fit()[:2], TrainingFailed("ValueError: bad rows")])
    (run,) = store.search_runs(["0"])
    assert run.info.status == "FAILED"
    assert run.data.tags["sparkdl.error"] == "ValueError: bad rows"


def test_each_worker_has_system_metrics(store: Any) -> None:
    log(small_fit(), log_system_metrics=True)
    (run,) = store.search_runs(["0"])
    assert run.data.metrics["system/worker_1/memory_usage_megabytes"] > 200


def test_gpus_have_the_names_of_mlflows_own_system_metrics(store: Any) -> None:
    log(busy_fit(3), log_system_metrics=True)
    (run,) = store.search_runs(["0"])
    found = run.data.metrics
    assert found["system/worker_2/gpu_0_utilization_percentage"] == 93.0
    assert found["system/worker_2/gpu_1_utilization_percentage"] == 0.0
    assert found["system/worker_3/gpu_0_memory_usage_percentage"] == 50.0
    assert found["system/worker_3/gpu_1_memory_usage_percentage"] == 10.0
    assert found["system/worker_2/system_memory_usage_percentage"] == 95.0
    assert not [name for name in found if name.startswith("system/worker_0/gpu")]  # no load yet


def test_the_model_is_registered_by_name(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's Keras flavour gets the name, in the run of the fit."""
    logged: list[tuple[Any, dict[str, Any]]] = []

    class Flavour:
        @staticmethod
        def log_model(model: Any, **options: Any) -> None:
            logged.append((mlflow.active_run().info.run_id, options))

    monkeypatch.setitem(sys.modules, "mlflow.keras", Flavour)  # type: ignore[arg-type]
    monkeypatch.setattr(mlflow_sink, "_signature", lambda *_: "signature")
    monkeypatch.setattr(mlflow_sink, "_requirements", list)
    sink = MLflow(registered_model_name="churn")
    sink.take_model(Model)
    for event in small_fit():
        sink.handle(event)
    (run,) = store.search_runs(["0"])
    ((run_id, options),) = logged
    assert run_id == run.info.run_id
    assert options["registered_model_name"] == "churn"
    assert (options["name"], options["signature"], options["step"]) == ("model", "signature", 1)


def test_a_group_of_settings_has_a_name_for_each() -> None:
    assert flat_parameters({"a": 1, "rule": {"name": "x", "o": {"p": 2}}}) == [
        ("a", 1), ("rule_name", "x"), ("rule_o_p", 2),
    ]  # fmt: skip


def test_a_search_is_a_run_with_a_run_for_each_trial(store: Any) -> None:
    log(small_search())
    runs = store.search_runs(["0"])
    assert len(runs) == 13
    (search,) = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    assert search.info.status == "FINISHED"
    assert search.data.params["searcher"] == "RandomSearch"
    assert search.data.params["best_trial"] == "10"
    assert search.data.params["best_kind"] == "a"
    assert search.data.metrics["best_val_accuracy"] == pytest.approx(0.9)
    trials = {r.info.run_name: r for r in runs if r is not search}
    assert {r.data.tags["mlflow.parentRunId"] for r in trials.values()} == {search.info.run_id}
    assert trials["trial 3"].data.params == {"rate": "0.001", "kind": "b"}
    history = store.get_metric_history(trials["trial 3"].info.run_id, "val_accuracy")
    assert [(m.step, m.value) for m in history] == [(0, 0.59), (1, pytest.approx(0.69))]
    assert trials["trial 11"].info.status == "FAILED"
    assert trials["trial 11"].data.tags["sparkdl.error"] == "ValueError: no such network"


def test_a_trial_that_goes_on_stays_one_run(store: Any) -> None:
    began, ended = small_search()[0], small_search()[-1]
    parts: list[Event] = [
        TrialBegan(10, {"rate": 0.5}, 0, 1), TrialEpochEnded(10, 0, {"val_accuracy": 0.5}),
        TrialEnded(10, 1, "waiting", {"val_accuracy": 0.5}), TrialBegan(10, {"rate": 0.5}, 1, 3),
        TrialEnded(10, 3, "complete", {"val_accuracy": 0.75}),
    ]  # fmt: skip
    log([began, *parts, ended])
    runs = {r.info.run_name: r for r in store.search_runs(["0"])}
    assert set(runs) == {"search", "trial 10"}
    history = store.get_metric_history(runs["trial 10"].info.run_id, "val_accuracy")
    assert [(m.step, m.value) for m in history] == [(0, 0.5), (2, 0.75)]
    assert runs["trial 10"].info.status == "FINISHED"


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@pytest.mark.timeout(60)  # MLflow's own client tries for four minutes
def test_a_server_that_is_down_is_a_warning_and_the_fit_goes_on(closed_port: int) -> None:
    mlflow.set_tracking_uri(f"http://127.0.0.1:{closed_port}")
    with pytest.warns(RuntimeWarning, match=r"(?s)nothing of this fit, which goes on.*not answer"):
        log([*small_fit(), TrainingFailed("told nothing of it")], log_system_metrics=True)
    with pytest.warns(RuntimeWarning, match="which goes on"):
        log(small_search())


def test_a_run_that_cannot_be_opened_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def refuses() -> None:
        raise PermissionError("403")

    monkeypatch.setattr(mlflow, "MlflowClient", refuses)
    log(small_fit())
    assert [w for w in recwarn if "goes on: 403" in str(w.message)]


def test_only_a_server_of_http_is_asked_and_one_that_starts_is_waited_for(closed_port: int) -> None:
    for uri in ("", "databricks", "file:///tmp/mlruns", "sqlite:///mlflow.db"):
        require_server(uri, 0.0)
    with pytest.raises(TransportError, match=f"a server at 127.0.0.1:{closed_port}"):
        require_server(f"http://127.0.0.1:{closed_port}", 0.6)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        require_server(f"http://127.0.0.1:{listener.getsockname()[1]}/mlflow", 0.0)
