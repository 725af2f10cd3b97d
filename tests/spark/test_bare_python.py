"""With a local master sparkdl's own tasks run this interpreter, whatever ``python3`` is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bare_python import bare_environment

SCRIPT = Path(__file__).parent / "scripts" / "bare_python_tasks.py"
EXPECTED = {
    "inference": [0, 2, 4],
    "arrow": 8,
    "tfrecord": 8,
    "whole files": 8,
    "tfos inference": list(range(101, 109)),
    "tfos training": "trained",
    "labeled points": [0, 1] * 4,
    "elephas": 2,
    "user's function": (
        f"'python3' (the user's functions) or {sys.executable!r} (sparkdl's), which does not"
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bare")
    done = subprocess.run(
        [sys.executable, SCRIPT, folder], env=bare_environment(folder), capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("asked", EXPECTED)
def test_what_sparkdl_computes_needs_no_packages_of_python3(
    outcomes: dict[str, Any], asked: str
) -> None:
    assert outcomes[asked] == EXPECTED[asked]
