"""Runs scripts of ``scripts/``, which need a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def run_script(name: str, *arguments: str, **environment: str) -> str:
    """Runs a script of ``scripts/`` in a fresh process; returns what it printed."""
    done = subprocess.run(
        [sys.executable, os.path.join(HERE, "scripts", name), *arguments],
        env={**os.environ, **environment},
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout
