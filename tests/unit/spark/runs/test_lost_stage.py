"""What the driver says of a stage that Spark gave up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.errors import TransportError, WorkerError
from sparkdl.failures import RanksLost
from sparkdl.spark.runs import launcher
from sparkdl.spark.runs.launcher import SparkRanks, _lost

SPARKS = """An error occurred while calling o100.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Could not recover from a failed
barrier ResultStage. Most recent failure reason: Stage failed because barrier task ResultTask(5, 1)
finished unsuccessfully.
ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: Command exited
"""


def test_the_cause_is_told_and_not_the_call() -> None:
    """Before: "An error occurred while calling o100.collectToPython." and nothing more."""
    error = _lost(RuntimeError(SPARKS), "training stage", {}.get)
    assert error.rank == 1
    assert error.what.startswith("worker 1 failed: Spark gave the training stage up: org.apache")
    assert "stage failure" in error.what
    assert "collectToPython" not in error.what
    assert "ExecutorLostFailure" in str(error)


class Ended:
    """A job that ended with an error."""

    def __init__(self, text: str) -> None:
        self.error = RuntimeError(text)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[SPARK_JOB_CANCELLED] Job 35 cancelled part of cancelled job tags x", False),
        ("[OPERATION_CANCELED] Operation has been canceled.", False),
        (SPARKS, True),
    ],
)
def test_a_cancelled_job_is_no_loss_after_which_training_begins_again(
    text: str, lost: bool
) -> None:
    """Before, a fit whose job was cancelled began it again, ``restarts`` times."""
    ranks = SparkRanks(None, Ended(text), 2, "training stage", "python")  # type: ignore[arg-type]
    ranks._setting = {}.get  # type: ignore[assignment,method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "session_problem", lambda spark: None)
        with pytest.raises(WorkerError) as caught:
            ranks.results()
    assert isinstance(caught.value, RanksLost) == lost
    wanted = "Spark gave the training stage up: " if lost else "the Spark job of the training stage"
    assert caught.value.what.startswith(wanted) or (lost and caught.value.rank >= 0)
    assert ("was cancelled" in caught.value.what) != lost
    assert "worker -1" not in str(caught.value)


def test_an_exception_without_words_is_named() -> None:
    assert "up: ConnectionError" in _lost(ConnectionError(), "stage", {}.get).what


def test_memory_is_named_where_it_was_the_reason() -> None:
    text = "Container killed by YARN for exceeding physical memory limits."
    error = _lost(RuntimeError(text), "stage", {"spark.executor.memoryOverhead": "1g"}.get)
    assert "spark.executor.memoryOverhead=3584m" in error.hint


@pytest.mark.parametrize("alive", [True, False])
def test_rows_that_were_cut_off_with_the_jvm_are_no_results(alive: bool) -> None:
    """PySpark returns what had come by then: a fit had "no rows to train on"."""

    def is_stopped() -> bool:
        if not alive:
            raise ConnectionRefusedError
        return False

    jvm = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=is_stopped))
    context = SimpleNamespace(_jsc=jvm, _gateway=SimpleNamespace(proc=None))
    stage: Any = SimpleNamespace(error=None, result=[])
    ranks = SparkRanks(SimpleNamespace(sparkContext=context), stage, 2, "training stage", "python")
    if alive:
        assert ranks.results() == []
    else:
        with pytest.raises(TransportError, match="JVM of Spark's driver has ended"):
            ranks.results()
