"""Findings from Spark's settings and from the common probe of all slots."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sparkdl.config import FitConfig
from sparkdl.diagnosis.network import Answer, Link
from sparkdl.diagnosis.report import Check
from sparkdl.errors import ResourceError
from sparkdl.spark.runs import resources
from sparkdl.spark.runs.resources import WORKER_MB, Setting, megabytes

MOST_SKEW_S = 2.0
SLOW_RATE = 30e6
"""Bytes per second below which exchanges take longer than training."""


def check_versions(java: str | None, spark: str, pyspark: str) -> list[Check]:
    """Spark 3.5 or newer, PySpark of Spark's version, and a Java that this Spark runs on."""
    checks = []
    number = tuple(int(part) for part in spark.split(".")[:2])
    if java is not None:
        major, *rest = re.findall(r"\d+", java) or ["0"]
        least = 17 if number >= (4, 0) else 8
        found = Check("java", "ok", java)
        if int(rest[0] if major == "1" and rest else major) < least:  # 1.8 is Java 8
            expected, hint = f"Java {least} or newer", "set JAVA_HOME to a newer one"
            found = replace(found, status="error", expected=expected, hint=hint)
        checks.append(found)
    minor = [".".join(v.split(".")[:2]) for v in (spark, pyspark)]
    if number < (3, 5):
        checks.append(Check("spark", "error", spark, "Spark 3.5 or newer", "a newer one"))
    elif minor[0] != minor[1]:
        checks.append(Check(
            "spark", "warning", f"Spark {spark}, pyspark {pyspark}",
            "pyspark of Spark's version", f"pip install 'pyspark=={minor[0]}.*'",
        ))  # fmt: skip
    else:
        checks.append(Check("spark", "ok", spark))
    return checks


def check_slots(slots: int, config: FitConfig, task_cpus: int, driver_host: str) -> Check:
    """Whether the workers of a run, and its servers on executors, can run at the same time."""
    servers = config.server_slots
    wanted = (config.num_workers or 1) + servers
    each = "one for each worker" + (" and each server" if servers else "")
    if slots < 1:
        return Check(
            "slots", "error", "no executor has come", f"{wanted}, {each}",
            "has the cluster room for an executor? Do executors find the driver: does "
            f"spark.driver.host={driver_host} mean this machine on theirs, and no loopback address "
            "(/etc/hosts), and does a firewall let spark.driver.port and spark.blockManager.port "
            "in? Their logs say why they ended",
        )  # fmt: skip
    if slots < wanted:
        return Check(
            "slots", "error", f"{slots}, spark.task.cpus={task_cpus}",
            f"{wanted}, {each} (num_workers" + (", num_servers)" if servers else ")"),
            "more or larger executors, a smaller spark.task.cpus, or fewer workers"
            + (" or servers" if servers else ""),
        )  # fmt: skip
    return Check("slots", "ok", f"{slots}, spark.task.cpus={task_cpus}")


def check_allocation(setting: Setting, mode: str, master: str) -> Check:
    """Whether executors come and go, which a barrier stage does not bear (SPARK-24942)."""
    name = "spark.dynamicAllocation.enabled"
    on = (setting(name) or "false").lower() == "true"
    if not on or master == "local" or master.startswith("local["):
        return Check("dynamic allocation", "ok", "off")
    return Check(
        "dynamic allocation", "error" if mode == "allreduce" else "warning", f"{name}=true",
        f"{name}=false for mode='allreduce', run and HorovodRunner (SPARK-24942)",
        "the modes with a server work with it",
    )  # fmt: skip


def check_settings(setting: Setting, config: FitConfig, master: str, tasks: int) -> list[Check]:
    """Memory outside of the executor's Java, and the size of Arrow batches."""
    checks = []
    if master.startswith(("yarn", "k8s")):
        checks.append(_check_overhead(setting, config, tasks))
    limit = setting("spark.executor.pyspark.memory")
    if limit and megabytes(limit) < tasks * WORKER_MB:
        checks.append(Check(
            "pyspark memory", "error", f"spark.executor.pyspark.memory={limit}",
            f"at least {tasks * WORKER_MB}m for {tasks} tasks of an executor, or not set",
            "it bounds the address space of a worker; a framework reserves much of that",
        ))  # fmt: skip
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    rows = int(setting(name) or 10_000)
    found = Check("arrow", "ok", f"{name}={rows}")
    if 0 < rows < 100:
        found = replace(found, status="warning", expected="some thousands of rows", hint="unset it")
    return [*checks, found]


