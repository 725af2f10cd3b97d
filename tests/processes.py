"""Processes that a test looks for, each of which may end between two looks at it."""

from __future__ import annotations

import time
from pathlib import Path

import psutil


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended; one that nobody has waited for has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ends(pid: int, within_s: float) -> bool:
    """Whether a process has ended, or does so within some seconds."""
    deadline = time.monotonic() + within_s
    while runs(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def maps_of(process: psutil.Process) -> list[str]:
    """What a process maps, a line each; nothing of one that has ended."""
    try:
        return Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return []


def command_of(process: psutil.Process) -> str:
    """A process' command line; "" of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
