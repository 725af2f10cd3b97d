"""What is said of a container that was killed for its memory."""

from __future__ import annotations

import pytest

from sparkdl.spark.runs.resources import megabytes, memory_hint

YARN = (
    "Job aborted due to stage failure: ExecutorLostFailure (executor 2 exited caused by one of the "
    "running tasks) Reason: Container killed by YARN for exceeding physical memory limits. "
    "1.1 GB of 896 MB physical memory used. Consider boosting spark.executor.memoryOverhead."
)
KUBERNETES = "The executor with id 1 exited with exit code 137(SIGKILL, possible container OOM)."


def test_names_the_overhead_and_how_much_to_ask() -> None:
    settings = {"spark.executor.memory": "512m", "spark.executor.memoryOverhead": "384m"}
    hint = memory_hint(YARN, settings.get)
    assert hint is not None
    assert "1.1 GB of 896 MB physical memory used" in hint
    assert "was 384 MiB for 1 task;" in hint
    assert "spark.executor.memoryOverhead=3584m" in hint  # 1536 + 2048


HEAP = (
    "Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times, most recent failure: "
    "Lost task 0.7 in stage 1.0 (TID 12) (127.0.0.1 executor 5): "
)
LOST = (
    "ExecutorLostFailure (executor 5 exited caused by one of the running tasks) Reason: Command "
    "exited with code 52"
)


@pytest.mark.parametrize("end", [LOST, "java.lang.OutOfMemoryError: Java heap space"])
def test_names_the_java_memory_of_an_executor(end: str) -> None:
    """Before, a user saw the code 52, and three things that it might have been."""
    hint = memory_hint(HEAP + end, {"spark.executor.memory": "2g"}.get)
    assert hint is not None
    assert "spark.executor.memory=2g is too little" in hint
    assert memory_hint(HEAP + end.replace("52", "521").replace("Memory", ""), {}.get) is None


def test_asks_for_each_task_of_an_executor() -> None:
    settings = {"spark.executor.cores": "4", "spark.task.cpus": "2"}
    hint = memory_hint(KUBERNETES, settings.get)
    assert hint is not None
    assert "was 384 MiB for 2 tasks;" in hint
    assert "memoryOverhead=7168m" in hint


def test_asks_for_more_than_there_was() -> None:
    hint = memory_hint(YARN, {"spark.executor.memoryOverhead": "4g"}.get)
    assert hint is not None
    assert "memoryOverhead=6144m" in hint


@pytest.mark.parametrize("text", ["Connection reset", "Container killed on request. Exit code 143"])
def test_says_nothing_of_other_ends(text: str) -> None:
    assert memory_hint(text, {}.get) is None


SIZES = {"2g": 2048, "1536m": 1536, "1t": 1 << 20, "2048k": 2, "1gb": 1024, "300": 300}


@pytest.mark.parametrize(("text", "count"), SIZES.items())
def test_sizes_are_read_as_spark_reads_them(text: str, count: int) -> None:
    assert megabytes(text) == count