def _check_overhead(setting: Setting, config: FitConfig, tasks: int) -> Check:
    overhead = resources.overhead_given(setting)
    needed = tasks * WORKER_MB
    budget = config.limits.memory_budget_mb
    advised = resources.overhead_advised(tasks, budget)
    found = f"{overhead} MiB for {tasks} Python worker{'' if tasks == 1 else 's'}"
    if overhead < needed:
        return Check(
            "memory overhead", "error", found,
            f"{needed} MiB or more: Python workers are no part of spark.executor.memory",
            f"spark.executor.memoryOverhead={advised}m "
            f"({WORKER_MB} MiB and memory_budget_mb={budget} for each task)",
        )  # fmt: skip
    if overhead < advised:
        smaller = max(1, overhead // tasks - WORKER_MB)
        return Check(
            "memory overhead", "warning", found,
            f"{advised} MiB: for each task {WORKER_MB} MiB, and of its partition up to "
            f"memory_budget_mb={budget}",
            f"spark.executor.memoryOverhead={advised}m, or Limits(memory_budget_mb={smaller})",
        )  # fmt: skip
    return Check("memory overhead", "ok", found)


def check_connect(config: FitConfig, unreached: ResourceError | None) -> Check:
    """The checks of what a Spark Connect client is refused."""
    always = "RDDs, sparkdl.mllib, fit_stream and run(data=<a stream>) are refused"
    if unreached is None:
        return Check("connect", "ok", always)
    return Check(
        "connect", "error" if config.with_server else "warning",
        f"{unreached.received}; {always}, and so are the modes with a server", unreached.expected,
        unreached.hint,
    )  # fmt: skip


def check_probe(
    answers: Sequence[Answer], start_s: float, timeout_s: float, *, with_server: bool = False
) -> list[Check]:
    """The findings of the ranks of the common probe.

    Args:
        with_server: Whether ranks train through a server, and need no connections to each other.
    """
    found = f"{len(answers)} tasks ran at the same time, after {start_s:.1f} s"
    checks = [Check("barrier", "ok", found)]
    if start_s > timeout_s:
        expected, hint = f"within {timeout_s:g} s", "slots may be in use by other jobs"
        checks = [Check("barrier", "warning", found, expected, hint)]
    to_driver = {a.rank: a.driver for a in answers if a.driver is not None}
    if to_driver:
        hint = (
            "open this port in the firewall; name a range with Network(port='7000-7010'), another "
            "address with Network(server_address=...); mode='allreduce' needs the ranks only"
        )
        expected = "every executor connects to the driver"
        checks.append(_check_links("driver port", to_driver, expected, hint))
        checks.append(_check_clocks(to_driver))
    between = {(a.rank, other): link for a in answers for other, link in a.ranks.items()}
    if between:
        hint = (
            "open all ports between the executors' machines, or a range with "
            "Network(worker_port=...), for mode='allreduce' and run; the modes with a server need "
            "none"
        )
        check = _check_links("between ranks", between, "executors connect to each other", hint)
        broken = check.status == "error"
        checks.append(replace(check, status="warning") if broken and with_server else check)
    return checks


def _check_links(
    name: str, links: Mapping[int, Link] | Mapping[tuple[int, int], Link], expected: str, hint: str
) -> Check:
    failed = [
        f"rank {_arrow(key)}: {link.target}: {link.problem}"
        for key, link in links.items()
        if link.problem
    ]
    if failed:
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        return Check(name, "error", "; ".join(failed[:3]) + more, expected, hint)
    trip = max(link.round_trip_s for link in links.values())
    rates = [link.rate for link in links.values() if link.rate]
    found = f"{len(links)} connections, round trip {trip * 1e3:.2f} ms"
    if rates:
        found += f", {min(rates) / 1e6:.0f} MB/s or more"
    if rates and min(rates) < SLOW_RATE:
        return Check(
            name, "warning", found, f"{SLOW_RATE / 1e6:.0f} MB/s",
            "exchange less often (frequency=), or compression='int8'",
        )  # fmt: skip
    return Check(name, "ok", found)


def _arrow(key: int | tuple[int, int]) -> str:
    return str(key) if isinstance(key, int) else f"{key[0]} -> {key[1]}"


def _check_clocks(links: Mapping[int, Link]) -> Check:
    reached = [link for link in links.values() if not link.problem]
    if not reached:
        return Check("clocks", "ok", "not compared: no connection")
    skew = max(abs(link.skew_s) for link in reached)
    if skew > MOST_SKEW_S:
        return Check(
            "clocks", "warning", f"apart by {skew:.1f} s", f"at most {MOST_SKEW_S:g} s",
            "synchronize them (chrony, NTP): time lines and logs are hard to read",
        )  # fmt: skip
    return Check("clocks", "ok", f"apart by {skew * 1e3:.0f} ms at most")


def check_gpus(
    answers: Sequence[Answer], asked: str, seen: Mapping[str, int | None], backend: str
) -> Check:
    """Whether Spark gives GPUs to tasks where there are some."""
    given = [len(answer.gpus) for answer in answers]
    there = max((count or 0 for count in seen.values()), default=0)
    if any(given):
        broken = [name for name, count in seen.items() if not count]
        if broken:
            return Check(
                "gpus", "error", f"Spark gives GPUs, and {broken[0]} has no working one",
                "NVIDIA's driver where Spark gives GPUs", "run nvidia-smi there",
            )  # fmt: skip
        blind = [a for a in answers if a.seen_gpus is not None and a.seen_gpus < len(a.gpus)]
        if blind:
            return Check(
                "gpus", "error",
                f"{backend} sees {blind[0].seen_gpus} of the {len(blind[0].gpus)} GPUs of rank "
                f"{blind[0].rank} on {blind[0].host}",
                "the framework's build for CUDA, and a driver that is new enough",
                f"pip install 'tensorflow[and-cuda]' (or its like for {backend}) on the executors",
            )  # fmt: skip
        return Check("gpus", "ok", f"{min(given)} for each task")
    if there:
        return Check(
            "gpus", "warning", f"{there} on a machine, none given to tasks",
            "spark.executor.resource.gpu.amount and spark.task.resource.gpu.amount",
            "set them and a discovery script; training would run on the CPU",
        )  # fmt: skip
    return Check("gpus", "ok", "none" if not asked else f"none, although {asked} is asked for")
