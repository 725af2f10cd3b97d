"""A rank that stops, dies or goes elsewhere in the middle: an error in time, which names it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import hang_program
import pytest


@pytest.mark.timeout(660)
@pytest.mark.parametrize(
    ("communicator", "what"),
    [
        ("builtin", "killed"),
        ("builtin", "elsewhere"),
        ("horovod", "killed"),
        pytest.param("builtin", "stopped", marks=pytest.mark.slow),
        pytest.param("horovod", "stopped", marks=pytest.mark.slow),
        pytest.param("horovod", "elsewhere", marks=pytest.mark.slow),
    ],
)
def test_the_others_get_an_error_that_names_it(
    tmp_path: Path, communicator: str, what: str
) -> None:
    if communicator == "horovod":
        if not importlib.util.find_spec("horovod"):
            pytest.skip("Horovod is not installed: make horovod")
        if what == "elsewhere" and "sparkdl" not in importlib.metadata.version("horovod"):
            pytest.skip("this build of Horovod has no limit on a stalled rank: make horovod")
    processes = []
    try:
        for rank in range(2):
            arguments = [str(tmp_path), str(rank), "2", communicator, what]
            processes.append(
                subprocess.Popen(
                    [sys.executable, hang_program.__file__, *arguments],
                    env={**os.environ, "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": ""},
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
        output, log = processes[0].communicate(timeout=600)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                stream.close()
    assert processes[0].returncode == 0, log[-4000:]
    told = json.loads(output.strip().splitlines()[-1])
    assert told["error"] == ("TransportError" if what == "killed" else "WaitTimeoutError"), told
    assert "rank 1" in told["text"], told
    # alone: at once where a rank was killed, else after the communicator's limit and one question
    limit = 30.0 if what == "killed" else 10 * hang_program.TIMEOUT_S
    assert told["seconds"] < limit, told
    assert told["close_s"] < 60.0, told
