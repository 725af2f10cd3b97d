"""The same on JAX and PyTorch, each in a process of its own, for one of the exact modes.

A loss that looks at numbers is left out: JAX traces gradients also where it compiles nothing. So is
half precision: JAX rounds a batch and its halves otherwise.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
from keras_backends import PYTEST, environment_of

_HERE = Path(__file__).parent
_FILES = ("test_state_travels.py", "test_seeds.py", "test_all_models_train.py")


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_state_seeds_and_settings_travel(backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    path = os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")])
    environment = environment_of(backend, PYTHONPATH=path)
    cases = [str(_HERE / name) for name in _FILES]
    options = ["-k", "allreduce and not eagerly and not policy"]
    done = subprocess.run(
        [*PYTEST, *options, *cases],
        cwd=_HERE.parents[1], env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
