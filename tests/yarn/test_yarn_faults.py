"""What goes wrong on YARN: lost containers and nodes, memory, attempts, queues, full folders."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from mini_hadoop import MiniHadoop
from submitting import Submission, Submitter, check_repetition, result_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
FAULTS = "yarn_faults.py"


def _kill_an_executor(submission: Submission) -> None:
    containers = submission.hadoop.ask("containers", submission.application)
    assert len(containers) >= 2, containers  # the application master and executors
    submission.hadoop.ask("kill", submission.application, str(len(containers) - 1))


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild", "synchronous", "allreduce"])
def test_killed_container(submit: Submitter, mode: str) -> None:
    """The modes with a server begin nothing again; all-reduce repeats an epoch at most."""
    with submit.start(FAULTS, "lost", mode) as submission:
        submission.until_file("epoch-1")
        _kill_an_executor(submission)
        found = result_of(submission.wait())
    assert len(found["loss"]) == 6
    assert found["loss"][-1] < found["loss"][0] / 2
    check_repetition(found, mode, epochs=6)


def test_memory_of_a_container(submit: Submitter) -> None:
    """The error says that it is the overhead, how much there was and how much to ask."""
    conf = {
        "spark.executor.memory": "512m", "spark.executor.memoryOverhead": "500m",
        "spark.executor.instances": "1", "spark.task.maxFailures": "1",
        "spark.driver.memoryOverhead": "3g",
    }  # fmt: skip
    found = result_of(submit(FAULTS, "memory", conf=conf))
    for where in ("run", "fit"):
        assert found[where]["type"] in ("WorkerError", "RanksLost"), found[where]
        for part in ("physical memory used", "was 500 MiB for 1 task", "memoryOverhead=3584m"):
            assert part in found[where]["text"], found[where]


def test_second_attempt_of_the_application(submit: Submitter, hadoop: MiniHadoop) -> None:
    """YARN starts a driver that was killed again; with resume=True it goes on from its epoch."""
    with submit.start(FAULTS, "attempts", conf={"spark.yarn.maxAppAttempts": "2"}) as submission:
        found = result_of(submission.wait())
        assert hadoop.ask("attempts", submission.application) == ["2"]
    assert found["attempt"] == 2
    told = (submission.folder / "epochs").read_text().split()
    assert told == ["1:0", "1:1", "1:2", "2:2", "2:3"]


def test_dynamic_allocation(submit: Submitter) -> None:
    """Modes with a server train, from no executor on; the others say at once why not."""
    conf = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.initialExecutors": "0",
        "spark.dynamicAllocation.minExecutors": "0",
        "spark.dynamicAllocation.maxExecutors": "2",
        "spark.executor.instances": "0",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    }
    found = result_of(submit(FAULTS, "dynamic", conf=conf))
    for mode in ("asynchronous", "hogwild", "synchronous"):
        assert found[mode]["type"] is None, found[mode]
        assert found["losses"][mode][-1] < found["losses"][mode][0]
    for refused in ("allreduce", "run"):
        assert found[refused]["type"] == "ResourceError"
        assert "spark.dynamicAllocation.enabled=false (SPARK-24942)" in found[refused]["text"]
        assert found[refused]["seconds"] < 5
    assert found["doctor"]["dynamic allocation"]["status"] == "error"


def test_dynamic_allocation_with_the_shuffle_service(submit: Submitter) -> None:
    """Executors that do nothing go, and shuffled rows stay: the next fit reads them by new ones."""
    conf = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.maxExecutors": "2",
        "spark.dynamicAllocation.executorIdleTimeout": "3s",
        "spark.dynamicAllocation.shuffleTracking.enabled": "false",
        "spark.executor.instances": "0",
        "spark.shuffle.service.enabled": "true",
    }
    found = result_of(submit(FAULTS, "kept", conf=conf))
    assert found["counted"] == 512
    assert found["executors left"] == 0
    assert found["mapped"] == 512, "rows were not made anew"
    assert found["loss"][-1] < found["loss"][0]
    assert found["all-reduce"]["type"] == "ResourceError"
    assert "spark.dynamicAllocation.enabled=false (SPARK-24942)" in found["all-reduce"]["text"]
    assert found["all-reduce"]["seconds"] < 5


def test_two_users_in_two_queues(submit: Submitter, hadoop: MiniHadoop) -> None:
    """Both train at the same time, and neither sees the other."""
    with ExitStack() as stack:
        both = [
            stack.enter_context(
                submit.start(
                    FAULTS, "short", "asynchronous", user,
                    conf={"spark.yarn.queue": queue, "spark.executor.instances": "1"},
                    environment={"HADOOP_USER_NAME": user},
                )
            )
            for user, queue in (("anna", "default"), ("bert", "second"))
        ]  # fmt: skip
        for submission, user in zip(both, ("anna", "bert"), strict=True):
            submission.until_file(f"trains-{user}")
        running = [one for one in hadoop.ask("applications") if ":RUNNING:" in one]
        queues = {one.split(":")[2].removeprefix("root.") for one in running}
        assert queues >= {"default", "second"}
        for user in ("anna", "bert"):
            (both[0].folder / f"go-{user}").touch()
        found = [result_of(submission.wait()) for submission in both]
    assert [(one["user"], one["queue"]) for one in found] == [
        ("anna", "default"),
        ("bert", "second"),
    ]
    for one in found:
        assert one["loss"][-1] < one["loss"][0]


@pytest.mark.parametrize("mode", ["asynchronous", "allreduce"])
def test_preempted_container(submit: Submitter, hadoop: MiniHadoop, mode: str) -> None:
    """A queue above its half loses an executor to the other queue; its fit goes on.

    All-reduce goes on from its last whole epoch, with the executor that is left or a new one.
    """
    # 5 GiB for each executor and 2.75 for the driver, of two nodes with 8 GiB
    large = {"spark.executor.memoryOverhead": "4608m"}
    small = {"spark.yarn.queue": "second", "spark.executor.instances": "1"}
    with submit.start(FAULTS, "lost", mode, "40", conf=large) as first:
        first.until_file("epoch-1")
        with submit.start(
            FAULTS, "short", "asynchronous", "bert", conf=small,
            environment={"HADOOP_USER_NAME": "bert"},
        ) as second:  # fmt: skip
            second.until_file("trains-bert")
            (second.folder / "go-bert").touch()
            result_of(second.wait())
        found = result_of(first.wait())
        (taken,) = hadoop.ask("preempted", first.application)
    assert int(taken) > 0
    assert len(found["loss"]) == 40
    assert found["loss"][-1] < found["loss"][0] / 2
    check_repetition(found, mode, epochs=40)


def test_folders_denied_and_full(submit: Submitter, hadoop: MiniHadoop) -> None:
    """One clear error each, which names the path and the reason."""
    hadoop.ask("folder", "/private", "700")
    hadoop.ask("folder", "/full", "777")
    hadoop.ask("quota", "/full", "1", "any")
    hadoop.ask("folder", "/many", "777")
    hadoop.ask("quota", "/many", "any", "1")  # itself
    found = result_of(submit(FAULTS, "files", environment={"HADOOP_USER_NAME": "anna"}))
    for case, error in found.items():
        kind, _, what = case.partition(" ")
        if case == "denied data":  # Spark's own error, before anything of ours
            assert "Permission denied" in error["text"]
            continue
        if kind == "full" and what in ("lines", "board") and error["type"] is None:
            # there was room for the file's name: the fit goes on without its log, and says so
            of_quota = [text for text in error["warnings"] if "quota" in text.lower()]
            assert len(of_quota) == 1, error
            (error["text"],) = of_quota
        else:
            assert error["type"] == "ResourceError", (case, error)
        if kind == "denied":
            assert "Permission denied: user=anna" in error["text"], error
            assert "/private/" in error["text"]
        if kind in ("full", "many"):
            assert "quota" in error["text"].lower(), error
            assert f"/{kind}" in error["text"]
        if what == "checkpoints" or (kind == "denied" and what in ("lines", "board")):
            assert error["seconds"] < 10, "before any job"
    assert "/nowhere/model.keras" in found["missing"]["text"]


def test_gpus_by_a_discovery_script(submit: Submitter, tmp_path: Path) -> None:
    """A node's GPUs as a script names them: each rank sees its own."""
    script = tmp_path / "gpus.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0"]}\'\n')
    script.chmod(0o755)
    conf = {
        "spark.executor.resource.gpu.amount": "1",
        "spark.task.resource.gpu.amount": "1",
        "spark.executor.resource.gpu.discoveryScript": str(script),
    }
    assert result_of(submit(FAULTS, "gpus", conf=conf)) == {"given": ["0", "0"]}


