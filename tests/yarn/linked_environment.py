"""A small environment to ship to the nodes, which are all this machine."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from submitting import ROOT


def linked_environment() -> Path:
    """A virtual environment with venv-pack, kept for the next run; skips where there is none.

    A whole environment with a framework has two gigabytes; this one finds its packages where those
    of the tests are, which is possible as all nodes are this machine.
    """
    paths = [str(ROOT), *sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})]
    key = hashlib.sha256("\n".join([sys.version, sys.base_prefix, *paths]).encode()).hexdigest()
    folder = Path.home() / ".cache" / "sparkdl" / f"environment-{key[:16]}"
    if (folder / "complete").exists():
        return folder
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    python = folder / "bin" / "python"
    installed = subprocess.run(
        [python, "-m", "pip", "install", "-q", "--retries", "1", "venv-pack", "setuptools<81"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if installed.returncode:
        pytest.skip(f"venv-pack cannot be installed: {installed.stderr[-300:]}")
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (Path(found.stdout.strip()) / "sitecustomize.py").write_text(
        f"import sys\nsys.path += {paths!r}\n"
    )
    (folder / "complete").touch()
    return folder
