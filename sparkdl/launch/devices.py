"""On which devices a task runs, and how its framework is made to see those and no others.

The executor's scheduler hands out addresses of GPUs as strings (indices, UUIDs, MIG names). They
are made visible through ``CUDA_VISIBLE_DEVICES`` before the framework is imported. A framework
keeps the devices that it saw first, and Spark uses its Python workers again: a later task that
needs other devices, or another Keras backend, must run in a new child process;
:func:`needs_child` says so.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from sparkdl.config import UseGpu
from sparkdl.errors import ResourceError
from sparkdl.learner.framework import lean_import, running_backend, start_backend
from sparkdl.process.closing import environment, set_variable
from sparkdl.process.host_load import ask_nvidia
from sparkdl.process.start_lines import start_lines_held

_FRAMEWORKS = ("tensorflow", "jax", "torch")
_started = False
"""Whether :func:`start_framework` has started this process' framework."""
_seen: tuple[str, ...] | None = None
"""The GPUs that this process' framework saw when it was imported; None: no import is known."""


@dataclass(frozen=True)
class Resources:
    """The devices that a scheduler gave to a rank.

    Args:
        gpus: Addresses of GPUs; empty where it gave none or schedules none.
        cores: CPU cores; 0: those of the machine.
    """

    gpus: tuple[str, ...] = ()
    cores: int = 0


@dataclass(frozen=True)
class Placement:
    """The devices that a task runs on.

    Args:
        gpus: The only GPUs that are seen, by address, empty for the CPU; None: those that the
            process sees anyway.
    """

    backend: str | None
    gpus: tuple[str, ...] | None
    cores: int = 1
    own_process: bool = False


@dataclass(frozen=True)
class DeviceRequest:
    """The devices that a task must run on, as far as the driver knows.

    Args:
        unscheduled: With ``'auto'`` and where no GPU is scheduled: whether the task sees the GPUs
            that the process sees anyway (a user's function), or none (a model).
        own_process: The task runs in a new process, which ends with it: a framework that connects
            the ranks itself learns of them when it starts, and stays connected.
        gpus_of_ranks: How many of the GPUs that are scheduled each rank sees; empty: all.
    """

    backend: str | None
    use_gpu: UseGpu = "auto"
    unscheduled: bool = False
    own_process: bool = False
    gpus_of_ranks: tuple[int, ...] = ()

    def place(self, resources: Resources, rank: int = 0) -> Placement:
        """The placement, given what the scheduler gave.

        Raises:
            ResourceError: ``use_gpu=True``, and the scheduler gave no GPU.
        """
        gpus: tuple[str, ...] | None = resources.gpus
        if self.use_gpu is False:
            gpus = ()
        elif not gpus and self.use_gpu is True:
            raise ResourceError(
                "this task was given no GPU",
                expected="a 'gpu' resource from Spark's scheduler",
                received="no such resource",
                hint="set spark.executor.resource.gpu.amount, spark.task.resource.gpu.amount and "
                "a discovery script, or use_gpu='auto'",
            )
        elif not gpus and self.unscheduled:
            gpus = None
        elif gpus and self.gpus_of_ranks:
            gpus = gpus[: self.gpus_of_ranks[rank]]
        cores = resources.cores or os.cpu_count() or 1
        return Placement(self.backend, gpus, cores, self.own_process)


def needs_child(placement: Placement) -> bool:
    """Whether a task cannot run in this process.

    It needs one of its own, or a framework runs here with other GPUs or another Keras backend.
    """
    if placement.own_process:
        return True
    if placement.backend is not None and running_backend() not in (None, placement.backend):
        return True
    if placement.gpus is None:  # only a process that must not see the machine's GPUs does not do
        return _seen == () and os.path.exists("/dev/nvidiactl")
    if _seen is None:  # what code of the user's imported may see any GPU
        return bool(placement.gpus) and _is_imported(placement.backend)
    return _seen != placement.gpus


def start_framework(placement: Placement) -> None:
    """Imports Keras on the placement's backend; it sees the placement's devices and no others.

    The environment is as before when this returns.

    Raises:
        ResourceError: Keras runs on another backend.
    """
    global _seen, _started
    if _started:
        return
    gpus = placement.gpus or ()
    with (
        environment(
            KERAS_BACKEND=placement.backend,
            CUDA_VISIBLE_DEVICES=",".join(gpus) or "-1",
            TF_CPP_MIN_LOG_LEVEL=os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
            TF_ENABLE_ONEDNN_OPTS=os.environ.get("TF_ENABLE_ONEDNN_OPTS"),
            JAX_PLATFORMS=os.environ.get("JAX_PLATFORMS", None if gpus else "cpu"),
            # Else JAX takes three quarters of a GPU at once, and two workers cannot share one.
            XLA_PYTHON_CLIENT_PREALLOCATE=os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
        ),
        lean_import(placement.backend),
        start_lines_held(),
    ):
        start_backend(placement.backend, placement.cores)
    _started, _seen = True, gpus


@contextlib.contextmanager
def function_environment(placement: Placement) -> Iterator[None]:
    """The environment in which a user's function imports its framework; all of it is restored."""
    global _seen
    before, had_framework = dict(os.environ), _is_imported(None)
    gpus = placement.gpus
    try:
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus) or "-1"
        if placement.backend is not None:
            os.environ["KERAS_BACKEND"] = placement.backend
        yield
    finally:
        for name in {*os.environ, *before}:
            if os.environ.get(name) != before.get(name):
                set_variable(name, before.get(name))
        if gpus is not None and not had_framework and _is_imported(None):
            _seen = gpus


def visible_gpus() -> list[str]:
    """The GPUs that a framework would see here, as ``CUDA_VISIBLE_DEVICES`` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number in range(len(machine_gpus()))]


def machine_gpus() -> list[str]:
    """UUIDs of this machine's GPUs in their order, as NVIDIA's driver lists them."""
    lines = [line for line in ask_nvidia("-L") if line.startswith("GPU ")]
    return [line.rpartition("UUID: ")[2].rstrip(")") for line in lines]


def busy_gpus() -> set[str]:
    """UUIDs of this machine's GPUs on which a process computes."""
    asked = ask_nvidia("--query-compute-apps=gpu_uuid", "--format=csv,noheader")
    return {line.strip() for line in asked if line.strip()}


def _is_imported(backend: str | None) -> bool:
    """Whether this process has imported a backend's framework; with None, any."""
    frameworks = _FRAMEWORKS if backend is None else (backend,)
    return any(framework in sys.modules for framework in frameworks)
