"""``HorovodRunner``: here, in local processes, and in a barrier stage."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest
import tensorflow  # noqa: F401  here, because importing it sets environment variables
from needed import needs_spark
from processes import runs
from scripted import run_script

import sparkdl
from sparkdl import HorovodRunner
from sparkdl.errors import ConfigError, UnknownNameError, WorkerError

HOROVOD = importlib.util.find_spec("horovod") is not None


def train(scale: float) -> tuple[int, float, int]:
    communicator = sparkdl.communicator()
    if HOROVOD:
        import horovod.tensorflow as hvd

        hvd.init()
        assert (hvd.rank(), hvd.size()) == (communicator.rank, communicator.size)
    print(f"printed {communicator.rank}")
    sparkdl.log_to_driver(f"logged {communicator.rank}")
    total = communicator.all_reduce(np.full(2, scale), "sum")
    return communicator.size, float(total[0]), os.getpid()


def test_the_signature_is_databricks():
    parameters = inspect.signature(HorovodRunner).parameters
    assert list(parameters) == ["np", "driver_log_verbosity"]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    assert parameters["driver_log_verbosity"].default == "log_callback_only"


@pytest.mark.parametrize("count", [0, 1.5, True, "2", None])
def test_nonsense_is_refused_before_anything_starts(count: Any):
    with pytest.raises(ConfigError, match="np="):
        HorovodRunner(np=count)


def test_an_unknown_verbosity_is_refused():
    with pytest.raises(UnknownNameError, match="log_callback_only"):
        HorovodRunner(np=2, driver_log_verbosity="loud")


def test_minus_one_runs_in_this_process(capsys: pytest.CaptureFixture[str]):
    for _ in range(2):
        assert HorovodRunner(np=-1).run(train, scale=2.0) == (1, 2.0, os.getpid())
    assert capsys.readouterr().out.splitlines()[:2] == ["printed 0", "logged 0"]

    def fail() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        HorovodRunner(np=-1).run(fail)
    assert sparkdl.communicator().size == 1


def test_below_minus_one_runs_in_local_processes(capsys: pytest.CaptureFixture[str]):
    size, total, pid = HorovodRunner(np=-2).run(train, scale=2.0)
    assert (size, total) == (2, 4.0)
    assert pid != os.getpid()
    out = capsys.readouterr().out
    for rank in range(2):
        assert f"[rank {rank}] printed {rank}" in out
        assert f"[rank {rank}] logged {rank}" in out
    assert not runs(pid)


def test_a_local_rank_that_raises_or_dies(capsys: pytest.CaptureFixture[str]):
    def work(how: str) -> None:
        communicator = sparkdl.communicator()
        if communicator.rank == 1 and how == "raises":
            raise ValueError("bad row 17")
        if communicator.rank == 1:
            print("the end is near", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    for how, word in (("raises", "bad row 17"), ("dies", "the end is near")):
        began = time.monotonic()
        with pytest.raises(WorkerError, match=word) as caught:
            HorovodRunner(np=-2).run(work, how=how)
        assert caught.value.rank == 1
        assert time.monotonic() - began < 100  # the framework is imported by both ranks first
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a process of Spark's that has just ended
            assert "sparkdl.launch.child" not in " ".join(child.cmdline())


def test_above_zero_runs_in_a_barrier_stage(spark: Any, capfd: pytest.CaptureFixture[str]):
    def main(scale: float) -> Any:
        result = train(scale)
        return result if sparkdl.communicator().rank == 0 else threading.Lock()

    size, total, pid = HorovodRunner(np=2).run(main, scale=2.0)
    assert (size, total) == (2, 4.0)
    assert pid != os.getpid()
    out = capfd.readouterr().out
    assert "[rank 1] logged 1" in out
    assert "printed" not in out
    HorovodRunner(np=2, driver_log_verbosity="all").run(main, scale=2.0)
    assert "[rank 1] printed 1" in capfd.readouterr().out


def test_ctrl_c_cancels_the_stage(spark: Any):
    def forever() -> None:
        time.sleep(100)

    timer = threading.Timer(3.0, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        sparkdl.run(forever, num_workers=2, communicator="builtin")
    tracker = spark.sparkContext.statusTracker()
    deadline = time.monotonic() + 10
    while tracker.getActiveStageIds() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not tracker.getActiveStageIds()


@pytest.mark.slow
def test_gpus_are_pinned_before_the_function_runs():
    assert "GPU-RUN-OK" in run_script("gpu_run.py")


@needs_spark(4, 0, "its packages have no Connect server")
@pytest.mark.slow
def test_spark_connect():
    pytest.importorskip("grpc_status", reason="pyspark[connect] is not installed")
    assert "CONNECT-RUN-OK" in run_script("connect_run.py")
