"""The trained state comes back to the driver without passing through Spark's results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from large_models import frame_of, large_model
from needed import needs_spark

from sparkdl import SparkModel
from sparkdl.spark.runs import launcher

RESULT_BYTES = 512 << 10
"""What all results of a stage may have together: a fourth of the model's weights."""


@pytest.fixture
def small_results(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``spark.driver.maxResultSize``, as the scheduler reads it for each stage; and small pieces on
    the way to the executors."""
    monkeypatch.setattr(launcher, "RESULT_BYTES", 1 << 20)
    settings = spark.sparkContext._jsc.sc().conf()
    name = "spark.driver.maxResultSize"
    before = settings.get(name, "1g")
    settings.set(name, str(RESULT_BYTES))
    yield
    settings.set(name, before)


@pytest.mark.usefixtures("small_results")
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        pytest.param("allreduce", {}, id="allreduce"),
        pytest.param(
            "allreduce", {"rule": "local_sgd", "frequency": 2}, id="rule", marks=pytest.mark.slow
        ),
        pytest.param("synchronous", {}, id="synchronous"),
        pytest.param("asynchronous", {}, id="asynchronous", marks=pytest.mark.slow),
        pytest.param("asynchronous", {"rule": "ensemble"}, id="ensemble"),
    ],
)
def test_the_trained_state_is_no_result_of_spark(
    spark: Any, mode: str, options: dict[str, Any]
) -> None:
    model = large_model()
    before = model.get_weights()
    spark_model = SparkModel(model, mode, num_workers=2, batch_size=8, **options)
    spark_model.fit(frame_of(spark), epochs=2, verbose=0)
    trained = spark_model.model.get_weights()
    assert len(trained) % len(before) == 0  # an ensemble has those of all of its members
    for number, weight in enumerate(trained):
        assert np.abs(weight - before[number % len(before)]).max() > 1e-3
    if options.get("rule") != "ensemble":  # whose members have optimizers of their own
        assert int(model.optimizer.iterations) > 0
        moments = [v.numpy() for v in model.optimizer.variables if v.shape == (4096, 128)]
        assert max(np.abs(moment).max() for moment in moments) > 0


@pytest.mark.usefixtures("small_results")
@pytest.mark.parametrize("mode", ["allreduce", pytest.param("synchronous", marks=pytest.mark.slow)])
def test_a_resumed_fit_is_as_one_that_was_not_ended(spark: Any, tmp_path: Path, mode: str) -> None:
    frame = frame_of(spark).cache()
    frame.count()
    whole, parts = large_model(), large_model()
    SparkModel(whole, mode, num_workers=2, batch_size=8).fit(frame, epochs=3, verbose=0)
    for epochs in (1, 3):
        SparkModel(parts, mode, num_workers=2, batch_size=8).fit(
            frame, epochs=epochs, verbose=0, checkpoint_dir=str(tmp_path), resume=True
        )
    for of_model in (lambda m: m.weights, lambda m: m.optimizer.variables):
        for wanted, given in zip(of_model(whole), of_model(parts), strict=True):
            np.testing.assert_allclose(given.numpy(), wanted.numpy(), atol=1e-5)


@pytest.mark.slow  # the others here hold the same limits without Connect
@needs_spark(4, 0, "its packages have no Connect server")
def test_a_large_model_over_connect() -> None:
    """Neither the plan with the model, nor what comes back, is larger than Spark's limits."""
    script = Path(__file__).parent / "scripts" / "connect_large.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert "LARGE OK" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["allreduce", "synchronous", "asynchronous"])
def test_480_mb_of_weights_and_optimizer_state(tmp_path: Path, mode: str) -> None:
    """Executors of 2 GB, 256 MB of results at most; a second epoch from the first's checkpoint."""
    script = Path(__file__).parent / "scripts" / "large_model.py"
    done = subprocess.run(
        [sys.executable, str(script), mode, str(tmp_path)],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert "LARGE OK" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    (jvms,) = (line.split()[1:] for line in done.stdout.splitlines() if line.startswith("JVMS"))
    assert max(map(int, jvms)) < 1200, jvms  # before: 1,400 MB, and then dead
