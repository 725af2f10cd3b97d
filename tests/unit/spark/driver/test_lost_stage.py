"""What the driver says of a stage that Spark gave up."""

from __future__ import annotations

from sparkdl.spark.driver.launcher import _lost

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


def test_an_exception_without_words_is_named() -> None:
    assert "up: ConnectionError" in _lost(ConnectionError(), "stage", {}.get).what


def test_memory_is_named_where_it_was_the_reason() -> None:
    text = "Container killed by YARN for exceeding physical memory limits."
    error = _lost(RuntimeError(text), "stage", {"spark.executor.memoryOverhead": "1g"}.get)
    assert "spark.executor.memoryOverhead=3584m" in error.hint
