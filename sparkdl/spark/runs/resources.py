"""The demands of tasks on executors (stage-level scheduling, memory), and where ranks listen.

Memory of the Python workers is no part of an executor's Java memory.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sparkdl.config import Limits
from sparkdl.errors import ConfigError, ResourceError
from sparkdl.settings.network import Network, RankListening
from sparkdl.spark.session.running import is_connect, is_local
from sparkdl.spark.session.spark_errors import heap_full, java_message, memory_exceeded
from sparkdl.wire.tls import Certificate

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession


def resource_profile(
    resources: Mapping[str, float] | None, spark: SparkSession
) -> ResourceProfile | None:
    """Spark's profile of these resources; None for the application's own.

    Only tasks ask for more, so the executors stay: it works on YARN, Kubernetes, standalone and
    ``local-cluster`` without dynamic allocation (SPARK-43912, Spark 3.5), and through Connect to
    them.

    Args:
        resources: Resources of one task: ``'cpus'``, ``'gpu'`` or another resource -> amount.

    Raises:
        ConfigError: The cluster manager cannot schedule by stage.
    """
    if resources is None:
        return None
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    requests = TaskResourceRequests()
    if "cpus" not in resources:  # Spark cannot count the slots of a barrier stage without
        requests.cpus(int(spark.conf.get("spark.task.cpus", "1")))
    for name, amount in resources.items():
        if name == "cpus":
            requests.cpus(amount)
        else:
            requests.resource(name, amount)
    profile: ResourceProfile = ResourceProfileBuilder().require(requests).build
    try:
        if is_connect(spark):
            _ = profile.id  # registers it with the server: in this thread, whose session is active
        else:
            spark.sparkContext._jsc.sc().resourceProfileManager().addResourceProfile(
                profile._java_resource_profile
            )
    except Exception as error:
        raise ConfigError(
            "resources cannot be asked for by the training stage alone on this cluster",
            expected="YARN, Kubernetes, standalone or local-cluster, and amounts that an executor "
            "has",
            received=f"resources={dict(resources)!r}, master {spark.conf.get('spark.master', '')!r}"
            f": {java_message(error)[:300]}",
            hint="spark.task.cpus and spark.task.resource.gpu.amount are for all stages",
        ) from error
    return profile


Setting = Callable[[str], str | None]
"""Name -> value of a setting of Spark; None where it is not set."""
WORKER_MB = 1536
"""Memory of a Python worker with a framework and a small model."""


def overhead_given(setting: Setting) -> int:
    """The memory of an executor's container beside its Java memory, in MiB."""
    given = setting("spark.executor.memoryOverhead")
    if given:
        return megabytes(given)
    heap = megabytes(setting("spark.executor.memory") or "1g")
    return max(384, int(heap * float(setting("spark.executor.memoryOverheadFactor") or 0.1)))


def overhead_advised(tasks: int, memory_budget_mb: int) -> int:
    """The value to set ``spark.executor.memoryOverhead`` to, in MiB.

    Args:
        tasks: Tasks that an executor runs at the same time.
        memory_budget_mb: The memory budget of each.
    """
    return tasks * (WORKER_MB + memory_budget_mb)


