"""``sparkdl.doctor``: looks at the driver, at every executor and at the ways between them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyspark

from sparkdl.config import FitConfig, Limits
from sparkdl.diagnosis import cluster_checks
from sparkdl.diagnosis.executors import Executor, Executors, Facts, ask_executors, own_facts
from sparkdl.diagnosis.host_checks import check_hosts
from sparkdl.diagnosis.network import Answer, Echo, ProbeTask
from sparkdl.diagnosis.report import Check, DoctorReport, worst
from sparkdl.errors import ResourceError, SparkDLError
from sparkdl.files.storage import check_writable, path_on_disk
from sparkdl.launch import interrupts
from sparkdl.launch.task import of_kind
from sparkdl.launch.threads import ThreadCall
from sparkdl.learner.framework import running_backend
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.network import Network
from sparkdl.settings.values import require_seconds
from sparkdl.spark.runs import capacity
from sparkdl.spark.runs.capacity import slot_pool
from sparkdl.spark.runs.launcher import SparkLauncher
from sparkdl.spark.runs.resources import listening_address, rank_listening
from sparkdl.spark.session import running
from sparkdl.spark.session.running import interpreter_of
from sparkdl.wire.proving import TOKEN_BYTES

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class ProbedFolder:
    """The findings of the driver.

    Args:
        problem: Why it cannot be written; empty if it can.
        marker: A file in it, where it is on this machine's disks; None elsewhere.
    """

    folder: str
    problem: str = ""
    marker: str | None = None


@contextlib.contextmanager
def probed(folder: str | None, timeout_s: float) -> Iterator[ProbedFolder | None]:
    """Writes a file to a folder, and deletes it; on this machine's disks it stays to the end."""
    if folder is None:
        yield None
        return
    written = ThreadCall(lambda: _write(folder), "sparkdl-doctor").outcome
    silent = ProbedFolder(folder, f"no answer within {timeout_s:g} s")
    try:
        yield written.result() if wait([written], timeout_s).done else silent
    finally:
        written.add_done_callback(_clear)  # now, or when it is written


def _clear(written: Future[ProbedFolder]) -> None:
    if (marker := written.result().marker) is not None:
        with contextlib.suppress(OSError):
            os.unlink(marker)


def _write(folder: str) -> ProbedFolder:
    try:
        check_writable(f"{folder.rstrip('/')}/probe")
        here = path_on_disk(folder)
        if here is None:
            return ProbedFolder(folder)
        marker = os.path.join(here, f".sparkdl-doctor-{secrets.token_hex(8)}")
        with open(marker, "x"):
            return ProbedFolder(folder, marker=marker)
    except Exception as error:
        said = error.received or error.what if isinstance(error, SparkDLError) else str(error)
        return ProbedFolder(folder, said)


def check_checkpoints(
    probe: ProbedFolder, executors: Mapping[str, Facts], in_cluster: bool
) -> Check:
    """Whether checkpoints can be written, and found again by another driver."""
    if probe.problem:
        return Check(
            "checkpoints", "error", f"{probe.folder!r}: {probe.problem}",
            "a folder that the driver can write to",
            "another checkpoint_dir, or its permissions and quota",
        )  # fmt: skip
    blind = [name for name, facts in executors.items() if facts.get("found") is False]
    if blind and in_cluster:
        return Check(
            "checkpoints", "warning",
            f"{probe.folder!r} is on the driver's disk: {blind[0]} does not see it",
            "a folder that every machine sees: the driver's next attempt may be on another one",
            "checkpoint_dir='hdfs:///...' or another common file system",
        )  # fmt: skip
    where = ", on the driver's disk" if blind else ""
    return Check("checkpoints", "ok", f"{probe.folder!r} is writable{where}")


def spark_version() -> str:
    """PySpark's version, and that of the Spark in ``SPARK_HOME`` where it is another one.

    >>> spark_version()  # doctest: +SKIP
    '4.3.0'
    """
    own = str(pyspark.__version__)
    home = os.environ.get("SPARK_HOME", "")
    try:
        with open(os.path.join(home, "RELEASE")) as file:
            found = re.match(r"Spark (\S+)", file.readline())
    except OSError:
        return own
    other = found[1] if found else own
    return own if other == own else f"{own}, in SPARK_HOME {other}"


