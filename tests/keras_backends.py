"""What a process needs that tests on one of Keras' backends, which are fixed by the import."""

from __future__ import annotations

import os
import sys
import tempfile

XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""The cases of tests are tiny: compiling well takes longer than it saves."""

PYTEST = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "collecting"]
"""Runs test files in a process of their own; see ``start/collecting.py``."""


def environment_of(backend: str, **more: str) -> dict[str, str]:
    """Environment variables of a process with a backend, on the CPU, with small thread pools."""
    return {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": XLA_FLAGS,
        "OMP_NUM_THREADS": "1",
        **more,
    }


def kept_programs() -> dict[str, str]:
    """Variables by which JAX keeps what it compiles in a folder of this test process: a rank or a
    test that compiles the same program reads it there. (One that calls Python is not kept.)"""
    return {
        "JAX_COMPILATION_CACHE_DIR": os.path.join(tempfile.gettempdir(), "jax-programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
