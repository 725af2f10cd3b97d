"""The facts of every executor, also of those whose Python cannot run a function of ours.

Spark's executors run Python functions only where Python and its packages are in order. So the
executors' Java processes start the program :mod:`host_facts` themselves (``RDD.pipe``), with the
interpreter that they would start for a task.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

from sparkdl.diagnosis import host_facts
from sparkdl.launch.threads import ThreadCall
from sparkdl.spark.runs.capacity import SparkJob
from sparkdl.spark.session.running import this_interpreter

Facts = Mapping[str, Any]
"""The result of :func:`host_facts.collect`."""
_SCRIPT = """\
limit=$(command -v timeout >/dev/null 2>&1 && echo "timeout $4")
host=$(cat /proc/sys/kernel/hostname 2>/dev/null || hostname)
echo "#executor $PPID $host $($limit "$1" --version 2>&1 | head -n 1)"
$limit "$1" -c "$2" "$3" 2>&1 || echo "#failed $?"
sleep 0.3
"""
"""Never fails, so that Spark does not try elsewhere again. ``$PPID`` is the executor's process; the
short sleep leaves a second task for another executor."""


@dataclass(frozen=True)
class Executor:
    """One executor that answered.

    Args:
        name: Its process and host, e.g. ``'4711@node3'``.
        version: What ``python --version`` printed there.
        facts: Facts of its Python; None where the program failed.
        output: The end of what the program printed where it failed.
    """

    name: str
    version: str
    facts: Facts | None
    output: str = ""


@dataclass(frozen=True)
class Executors:
    """The answers of all executors.

    Args:
        answered: One for each executor that answered.
        known: How many executors Spark has.
        interpreter: The Python that they were to start.
        problem: Why the job gave no answers; empty if it gave some.
    """

    answered: tuple[Executor, ...]
    known: int
    interpreter: str
    problem: str = ""

    @property
    def facts(self) -> dict[str, Facts]:
        """Name -> facts of the executors whose Python ran the program."""
        return {e.name: e.facts for e in self.answered if e.facts is not None}


def ask_executors(
    spark: Any, slots: int, resolve: str, timeout_s: float, marker: str | None = None
) -> Executors:
    """Runs :mod:`host_facts` on every executor of a classic session."""
    context = spark.sparkContext
    # those that are registered now; a local master is one by itself
    known = max(1, len(context._jsc.sc().statusTracker().getExecutorInfos()) - 1)
    with this_interpreter(context):
        interpreter = str(context.pythonExec)
    options = {"resolve": resolve, "folders": _shipped_folders(context), "marker": marker}
    command = [
        "sh", "-c", _SCRIPT, "sparkdl-doctor", interpreter, inspect.getsource(host_facts),
        json.dumps(options), str(max(1, int(timeout_s - 1))),
    ]  # fmt: skip
    environment = {str(k): str(v) for k, v in dict(context.environment).items()}

    def ask() -> list[str]:
        tasks = max(slots, known)
        pipe = context._jsc.parallelize(list(range(tasks)), tasks).pipe(command, environment)
        return [str(line) for line in pipe.collect()]

    deadline = time.monotonic() + timeout_s
    found: dict[str, Executor] = {}
    problem = ""
    while len(found) < known and not problem and time.monotonic() < deadline:
        stage = SparkJob(spark, ask, "sparkdl: doctor, facts")
        try:
            stage.start()
            stage.wait(max(0.0, deadline - time.monotonic()))
            if stage.error is not None:
                problem = str(stage.error).splitlines()[0]
            elif stage.running:
                problem = f"no answer within {timeout_s:g} s"
            else:
                found.update({e.name: e for e in parse_answers(stage.result)})
        finally:
            stage.cancel(2.0)
    return Executors(tuple(found.values()), known, interpreter, "" if found else problem)


def parse_answers(lines: list[str]) -> list[Executor]:
    """The executors that lines of the program's output tell of; one for each process.

    >>> [e.name for e in parse_answers(['#executor 7 node1 Python 3.11.7', '#failed 127'])]
    ['7@node1']
    """
    found: dict[str, Executor] = {}
    name = version = ""
    rest: list[str] = []
    for line in lines:
        if line.startswith("#executor "):
            _, process, host, version = [*line.split(" ", 3), "", ""][:4]
            name, rest = f"{process}@{host}", []
        elif line.startswith("#facts "):
            found[name] = Executor(name, version, json.loads(line[len("#facts ") :]))
        elif line.startswith("#failed"):
            code = line.partition(" ")[2]
            output = "\n".join(rest)[-1000:] or f"exit status {code}"
            if code == "124":
                output = "no answer: it hangs"
            found.setdefault(name, Executor(name, version, None, output))
        elif name:
            rest.append(line)
    return list(found.values())


def own_facts(resolve: str, timeout_s: float) -> Facts:
    """The facts of this process; of what takes longer than the limit, nothing."""
    asked = ThreadCall(lambda: host_facts.collect({"resolve": resolve}), "sparkdl-doctor").outcome
    if not wait([asked], timeout_s).done:
        raise TimeoutError(f"the driver's machine did not tell its facts within {timeout_s:g} s")
    facts: Facts = asked.result()
    return facts


def _shipped_folders(context: Any) -> list[str]:
    root = "."
    if str(context.master).startswith("local") and not str(context.master).startswith("local-"):
        root = str(context._jvm.org.apache.spark.SparkFiles.getRootDirectory())
    return [root, *(os.path.join(root, str(name)) for name in context._python_includes)]
