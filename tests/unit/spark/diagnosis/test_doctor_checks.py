"""What facts and settings mean to ``sparkdl.doctor``, with answers known beforehand."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkdl import Limits
from sparkdl.config import FitConfig
from sparkdl.diagnosis import cluster_checks, host_checks, host_facts
from sparkdl.diagnosis.executors import Executor, Executors, parse_answers
from sparkdl.diagnosis.network import Answer, Link, targets
from sparkdl.diagnosis.report import Check, DoctorReport
from sparkdl.errors import ResourceError
from sparkdl.settings.network import Network

FACTS: dict[str, Any] = {
    "host": "node1", "network": "boot net", "python": "3.11.7", "executable": "/python",
    "packages": {
        "numpy": "2.1.0", "pyarrow": "18.0.0", "pandas": "2.2.3", "cloudpickle": "3.1.0",
        "sparkdl": "0.1.0", "keras": "3.15.0", "tensorflow": "2.21.0", "horovod": None,
    },
    "problems": {}, "foreign": {"imported": None, "behind": []}, "horovod": [],
    "shm": {"total": 1 << 33, "free": 1 << 32},
    "disk": {"folder": "/tmp", "problem": None, "free": 1 << 35},
    "memory": {"limit": None, "free": 1 << 34}, "cpus": 2.0, "gpus": None,
    "resolved": ["10.0.0.1"],
}  # fmt: skip


def _facts(**changes: Any) -> dict[str, Any]:
    facts = copy.deepcopy(FACTS)
    for name, value in changes.items():
        if isinstance(facts[name], dict) and isinstance(value, dict):
            facts[name].update(value)
        else:
            facts[name] = value
    return facts


def _executors(*facts: dict[str, Any] | None, known: int | None = None) -> Executors:
    answered = tuple(Executor(f"{i}@node", "", f, "boom") for i, f in enumerate(facts))
    return Executors(answered, len(facts) if known is None else known, "python3")


def _by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def _host_checks(*facts: dict[str, Any] | None, known: int | None = None) -> dict[str, Check]:
    return _by_name(
        host_checks.check_hosts(FACTS, _executors(*facts, known=known), "tensorflow", 1, "driver")
    )


def test_equal_executors_are_healthy() -> None:
    checks = _host_checks(_facts(), _facts())
    assert {check.status for check in checks.values()} == {"ok"}
    assert len(checks) == 9


@pytest.mark.parametrize(
    ("changes", "name", "status", "words"),
    [
        ({"python": "3.10.2"}, "python", "error", "3.10.2"),
        ({"packages": {"sparkdl": None}}, "packages", "error", "no sparkdl"),
        ({"packages": {"numpy": "1.26.4"}}, "packages", "error", "numpy 1.26.4"),
        ({"packages": {"numpy": "2.0.2"}}, "packages", "warning", "numpy 2.0.2"),
        ({"packages": {"sparkdl": "0.0.9"}}, "packages", "error", "sparkdl 0.0.9"),
        ({"foreign": {"imported": "/old/sparkdl"}}, "packages", "error", "0@node: /old/sparkdl is"),
        ({"foreign": {"behind": ["/old/sparkdl"]}}, "packages", "warning", "0@node: /old/sparkdl"),
        ({"packages": {"tensorflow": None}}, "backend", "error", "no tensorflow"),
        ({"packages": {"tensorflow": "2.20.0"}}, "backend", "warning", "2.20.0"),
        ({"packages": {"horovod": "0.28.1"}}, "horovod", "warning", "another or none"),
        ({"shm": {"free": 64 << 20}}, "/dev/shm", "warning", "64.0 MiB"),
        ({"shm": None}, "/dev/shm", "warning", "none"),
        ({"disk": {"problem": "No space left on device"}}, "disk", "error", "No space left"),
        ({"disk": {"free": 1 << 30}}, "disk", "warning", "1.0 GiB"),
        ({"memory": {"limit": 1 << 30}}, "memory", "warning", "1.0 GiB for 2 executors"),
        ({"cpus": 1.5}, "cpus", "warning", "1.5 for 2 executors"),
        ({"resolved": []}, "addresses", "error", "does not resolve"),
        ({"network": "other", "resolved": ["127.0.1.1"]}, "addresses", "error", "loopback"),
    ],
)
def test_one_fault_is_the_only_one_named(
    changes: dict[str, Any], name: str, status: str, words: str
) -> None:
    checks = _host_checks(_facts(**changes), _facts())
    assert [n for n, check in checks.items() if check.status != "ok"] == [name]
    assert checks[name].status == status
    assert words in checks[name].found
    assert checks[name].expected
    assert checks[name].hint


@pytest.mark.parametrize(
    ("changes", "name", "status", "words"),
    [
        ({"disk": {"problem": "No space left on device"}}, "disk", "error", "driver: /tmp: No"),
        ({"disk": {"free": 1 << 30}}, "disk", "warning", "driver: 1.0 GiB"),
        ({"memory": {"limit": 1 << 30}}, "memory", "warning", "1.0 GiB for the driver"),
        ({"memory": {"free": 1 << 29}}, "memory", "warning", "512.0 MiB for the driver"),
        ({"cpus": 0.5}, "cpus", "warning", "0.5 for the driver"),
        ({"foreign": {"behind": ["/old/sparkdl"]}}, "packages", "warning", "driver: /old/sparkdl"),
    ],
)
def test_fault_of_the_driver_is_named(
    changes: dict[str, Any], name: str, status: str, words: str
) -> None:
    found = host_checks.check_hosts(
        _facts(**changes), _executors(_facts(), _facts()), "tensorflow", 1, "driver"
    )
    checks = _by_name(found)
    assert [n for n, check in checks.items() if check.status != "ok"] == [name]
    assert checks[name].status == status
    assert words in checks[name].found


def test_a_package_that_is_missing_comes_before_one_that_ours_hides() -> None:
    behind = {"behind": ["/old/sparkdl"]}
    check = _host_checks(_facts(foreign=behind, packages={"keras": None}))["packages"]
    assert (check.status, "no keras" in check.found) == ("error", True)


def test_horovod_that_was_built_for_another_framework_is_a_warning() -> None:
    driver = _facts(packages={"horovod": "0.28.1"}, horovod=["torch"])
    check = host_checks.check_horovod
    assert check(driver, {"a": driver}, "tensorflow").status == "warning"
    assert check(driver, {"a": driver}, "torch").status == "ok"


def test_loopback_is_right_on_the_drivers_own_machine() -> None:
    assert _host_checks(_facts(resolved=["127.0.0.1"]))["addresses"].status == "ok"


def test_executor_without_a_working_python_is_named_with_its_output() -> None:
    checks = _host_checks(_facts(), None)
    assert checks["python"].status == "error"
    assert "1@node: boom (python3)" in checks["python"].found


def test_silent_executors_are_counted() -> None:
    check = _host_checks(_facts(), known=3)["python"]
    assert (check.status, check.found) == ("warning", "2 of 3 executors did not answer")


def test_no_answer_at_all_is_an_error_with_its_reason() -> None:
    nobody = Executors((), 2, "python3", "no answer within 10 s")
    checks = host_checks.check_hosts(FACTS, nobody, "tensorflow", 1, "driver")
    assert [c.status for c in checks] == ["error"]
    assert "no answer within 10 s" in checks[0].found


def test_answers_are_read_from_mixed_output() -> None:
    lines = [
        "#executor 7 node1 Python 3.11.7", "a warning", '#facts {"python": "3.11.7"}',
        "#executor 8 node2 sh: 1: python3: not found", "sh: python3: not found", "#failed 127",
        "#executor 9 node3 Python 3.11.7", "#failed 124",
    ]  # fmt: skip
    one, two, three = parse_answers(lines)
    assert (one.name, one.facts) == ("7@node1", {"python": "3.11.7"})
    assert (two.name, two.facts, two.output) == ("8@node2", None, "sh: python3: not found")
    assert three.output == "no answer: it hangs"


@pytest.mark.processes
def test_program_runs_alone_and_tells_the_same_as_here() -> None:
    """Executors run the file's source, without sparkdl; ``-S -E``: also without site packages."""
    source = inspect.getsource(host_facts)
    ran = subprocess.run(
        [sys.executable, "-S", "-E", "-c", source, '{"resolve": "localhost"}'],
        capture_output=True, text=True, cwd="/",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (told,) = parse_answers(["#executor 1 here Python", *ran.stdout.splitlines()])
    here = host_facts.collect({"resolve": "localhost"})
    assert told.facts is not None
    assert told.facts["packages"]["sparkdl"] is None
    assert "ModuleNotFoundError" in told.facts["problems"]["sparkdl"]
    for name in ("host", "network", "python", "cpus", "resolved"):
        assert told.facts[name] == here[name]


@pytest.mark.processes
@pytest.mark.parametrize("hides", [True, False], ids=["in front", "behind"])
def test_another_package_of_the_name_is_told(tmp_path: Path, hides: bool) -> None:
    """As Databricks' older runtimes have one: it cannot even be imported without their packages."""
    foreign = tmp_path / "sparkdl"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("import tensorframes_of_old")
    ours = str(Path(host_facts.__file__).parents[2])
    paths = [str(tmp_path), ours] if hides else [ours, str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, "-S", "-E", "-c", inspect.getsource(host_facts),
         json.dumps({"folders": paths})],
        capture_output=True, text=True, cwd="/",
    )  # fmt: skip
    (told,) = parse_answers(["#executor 1 here Python", *ran.stdout.splitlines()])
    assert told.facts is not None, ran.stderr
    seen = {"imported": str(foreign), "behind": []} if hides else (
        {"imported": None, "behind": [str(foreign)]}
    )  # fmt: skip
    assert told.facts["foreign"] == seen


