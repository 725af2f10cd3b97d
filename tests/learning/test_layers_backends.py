"""Tables, classes, segments on JAX and PyTorch, parts on PyTorch, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
from keras_backends import PYTEST, environment_of, kept_programs

_HERE = Path(__file__).parent


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_layers_are_plain_keras(backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environment = environment_of(
        backend,
        PYTHONPATH=os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")]),
        # Ranks are threads here: one that waits inside a compiled call holds a thread of XLA's.
        NPROC="8",
        **kept_programs(),
    )
    # Without the list of warnings, behind which the end of the output would not show a failure.
    command = [*PYTEST, "--disable-warnings", "-k", "not Ftrl and not SGD"]
    names = ["tables", "classes", "recompute", *["parts"] * (backend == "torch")]
    files = [str(_HERE / f"test_{name}_exact.py") for name in names]
    done = subprocess.run(
        [*command, *files], cwd=_HERE.parents[1], env=environment,
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