def test_gpus_for_the_training_stage_only(submit: Submitter, tmp_path: Path) -> None:
    """``resources={'gpu': 1}``: other stages run beside the GPUs, two tasks of an executor each."""
    script = tmp_path / "gpus.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1"]}\'\n')
    script.chmod(0o755)
    conf = {
        "spark.executor.cores": "2", "spark.executor.instances": "1",
        "spark.executor.memoryOverhead": "3g", "spark.executor.resource.gpu.amount": "2",
        "spark.executor.resource.gpu.discoveryScript": str(script),
    }  # fmt: skip
    found = result_of(submit(FAULTS, "stage_gpus", conf=conf))
    assert found == {"others": [[]], "asynchronous": [["0"], ["1"]], "allreduce": [["0"], ["1"]]}


def test_resources_of_the_training_stage(submit: Submitter) -> None:
    """``resources={'cpus': 2}``: four cores in two executors have room for two workers."""
    conf = {"spark.executor.cores": "2", "spark.executor.memoryOverhead": "3g"}
    found = result_of(submit(FAULTS, "resources", conf=conf))
    assert found["workers"] == {"synchronous": 2, "allreduce": 2}
    assert found["unknown"]["type"] == "ConfigError", found
    assert "fpga" in found["unknown"]["text"]