# -- settings ----------------------------------------------------------------------------------


def _settings(master: str, tasks: int = 1, **values: str) -> dict[str, Check]:
    named = {"spark." + name.replace("_", "."): value for name, value in values.items()}
    return _by_name(cluster_checks.check_settings(named.get, FitConfig(), master, tasks))


def test_memory_overhead_of_yarn_says_how_much_to_ask() -> None:
    check = _settings("yarn", tasks=2, executor_memory="4g")["memory overhead"]
    assert check.status == "error"
    assert "409 MiB for 2 Python workers" in check.found
    assert "spark.executor.memoryOverhead=7168m" in check.hint  # 2 * (1536 + 2048)
    assert _settings("yarn", executor_memoryOverhead="3584m")["memory overhead"].status == "ok"
    assert "memory overhead" not in _settings("local-cluster[2,1,1024]")


def test_overhead_without_room_for_partitions_is_a_warning() -> None:
    check = _settings("yarn", tasks=2, executor_memoryOverhead="4g")["memory overhead"]
    assert check.status == "warning"
    assert "7168 MiB" in check.expected
    assert "memoryOverhead=7168m, or Limits(memory_budget_mb=512)" in check.hint
    small = FitConfig(limits=Limits(memory_budget_mb=512))
    found = cluster_checks.check_settings(
        {"spark.executor.memoryOverhead": "4g"}.get, small, "yarn", 2
    )
    assert _by_name(found)["memory overhead"].status == "ok"


