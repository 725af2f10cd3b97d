"""What NVIDIA's own tool, ``nvidia-smi``, answers."""

from __future__ import annotations

import subprocess


def ask_nvidia(*arguments: str, timeout_s: float = 10.0) -> list[str]:
    """The lines that NVIDIA's tool answers; none where there is no tool, or it fails.

    Args:
        arguments: Of ``nvidia-smi``.
        timeout_s: Seconds after which it has failed.
    """
    try:
        told = subprocess.run(
            ["nvidia-smi", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=timeout_s, text=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [] if told.returncode else told.stdout.splitlines()
