"""The lines of ``docs/clusters.md``, for the tests that run them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text()


def blocks(heading: str) -> list[str]:
    """The shell blocks below a heading of the page."""
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith(heading + "\n")]
    return re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def doctor_block() -> str:
    return next(b for b in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) if "doctor" in b)


def run_block(block: str, variables: dict[str, str], folder: Path, timeout_s: float = 280) -> str:
    """What a block prints; the shell sees ``variables`` and nothing else."""
    ran = subprocess.run(
        ["bash", "-euc", block], env=variables, cwd=folder, capture_output=True, text=True,
        timeout=timeout_s,
    )  # fmt: skip
    assert ran.returncode == 0, f"{block}\n{ran.stdout[-2000:]}\n{ran.stderr[-3000:]}"
    return ran.stdout


def build_wheel(folder: Path) -> Path | None:
    """A folder with this library and venv-pack as wheels, for pip; None without an index."""
    source, wheels = folder / "source", folder / "wheels"
    source.mkdir()
    for name in (
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "pyspark_tfrecord.py",
        "sparkdl_keras.py",
    ):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "sparkdl", source / "sparkdl")
    pip = [sys.executable, "-m", "pip"]
    building = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels]
    subprocess.run([*building, source], check=True)
    getting = [*pip, "download", "-q", "--no-deps", "--retries", "1", "-d", wheels, "venv-pack"]
    return None if subprocess.run(getting, timeout=280).returncode else wheels