def test_connect_says_what_is_refused() -> None:
    check = cluster_checks.check_connect(FitConfig(), None)
    assert check.status == "ok"
    assert "RDDs" in check.found
    unreached = ResourceError("x", expected="a session", received="a client", hint="use allreduce")
    check = cluster_checks.check_connect(FitConfig(), unreached)
    assert (check.status, check.expected, check.hint) == ("error", "a session", "use allreduce")
    assert "modes with a server" in check.found
    check = cluster_checks.check_connect(FitConfig(mode="allreduce"), unreached)
    assert check.status == "warning"


def test_bound_of_the_address_space_is_an_error() -> None:
    assert _settings("yarn", executor_pyspark_memory="1g")["pyspark memory"].status == "error"


def test_tiny_arrow_batches_are_a_warning() -> None:
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    found = cluster_checks.check_settings({name: "10"}.get, FitConfig(), "local[2]", 1)
    assert _by_name(found)["arrow"].status == "warning"


def test_dynamic_allocation_depends_on_the_mode_and_the_master() -> None:
    on = {"spark.dynamicAllocation.enabled": "true"}.get
    check = cluster_checks.check_allocation
    assert check(on, "allreduce", "yarn").status == "error"
    assert check(on, "asynchronous", "yarn").status == "warning"
    assert check(on, "allreduce", "local[2]").status == "ok"


@pytest.mark.parametrize(
    ("versions", "statuses"),
    [
        (("17.0.15", "4.3.0", "4.3.0"), ["ok", "ok"]),
        (("21-ea", "4.3.1", "4.3.0"), ["ok", "ok"]),
        (("11.0.2", "4.3.0", "4.2.0"), ["error", "warning"]),
        (("1.8.0_392", "3.5.0", "3.5.0"), ["ok", "ok"]),
        (("11.0.2", "3.5.9", "3.5.9"), ["ok", "ok"]),
        (("17.0.15", "4.0.0.dev1", "3.5.9"), ["ok", "warning"]),
        ((None, "3.4.4", "3.4.4"), ["error"]),
    ],
)
def test_versions(versions: tuple[str | None, str, str], statuses: list[str]) -> None:
    assert [c.status for c in cluster_checks.check_versions(*versions)] == statuses


# -- the common probe --------------------------------------------------------------------------


def _answer(rank: int, driver: Link, other: Link, gpus: tuple[str, ...] = ()) -> Answer:
    return Answer(rank, "node", driver, {1 - rank: other}, gpus)


