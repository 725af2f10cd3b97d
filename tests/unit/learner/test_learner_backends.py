"""The learner cases on each Keras backend, which run in a process each, all at the same time."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from keras_backends import PYTEST, environment_of

_HERE = Path(__file__).parent
Running = dict[str, tuple[subprocess.Popen[str], IO[str]]]
"""Backend -> its process, and the file with its output."""


def start(backend: str) -> tuple[subprocess.Popen[str], IO[str]]:
    """Runs learner_cases.py with ``KERAS_BACKEND=backend``."""
    environment = environment_of(
        backend,
        PYTHONPATH=os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")]),
        TF_NUM_INTRAOP_THREADS="1",
        TF_NUM_INTEROP_THREADS="1",
    )
    output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
    cases = [
        str(_HERE / "learner_cases.py"),
        str(_HERE / "own_step_cases.py"),
        str(_HERE / "callback_cases.py"),
    ]
    arguments = ["-ra", "--durations=5", *cases]
    process = subprocess.Popen(
        [*PYTEST, *arguments],
        cwd=_HERE.parents[2],
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process, output


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    """The processes of all backends that are installed and tested in this session."""
    chosen = {
        item.callspec.params["backend"]
        for item in request.session.items
        if item.path == Path(__file__) and isinstance(item, pytest.Function)
    }
    started = {b: start(b) for b in sorted(chosen) if importlib.util.find_spec(b)}
    yield started
    for process, output in started.values():
        process.kill()
        process.wait()
        output.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_learner_cases(backend: str, running: Running) -> None:
    if backend not in running:
        pytest.skip(f"{backend} is not installed")
    process, output = running[backend]
    code = process.wait(timeout=880)
    output.seek(0)
    text = output.read()
    print(text)
    assert code == 0, f"\n{text[-20_000:]}"
