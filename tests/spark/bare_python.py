"""An environment in which ``python3`` of the PATH has no packages, and nobody names another."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def bare_environment(folder: Path) -> dict[str, str]:
    """The variables for a process that was started in a fresh terminal.

    Args:
        folder: Where its ``python3`` is put.
    """
    python = folder / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no site-packages
    python.chmod(0o755)
    named = {k: v for k, v in os.environ.items() if not k.startswith("PYSPARK")}
    return named | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