def memory_hint(reason: str, setting: Setting) -> str | None:
    """The hint about a container or an executor that ended for its memory; None if none did."""
    if heap_full(reason):
        return (
            "an executor's Java memory was full in each try of a task: spark.executor.memory="
            f"{setting('spark.executor.memory') or '1g'} is too little for the rows that Spark "
            "computes there; ask for more, or for more partitions, or look for a very large row"
        )
    used = memory_exceeded(reason)
    if used is None:
        return None
    cores, cpus = (int(setting(f"spark.{name}") or 1) for name in ("executor.cores", "task.cpus"))
    tasks = max(1, cores // cpus)
    given = overhead_given(setting)
    # with at least the advised amount the model or the batches are larger than that allows for
    budget = Limits.memory_budget_mb  # the default; this stage's own is not known here
    wanted = max(overhead_advised(tasks, budget), math.ceil(given * 1.5 / 256) * 256)
    return (
        f"a container exceeded its memory{f' ({used})' if used else ''}: Python workers "
        "are no part of spark.executor.memory but of the overhead, which was "
        f"{given} MiB for {tasks} task{'' if tasks == 1 else 's'}; ask for "
        f"--conf spark.executor.memoryOverhead={wanted}m, or take smaller batches, or a smaller "
        "memory_budget_mb"
    )


def megabytes(size: str) -> int:
    """A size as Spark writes it, in MiB; a bare number is one of MiB.

    >>> megabytes('2g'), megabytes('512m'), megabytes('384')
    (2048, 512, 384)
    """
    text = size.strip().lower().removesuffix("b")
    factor = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1 << 20}.get(text[-1:])
    return math.floor(float(text[:-1]) * factor) if factor else int(text)


_SPARK_ENCRYPTS = ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled")
"""Either of Spark's settings encrypts what driver and executors tell each other."""


def driver_address(spark: SparkSession) -> tuple[str, str]:
    """``(bind, advertised)`` addresses for a server on the driver: the narrowest that works.

    Raises:
        ResourceError: This is a Spark Connect client, and Spark's driver is another machine.
    """
    if is_local(spark):
        return "127.0.0.1", "127.0.0.1"
    host = str(spark.conf.get("spark.driver.host", "127.0.0.1"))
    bind = str(spark.conf.get("spark.driver.bindAddress", host))
    if is_connect(spark) and not _can_bind(bind):
        raise ResourceError(
            "the parameter server runs here, and executors are not known to reach this client",
            expected="a session on the cluster's driver, or a Network with server_bind and "
            "server_address",
            received=f"a Spark Connect client; Spark's driver is {host}",
            hint="mode='allreduce' works from here; or network=Network(server_bind=..., "
            "server_address=<an address of this machine that executors reach>)",
        )
    return bind, host


def listening_address(spark: SparkSession, network: Network) -> tuple[str, str | None]:
    """``(bind, advertised)`` addresses of a run's server: the user's, or :func:`driver_address`."""
    if network.server_bind is not None:
        return network.server_bind, network.server_address
    bind, reachable = driver_address(spark)
    return bind, network.server_address or reachable


def rank_listening(spark: SparkSession, network: Network) -> RankListening:
    """The addresses at which the ranks of a run listen for each other: as few as works."""
    bind, port = network.worker_bind, network.worker_port
    if bind not in (None, "0.0.0.0", "::"):
        return RankListening(bind, port)
    if is_local(spark):
        return RankListening(bind or "127.0.0.1", port, "127.0.0.1")
    return RankListening(bind, port, str(spark.conf.get("spark.driver.host", "") or ""))


def certificate_of(
    spark: SparkSession, network: Network, *, pickles: bool = False
) -> Certificate | None:
    """A certificate for a new run, if what the run sends between hosts is to be encrypted.

    ``encrypt='auto'`` encrypts nothing with a local master. On a cluster it does as Spark does with
    its own traffic, by which the run's secret reaches the executors; and what is unpickled where it
    arrives is always encrypted.

    Args:
        pickles: Whether ranks unpickle what others send them, as nodes of a program do.

    Raises:
        ConfigError: None can be made here.
    """
    return Certificate.make() if is_encrypted(spark, network, pickles=pickles) else None


def is_encrypted(spark: SparkSession, network: Network, *, pickles: bool = False) -> bool:
    """Whether what a run sends between hosts is encrypted; see :func:`certificate_of`."""
    if network.encrypt != "auto":
        return network.encrypt
    settings = (str(spark.conf.get(name, "false")).lower() for name in _SPARK_ENCRYPTS)
    return not is_local(spark) and (pickles or "true" in settings)


def _can_bind(host: str) -> bool:
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
            return True
    return False
