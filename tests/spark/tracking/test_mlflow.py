"""``sparkdl.mlflow.autolog``: the logged model scores a DataFrame as ``predict`` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spark_models import make_mlp

import sparkdl.mlflow
from sparkdl import SparkModel

mlflow = pytest.importorskip("mlflow")


def test_autolog_logs_a_run_whose_model_predicts_as_the_trained_one(
    digits_df: Any, digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    sparkdl.mlflow.autolog(registered_model_name="digits")
    try:
        spark_model = SparkModel(make_mlp(), num_workers=2)
        history = spark_model.fit(digits_df, epochs=2, verbose=0)
        client = mlflow.MlflowClient()
        (run,) = client.search_runs(["0"])  # the driver's: executors open none
        metrics = client.get_metric_history(run.info.run_id, "loss")
        losses = history.history["loss"]
        assert {m.step: m.value for m in metrics} == pytest.approx(dict(enumerate(losses)))
        # MLflow takes the metrics of the step at which a model is logged as the model's own
        (logged,) = client.search_logged_models(["0"])
        of_the_model = {m.key: (m.step, m.value) for m in logged.metrics}
        assert of_the_model["loss"] == (1, pytest.approx(losses[-1]))
        (version,) = client.search_model_versions("name='digits'")
        assert (version.version, version.run_id) in (("1", run.info.run_id), (1, run.info.run_id))
        model = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model")
        x = digits[0][:50]
        expected = spark_model.model.predict(x, verbose=0)
        np.testing.assert_allclose(model.predict(x), expected, atol=1e-6)
        score = mlflow.pyfunc.spark_udf(
            digits_df.sparkSession, f"runs:/{run.info.run_id}/model", result_type="array<float>",
            env_manager="local",
        )  # fmt: skip
        rows = digits_df.limit(20).select("features", score("features").alias("p")).collect()
        expected = spark_model.model.predict(np.array([row.features for row in rows]), verbose=0)
        np.testing.assert_allclose([row.p for row in rows], expected, atol=1e-6)
    finally:
        sparkdl.mlflow.autolog(disable=True)
        mlflow.set_tracking_uri(before)
    SparkModel(make_mlp(), num_workers=2).fit(digits_df, verbose=0)
    assert len(client.search_runs(["0"])) == 1
