"""Which devices a task may use, and making the framework see those and no others.

The executor's scheduler hands out GPU addresses (``TaskContext.resources()``); they are strings
(indices, UUIDs, MIG names). They are made visible through ``CUDA_VISIBLE_DEVICES`` before the
framework is imported. A framework keeps what it saw first, and Spark reuses Python workers: when
a later task in the same process needs other devices (or another backend), it must run in a fresh
child process. ``needs_child`` says so.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparkdl.config import UseGpu
from sparkdl.errors import ResourceError

_FRAMEWORKS = {"tensorflow": "tensorflow", "jax": "jax", "torch": "torch"}
_started: Placement | None = None
_seen: tuple[str, ...] | None = None
"""The GPUs that a user's function saw when it imported a framework here; None: no such import."""


@dataclass(frozen=True)
class Placement:
    """What a task runs on.

    Args:
        backend: The Keras backend.
        gpus: Addresses as the scheduler gave them; empty for the CPU.
        cores: CPU cores of the task.
    """

    backend: str
    gpus: tuple[str, ...]
    cores: int

    @property
    def device(self) -> tuple[str, tuple[str, ...]]:
        """What a process cannot change once its framework runs."""
        return self.backend, self.gpus


def placement_of(context: Any, backend: str, use_gpu: UseGpu) -> Placement:
    """Reads a task's devices from its ``TaskContext``.

    Raises:
        ResourceError: ``use_gpu=True``, and the scheduler gave this task no GPU.
    """
    resources = context.resources() if context is not None else {}
    gpus = tuple(str(a) for a in resources["gpu"].addresses) if "gpu" in resources else ()
    if use_gpu is False:
        gpus = ()
    if use_gpu is True and not gpus:
        raise ResourceError(
            "this task was given no GPU",
            expected="a 'gpu' resource from Spark's scheduler",
            received=f"resources {sorted(resources)}",
            hint="set spark.executor.resource.gpu.amount, spark.task.resource.gpu.amount and a "
            "discovery script, or use_gpu='auto'",
        )
    cores = int(context.cpus()) if context is not None else (os.cpu_count() or 1)
    return Placement(backend, gpus, max(1, cores))


def needs_child(placement: Placement) -> bool:
    """Whether this process already runs a framework on other devices or another backend."""
    if _started is not None:
        return _started.device != placement.device
    if _seen is not None and _seen != placement.gpus:
        return True
    if "keras" in sys.modules:
        import keras

        if keras.backend.backend() != placement.backend:
            return True
    # Imported by other user code: its devices are unknown, which matters only with GPUs.
    return bool(placement.gpus) and _FRAMEWORKS[placement.backend] in sys.modules


def started_on() -> Placement:
    """What this process' framework runs on; the CPU before it has started."""
    return _started or Placement("tensorflow", (), 1)


def start_framework(placement: Placement) -> None:
    """Imports Keras on the placement's backend, seeing its devices and no others.

    The environment is as before when this returns.
    """
    global _started
    if _started is not None:
        return
    with _environment(
        KERAS_BACKEND=placement.backend,
        CUDA_VISIBLE_DEVICES=",".join(placement.gpus) if placement.gpus else "-1",
        TF_CPP_MIN_LOG_LEVEL=os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        TF_ENABLE_ONEDNN_OPTS=os.environ.get("TF_ENABLE_ONEDNN_OPTS"),
        JAX_PLATFORMS=os.environ.get("JAX_PLATFORMS", None if placement.gpus else "cpu"),
    ):
        if placement.backend == "tensorflow":
            from sparkdl.learner.tensorflow import configure_threads, memory_growth

            configure_threads(placement.cores)
            memory_growth()
        elif placement.backend == "torch":
            import torch

            torch.set_num_threads(placement.cores)
            torch.cuda.is_available()
        elif placement.backend == "jax":
            import jax

            jax.devices()
        import keras

        if keras.backend.backend() != placement.backend:
            raise ResourceError(
                "Keras runs on another backend than the model was made with",
                expected=placement.backend,
                received=keras.backend.backend(),
            )
    _started = placement


def function_needs_child(gpus: tuple[str, ...] | None, backend: str | None) -> bool:
    """Whether a framework that runs here saw other devices than a user's function should see.

    Args:
        gpus: As for :func:`function_environment`.
        backend: Keras backend that the function expects; None: any.
    """
    if backend is not None and "keras" in sys.modules:
        import keras

        if keras.backend.backend() != backend:
            return True
    seen = _seen if _started is None else _started.gpus
    if gpus is None:  # no scheduler to say: only a process that was made blind is wrong
        return seen == () and os.path.exists("/dev/nvidiactl")
    if seen is None:
        return bool(gpus) and _frameworks_here()
    return seen != gpus


@contextlib.contextmanager
def function_environment(gpus: tuple[str, ...] | None, backend: str | None) -> Iterator[None]:
    """The environment in which a user's function imports its framework; all of it is restored.

    Args:
        gpus: The only ones to be seen, none if empty; None: those that the process sees anyway.
        backend: Keras backend; None: as the environment says.
    """
    global _seen
    before, had_framework = dict(os.environ), _frameworks_here()
    try:
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus) if gpus else "-1"
        if backend is not None:
            os.environ["KERAS_BACKEND"] = backend
        yield
    finally:
        for name in {*os.environ, *before}:
            if os.environ.get(name) != before.get(name):
                _set(name, before.get(name))
        if gpus is not None and not had_framework and _frameworks_here():
            _seen = gpus


def _frameworks_here() -> bool:
    return any(module in sys.modules for module in _FRAMEWORKS.values())


@contextlib.contextmanager
def _environment(**values: str | None) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            _set(name, value)
        yield
    finally:
        for name, value in before.items():
            _set(name, value)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
