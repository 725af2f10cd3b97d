"""Runs the learner cases on one Keras backend, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def run_learner_cases(backend: str) -> None:
    """Runs learner_cases.py with ``KERAS_BACKEND=backend``; its output is the failure message."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")

    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        # The cases are tiny: compiling well takes longer than it saves.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
    }
    arguments = ["-q", "-ra", "--noconftest", "--durations=5", str(_HERE / "learner_cases.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=_HERE.parents[2],  # the repository's root
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
    )
    print(done.stdout)
    assert done.returncode == 0, f"\n{done.stdout[-20_000:]}\n{done.stderr[-5_000:]}"