def java_version(timeout_s: float = 30.0) -> str | None:
    """The version of the Java that Spark would start; None where there is none."""
    home = os.environ.get("JAVA_HOME", "")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if not java:
        return None
    try:
        ran = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"none: {java} -version: {error}"
    lines = [line for line in ran.stderr.splitlines() if "version" in line]
    found = re.search(r'version "([^"]+)"', lines[0]) if lines else None
    return found[1] if found else None


@lists_its_arguments
@interrupts.heard()
def doctor(
    spark: object = None,
    *,
    mode: str = "asynchronous",
    num_workers: int | None = None,
    network: Network = Network(),
    limits: Limits = Limits(),
    checkpoint_dir: str | None = None,
    model: keras.Model | None = None,
    timeout_s: float = 10.0,
) -> DoctorReport:
    """Checks whether this cluster can train, and says what to do where it cannot.

    It looks at the driver, at every executor and at the connections between them: versions,
    packages, slots, ports, addresses, memory, disks, GPUs, clocks. It starts two small Spark jobs
    and changes nothing. A probe that hangs is given up and named.

    Args:
        spark: The session; None: the active one.
        mode: As for :class:`sparkdl.SparkModel`, like the next three.
        num_workers: Workers that must run at the same time; None: one.
        network: Where the driver and, for ``'allreduce'`` and ``run``, the ranks listen.
        limits: ``memory_budget_mb`` is what stays in memory of a worker's partition.
        checkpoint_dir: A folder that must be writable (any file system), or None.
        model: A compiled model that is to be trained: whether its weights, its optimizer's state
            and the rows of its tables fit into memory; None: nobody asks.
        timeout_s: Limit for one probe, in seconds; for all together about five times that. The
            tasks that run at the same time have it twice: to begin, and to connect.

    Returns:
        A report: ``print`` shows lines, a notebook a table; ``report.status`` is the worst of
        ``'ok'``, ``'warning'`` and ``'error'``; ``report.checks`` and ``report.to_dict()`` have
        the details.

    Raises:
        ConfigError: A wrong argument.
        ModelError: The model is not compiled, or not built.
        ResourceError: No session is running.

    >>> import sparkdl
    >>> sparkdl.doctor(spark)  # doctest: +SKIP
    ok       java                17.0.15
    ok       slots               2, spark.task.cpus=1
    ...
    """
    config = FitConfig(mode=mode, num_workers=num_workers, network=network, limits=limits)
    require_seconds("timeout_s", timeout_s)
    if model is not None:
        from sparkdl.learner.steps.keras_learner import require_compiled

        require_compiled(model)
    spark = spark if spark is not None else running.session_of()
    running.require_running(spark)
    began = time.monotonic()
    with probed(checkpoint_dir, timeout_s) as folder:
        examination = _Examination(spark, config, timeout_s, folder, model)
        examination.look()
        if folder is not None:
            examination.check_folder(folder)
    return DoctorReport(tuple(examination.checks), time.monotonic() - began)


def environment() -> dict[str, Any]:
    """This process' Python, packages and machine, as plain values.

    ``'packages'`` has versions by name (None where a package is missing), ``'spark'`` and
    ``'java'`` the versions that a session of this process would have, ``'memory'`` and ``'disk'``
    bytes, ``'cpus'`` the cores that this process may use. No session is needed.
    """
    facts = dict(own_facts("", timeout_s=60.0))
    return {"spark": spark_version(), "java": java_version(), **facts}