GOOD = Link("10.0.0.1:7000", "", 1e-4, 1e9, 0.01)


def test_good_links_are_ok() -> None:
    found = cluster_checks.check_probe([_answer(0, GOOD, GOOD), _answer(1, GOOD, GOOD)], 0.5, 10)
    assert [(c.name, c.status) for c in found] == [
        ("barrier", "ok"), ("driver port", "ok"), ("clocks", "ok"), ("between ranks", "ok"),
    ]  # fmt: skip


def test_broken_slow_and_skewed_links_are_named() -> None:
    closed = Link("10.0.0.1:7000", "TimeoutError: timed out")
    slow = Link("10.0.0.2:4000", "", 1e-4, 1e6)
    late = Link("10.0.0.1:7000", "", 1e-4, 1e9, -30.0)
    found = _by_name(
        cluster_checks.check_probe([_answer(0, closed, slow), _answer(1, late, GOOD)], 11, 10)
    )
    assert found["barrier"].status == "warning"
    assert found["driver port"].status == "error"
    assert "rank 0: 10.0.0.1:7000: TimeoutError" in found["driver port"].found
    assert found["between ranks"].status == "warning"
    assert "1 MB/s" in found["between ranks"].found
    assert found["clocks"].found == "apart by 30.0 s"


def test_ranks_that_do_not_reach_each_other_may_train_through_a_server() -> None:
    closed = Link("10.0.0.2:4000", "ConnectionRefusedError: refused")
    answers = [_answer(0, GOOD, closed), _answer(1, GOOD, closed)]
    for with_server, status in ((False, "error"), (True, "warning")):
        found = _by_name(cluster_checks.check_probe(answers, 0.5, 10, with_server=with_server))
        assert found["between ranks"].status == status
        assert found["driver port"].status == "ok"


def test_no_executor_at_all_is_an_error_with_what_to_look_at() -> None:
    check = cluster_checks.check_slots(0, FitConfig(), 1, "driver.example.org")
    assert check.status == "error"
    assert "spark.driver.host=driver.example.org" in check.hint
    assert cluster_checks.check_slots(1, FitConfig(), 1, "driver").status == "ok"
    assert cluster_checks.check_slots(1, FitConfig(num_workers=2), 1, "driver").status == "error"
    served = FitConfig(num_workers=2, network=Network(num_servers=3, servers="executors"))
    check = cluster_checks.check_slots(4, served, 1, "driver")
    assert (check.status, check.expected) == (
        "error",
        "5, one for each worker and each server (num_workers, num_servers)",
    )
    assert cluster_checks.check_slots(5, served, 1, "driver").status == "ok"


def test_gpus_that_are_there_and_not_given_are_a_warning() -> None:
    without, given = [_answer(0, GOOD, GOOD)], [_answer(0, GOOD, GOOD, ("0",))]
    blind = [dataclasses.replace(given[0], seen_gpus=0)]

    def check(answers: list[Answer], there: int | None) -> Check:
        return cluster_checks.check_gpus(answers, "", {"a": there}, "tensorflow")

    assert check(without, None).status == "ok"
    assert check(without, 2).status == "warning"
    assert check(given, 2).status == "ok"
    assert check(given, None).status == "error"
    assert check(blind, 2).found == "tensorflow sees 0 of the 1 GPUs of rank 0 on node"


def test_every_rank_connects_to_all_others_or_to_the_next() -> None:
    assert [targets(rank, 3) for rank in range(3)] == [[1, 2], [2, 0], [0, 1]]
    assert [targets(rank, 17) for rank in (0, 16)] == [[1], [0]]
    assert targets(0, 1) == []


def test_answer_survives_its_text() -> None:
    answer = Answer(1, "node", GOOD, {0: GOOD}, ("GPU-1",), 1, {"python": "3.11.7"})
    assert Answer.from_json(answer.to_json()) == answer


# -- the report --------------------------------------------------------------------------------


def test_report_as_text_table_and_values() -> None:
    checks = (
        Check("java", "ok", "17"),
        Check("slots", "error", "1 < 2", "2 slots", "more <executors>"),
    )
    report = DoctorReport(checks, 1.234)
    assert report.status == "error"
    assert report.named("slots").hint == "more <executors>"
    assert str(report).splitlines() == [
        "ok       java   17",
        "error    slots  1 < 2",
        "                  expected: 2 slots",
        "                  to do: more <executors>",
        "1 error, 1 ok in 1.2 s",
    ]
    assert "more &lt;executors&gt;" in report._repr_html_()
    assert report.to_dict()["seconds"] == 1.23
