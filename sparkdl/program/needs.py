"""The resources that the groups of a program ask for, in the words of their launcher."""

from __future__ import annotations

from sparkdl.errors import ConfigError, ResourceError
from sparkdl.launch.devices import DeviceRequest, visible_gpus
from sparkdl.program.nodes import Program

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
)  # fmt: skip


def environments_of(program: Program) -> list[dict[str, str]]:
    """The variables of each node's process: its threads, and its share of this machine's GPUs.

    Raises:
        ResourceError: The nodes ask for more GPUs than this process sees.
    """
    asked = sum(placed.needs.gpus for placed in program.placed)
    gpus = visible_gpus() if asked else []
    if asked > len(gpus):
        raise ResourceError(
            f"program {program.name!r} asks for GPUs that are not there",
            expected=f"{asked} GPUs on this machine",
            received=f"{len(gpus)}" + (f": {', '.join(gpus)}" if gpus else ""),
            hint="fewer nodes, gpus=0, or launch_type='spark' on a cluster that has them",
        )
    environments = []
    for placed in program.placed:
        cores, count = placed.needs.cores, placed.needs.gpus
        environment = dict.fromkeys(_THREAD_VARIABLES, str(cores)) if cores else {}
        if asked:
            mine, gpus = gpus[:count], gpus[count:]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine) or "-1"
        environments.append(environment)
    return environments


def task_resources(program: Program) -> dict[str, float] | None:
    """The request of each task of Spark's stage: the most that any group does; None: nothing."""
    cores = max(placed.needs.cores for placed in program.placed)
    gpus = max(placed.needs.gpus for placed in program.placed)
    resources: dict[str, float] = {}
    if cores or gpus:
        resources["cpus"] = max(cores, 1)
    if gpus:
        resources["gpu"] = gpus
    return resources or None


def device_request(program: Program) -> DeviceRequest:
    """The devices of a node: of the GPUs of its task as many as its group asks for.

    A task of Spark has as many as the group that asks for most. Where no group asks, a node sees
    the GPUs of its task, or those that its process sees.
    """
    gpus = tuple(placed.needs.gpus for placed in program.placed)
    return DeviceRequest(None, unscheduled=True, gpus_of_ranks=gpus if any(gpus) else ())


def refuse_restarts(program: Program) -> None:
    """Returns if no group has restarts.

    Raises:
        ConfigError: One has, and is to run in a launcher of the user's own.
    """
    for placed in program.placed:
        if placed.needs.restarts:
            raise ConfigError(
                f"a node of group {placed.label!r} cannot be started again with a launcher of your "
                "own",
                expected="restarts=0, or a launch_type without launcher",
                received=f"restarts={placed.needs.restarts}",
                hint="ThreadLauncher and ProcessLauncher take restarts themselves",
            )