@dataclass
class _Examination:
    """One call of :func:`doctor`, check by check."""

    spark: Any
    config: FitConfig
    timeout_s: float
    folder: ProbedFolder | None = None
    model: keras.Model | None = None
    checks: list[Check] = field(default_factory=list)
    _facts: dict[str, Facts] = field(default_factory=dict)

    def look(self) -> None:
        """Makes all checks but that of the checkpoints."""
        master = self.setting("spark.master") or ""
        connect = running.is_connect(self.spark)
        task_cpus = int(self.setting("spark.task.cpus") or 1)
        java = None
        if not connect:
            system = self.spark.sparkContext._jvm.java.lang.System
            java = str(system.getProperty("java.version"))
        own = str(pyspark.__version__)
        self.checks += cluster_checks.check_versions(java, str(self.spark.version), own)
        self.checks.append(cluster_checks.check_allocation(self.setting, self.config.mode, master))
        slots = capacity.wait_for_slots(self.spark, self._expected_slots(master), self.timeout_s)
        if slots is None:
            slots = self._slots_over_connect()
        host = self.setting("spark.driver.host") or "127.0.0.1"
        self.checks.append(cluster_checks.check_slots(slots, self.config, task_cpus, host))
        cores = int(self.setting("spark.executor.cores") or task_cpus)
        tasks = max(1, cores // task_cpus)
        self.checks += cluster_checks.check_settings(self.setting, self.config, master, tasks)
        if slots < 1:
            return
        with contextlib.ExitStack() as stack:
            try:
                pool = slot_pool(self.spark)
                stack.enter_context(pool.take(slots, slots, "doctor", self.timeout_s))
            except ResourceError as error:
                self._add_error("slots in use", error)
                return
            echo = stack.enter_context(self._listening())
            if connect:
                answers = self._probe(slots, echo, with_facts=True)
                self._check_hosts(_executors_of(answers), cores)
                return
            found = ask_executors(
                self.spark, slots, self._driver_host(), self.timeout_s,
                self.folder.marker if self.folder else None,
            )  # fmt: skip
            self._facts = found.facts
            self._check_hosts(found, cores)
            if worst(c.status for c in self.checks if c.name in ("python", "packages")) == "error":
                why, hint = "not tried: tasks would fail", "first see to the errors above"
                self.checks.append(Check("barrier", "warning", why, hint=hint))
                return
            answers = self._probe(slots, echo, with_facts=False)
            if answers:
                asked = self.setting("spark.task.resource.gpu.amount") or ""
                seen = {name: facts["gpus"] for name, facts in found.facts.items()}
                self.checks.append(cluster_checks.check_gpus(answers, asked, seen, _backend()))

    def check_folder(self, folder: ProbedFolder) -> None:
        """Adds the check of the folder for checkpoints; to be called last."""
        in_cluster = self.setting("spark.submit.deployMode") == "cluster"
        in_pod = self.setting("spark.kubernetes.submitInDriver") == "true"
        self.checks.append(check_checkpoints(folder, self._facts, in_cluster or in_pod))

    def setting(self, name: str) -> str | None:
        """A setting of Spark; None where it is not set (or Connect does not tell)."""
        if not running.is_connect(self.spark):
            value = self.spark.sparkContext.getConf().get(name)
            if value is not None:
                return str(value)
        try:
            value = self.spark.conf.get(name, None)
        except Exception:  # Spark refuses to tell some of its settings
            return None
        return None if value is None else str(value)

    def _expected_slots(self, master: str) -> int:
        """Slots for which executors may still be starting."""
        if self.config.num_workers is not None:
            return self.config.num_workers + self.config.server_slots
        if master.startswith("local"):
            return 1 << 20  # wait_for_slots knows what a local master can start
        instances = int(self.setting("spark.executor.instances") or 1)
        cores = int(self.setting("spark.executor.cores") or 1)
        return max(1, instances * (cores // int(self.setting("spark.task.cpus") or 1)))

    def _slots_over_connect(self) -> int:
        """Slots as a small job finds them, which also makes executors start; 0 without an answer.

        A Connect client cannot count slots; into how many parts Spark cuts a range tells.
        """
        action = lambda: capacity.default_parallelism(self.spark)  # noqa: E731
        stage = capacity.SparkJob(self.spark, action, "sparkdl: doctor, slots")
        try:
            stage.start()
            stage.wait(self.timeout_s)
            return int(stage.result or 0)
        finally:
            stage.cancel(2.0)

    def _driver_host(self) -> str:
        host = self.setting("spark.driver.host") or "127.0.0.1"
        return self.config.network.server_address or host

    def _check_hosts(self, executors: Executors, cores: int) -> None:
        try:
            own = own_facts(self._driver_host(), self.timeout_s)
        except TimeoutError as error:
            self.checks.append(Check("driver", "error", str(error), "an answer"))
            return
        self.checks += check_hosts(own, executors, _backend(), cores, self._driver_host())
        if self.model is not None:
            from sparkdl.diagnosis.model_memory import check_model

            self.checks += check_model(self.model, self.config, own, executors.facts)

    def _add_error(self, name: str, error: SparkDLError) -> None:
        found = error.what + (f": {error.received}" if error.received else "")
        self.checks.append(Check(name, "error", found, error.expected, error.hint))

    @contextlib.contextmanager
    def _listening(self) -> Iterator[Echo | None]:
        """Listens where a run's server would listen; None, and a check, where that fails."""
        with contextlib.ExitStack() as stack:
            echo = problem = None
            try:
                bind, advertised = listening_address(self.spark, self.config.network)
                token = secrets.token_bytes(TOKEN_BYTES)
                echo = stack.enter_context(Echo(bind, self.config.network.port, token, advertised))
            except ResourceError as error:
                problem = error
            if running.is_connect(self.spark):
                self.checks.append(cluster_checks.check_connect(self.config, problem))
            elif problem is not None:
                self._add_error("driver port", problem)
            yield echo

    def _probe(self, slots: int, echo: Echo | None, *, with_facts: bool) -> list[Answer]:
        """Runs the probe in all slots at the same time, and adds its checks."""
        dynamic = any(c.name == "dynamic allocation" and c.status != "ok" for c in self.checks)
        token = echo.token if echo is not None else secrets.token_bytes(TOKEN_BYTES)
        address = echo.address if echo else None
        listening = rank_listening(self.spark, self.config.network)
        task = ProbeTask(address, token, self.timeout_s, _backend(), with_facts, listening)
        began = time.monotonic()
        with interrupts.CleanStack() as stack:
            launcher = SparkLauncher(
                self.spark.range(0, slots, 1, slots), slots, barrier=not dynamic,
                description="sparkdl: doctor, connections", noun="barrier stage",
            )  # fmt: skip
            ranks = stack.begin(launcher.launch(task))
            if not self._wait(ranks.wait):
                silent = sorted(set(range(slots)) - (echo.callers if echo else set()))
                self.checks.append(Check(
                    "barrier", "error", f"no answer within {2 * self.timeout_s:g} s from ranks "
                    f"{', '.join(map(str, silent)) or '(all have begun)'}",
                    f"{slots} tasks that run at the same time and end",
                    "are the slots free? Look at the executors' logs on Spark's page; on a busy "
                    "cluster timeout_s= gives more time",
                ))  # fmt: skip
                return []
            try:
                results = of_kind(ranks.results(), "probe")
            except SparkDLError as error:
                self._add_error("barrier", error)
                return []
        took_s = time.monotonic() - began
        answers = [Answer.from_json(result.text) for result in results.values()]
        start_s = max(0.0, took_s - max(answer.ran_s for answer in answers))
        self.checks += cluster_checks.check_probe(
            answers, start_s, self.timeout_s, with_server=self.config.with_server
        )
        return answers

    def _wait(self, wait: Callable[[float], bool]) -> bool:
        """Waits for the stage's end, and hears interrupts meanwhile; False if it takes too long."""
        deadline = time.monotonic() + 2 * self.timeout_s
        while time.monotonic() < deadline:
            if wait(0.1):
                return True
            interrupts.check()
        return False


def _executors_of(answers: list[Answer]) -> Executors:
    answered = tuple(
        Executor(f"rank {a.rank}@{a.host}", str(a.facts["python"]), a.facts)
        for a in answers
        if a.facts is not None
    )
    problem = "" if answered else "see the check 'barrier'"
    return Executors(answered, len(answered), interpreter_of(None), problem)


def _backend() -> str:
    """The Keras backend that this process has or would choose."""
    running = running_backend()
    if running is not None:
        return running
    chosen = os.environ.get("KERAS_BACKEND")
    if chosen is None:
        home = os.environ.get("KERAS_HOME", os.path.join(os.path.expanduser("~"), ".keras"))
        with (
            contextlib.suppress(OSError, ValueError),
            open(os.path.join(home, "keras.json")) as file,
        ):
            chosen = json.load(file).get("backend")
    return chosen or "tensorflow"
