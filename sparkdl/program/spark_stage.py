"""The nodes of a program as the tasks of one barrier stage of Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from sparkdl.config import Limits
from sparkdl.coordinator.driver_client import CoordinatorHost
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import SparkDLError
from sparkdl.process.log_lines import show
from sparkdl.program.launching import Surroundings, task_resources
from sparkdl.program.nodes import Program
from sparkdl.settings.network import Network
from sparkdl.spark.runs import capacity, resources
from sparkdl.spark.runs.launcher import SparkLauncher
from sparkdl.spark.runs.resources import certificate_of, listening_address, rank_listening
from sparkdl.spark.session import running
from sparkdl.transport.address import ListenOptions


@contextmanager
def surroundings(program: Program, spark: Any, network: Network) -> Iterator[Surroundings]:
    """A barrier stage for a program, and a coordinator where its nodes meet.

    Args:
        program: The program; a slot is taken for each of its nodes.
        spark: The session; None: the active one.
        network: Where driver and nodes listen, and whether they encrypt.

    Raises:
        ConfigError: Groups ask for cores or GPUs, and the cluster cannot schedule by stage.
        ResourceError: Too few slots, dynamic allocation, or no free port; no job was started.
    """
    spark = spark if spark is not None else running.session_of()
    running.require_running(spark)
    count = len(program.placed)
    certificate = certificate_of(spark, network, pickles=True)
    bind, advertised = listening_address(spark, network)
    profile = resources.resource_profile(task_resources(program), spark)
    capacity.check_barrier(spark, count, profile=profile)
    with ExitStack() as stack:
        slots = capacity.count_slots(spark, profile)
        if slots is not None:
            pool = capacity.slot_pool(spark)
            stack.enter_context(pool.take(count, slots, "launch", Limits.start_timeout_s))
        listen = ListenOptions("socket", network.port, bind, advertised, web=False)
        settings = Settings(count, start_timeout_s=Limits.start_timeout_s)
        host = stack.enter_context(CoordinatorHost(settings, listen, certificate))

        def look() -> None:
            with suppress(SparkDLError):  # lines must not end a program
                for rank, line in host.driver.take_lines():
                    show(rank, line)

        yield Surroundings(
            SparkLauncher(
                spark.range(0, count, 1, count), count, barrier=True,
                description=f"sparkdl: program {program.name}", noun="barrier stage",
                profile=profile,
            ),
            bind, advertised, network.port, rank_listening(spark, network), certificate,
            host.endpoint, look,
        )  # fmt: skip
