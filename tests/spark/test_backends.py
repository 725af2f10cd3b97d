"""The JAX and PyTorch backends through a real cluster (TensorFlow is in every other test)."""

from __future__ import annotations

import importlib.util

import pytest
from scripted import run_script


@pytest.mark.parametrize(
    ("backend", "modes"),
    [
        ("torch", ("allreduce",)),
        pytest.param("torch", ("asynchronous", "synchronous"), marks=pytest.mark.slow),
        pytest.param("jax", ("asynchronous", "synchronous", "allreduce"), marks=pytest.mark.slow),
    ],
)
def test_fit_predict_and_evaluate(backend: str, modes: tuple[str, ...]) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    assert "BACKEND-TEST-OK" in run_script("backend_fit.py", *modes, KERAS_BACKEND=backend)
