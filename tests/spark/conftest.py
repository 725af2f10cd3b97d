"""One real cluster for all Spark tests: two executor processes on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    from pyspark.sql import SparkSession

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    session = (
        SparkSession.builder.master("local-cluster[2,2,2048]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.executorEnv.PYTHONPATH", f"{root}:{root}/tests:{root}/tests/start")
        .config("spark.executorEnv.TF_CPP_MIN_LOG_LEVEL", "3")
        .config("spark.task.reaper.enabled", "true")
        .config("spark.python.daemon.module", "preloaded_workers")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def no_task_fails_unseen(request: pytest.FixtureRequest) -> Iterator[None]:
    """Spark tries a failed task again, so a job that ends well may hide an error of ours.

    Tests whose workers are to fail have the mark ``tries_again``.
    """
    yield
    if "spark" not in request.fixturenames:
        return
    context = request.getfixturevalue("spark").sparkContext
    core, tracker = context._jsc.sc(), context.statusTracker()
    first, end = _seen_jobs.get(context.applicationId, 0), core.dagScheduler().numTotalJobs()
    _seen_jobs[context.applicationId] = end
    if request.node.get_closest_marker("tries_again"):
        return
    core.listenerBus().waitUntilEmpty(10_000)
    jobs = [job for job in map(tracker.getJobInfo, range(first, end)) if job is not None]
    stages = [
        tracker.getStageInfo(n) for job in jobs if job.status == "SUCCEEDED" for n in job.stageIds
    ]
    failed = [stage.name for stage in stages if stage is not None and stage.numFailedTasks]
    assert not failed, "tasks of a job that ended well had failed, and were tried again"


_seen_jobs: dict[str, int] = {}
"""Application -> the number of jobs whose tasks have been looked at."""


@pytest.fixture(scope="session")
def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.data / 16.0).astype("float32"), data.target.astype("int64")


@pytest.fixture(scope="session")
def digits_df(spark: Any, digits: Any) -> Any:
    x, y = digits
    rows = [(x[i].tolist(), int(y[i]), i) for i in range(len(x))]
    df = spark.createDataFrame(rows, "features array<float>, label int, id int")
    df = df.repartition(2).cache()
    df.count()
    return df
