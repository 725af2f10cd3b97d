"""Gradients and losses of N workers are those of one process, whatever the loss is divided by.

The cases of ``loss_cases.py`` on each Keras backend, in a process each.
"""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
from keras_backends import PYTEST, environment_of

_HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "backend",
    [
        "tensorflow",
        pytest.param("jax", marks=pytest.mark.slow),
        pytest.param("torch", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(1200)
def test_losses_are_those_of_one_process(backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environment = environment_of(backend, TF_NUM_INTRAOP_THREADS="1")
    done = subprocess.run(
        [*PYTEST, "loss_cases.py", "-p", "no:xdist"],
        cwd=_HERE, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
