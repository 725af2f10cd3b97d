"""How busy a host is: processors, memory and GPUs, as its kernel and NVIDIA's tool tell."""

from __future__ import annotations

import errno
import math
import os
import resource
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparkdl.errors import ResourceError
from sparkdl.settings.values import is_number

TRAINING_DESCRIPTORS = 64
"""Number of files and connections that a process must have free to train: an estimate."""


def require_descriptors(what: str, needed: int = 16) -> None:
    """Raises ResourceError if this process cannot open ``needed`` more files and connections."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        free = limit - len(os.listdir("/proc/self/fd")) + 1  # the folder itself is open, too
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return  # a system without this folder
        free = 0
    if limit != resource.RLIM_INFINITY and free < needed:
        raise ResourceError(
            f"{what} cannot begin: this process has too few free file descriptors, of which each "
            "open file and each connection takes one",
            expected=f"{needed} free ones",
            received=f"{free}, at a limit of {limit} (RLIMIT_NOFILE)",
            hint="close what is open, or start the process with a higher limit: ulimit -n 65536",
        )


def ask_nvidia(*arguments: str, timeout_s: float = 10.0) -> list[str]:
    """The lines that NVIDIA's tool answers; none where there is no tool, or it fails."""
    try:
        told = subprocess.run(
            ["nvidia-smi", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=timeout_s, text=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [] if told.returncode else told.stdout.splitlines()


LOAD_INTERVAL_S = 5.0
"""Least time between two looks at processors and memory."""
GPU_INTERVAL_S = 30.0
"""Least time between two questions to NVIDIA's tool, which is a program of its own."""
_ASK = ("--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class HostLoad:
    """The load of a host, everything that runs there included; percent, 0 to 100.

    Args:
        cpu_percent: Processor time since the look before, of all processors.
        memory_percent: Memory that a new process could not have.
        gpu_percents: Use of each GPU; empty without NVIDIA's tool.
        gpu_memory_percents: Used memory of each GPU.
    """

    cpu_percent: float
    memory_percent: float
    gpu_percents: tuple[float, ...] = ()
    gpu_memory_percents: tuple[float, ...] = ()

    def numbers(self) -> list[float]:
        """For :meth:`of_numbers`.

        >>> HostLoad(50.0, 25.0, (90.0,), (10.0,)).numbers()
        [50.0, 25.0, 90.0, 10.0]
        """
        return [
            self.cpu_percent, self.memory_percent, *self.gpu_percents, *self.gpu_memory_percents,
        ]  # fmt: skip

    @classmethod
    def of_numbers(cls, numbers: object) -> HostLoad:
        if not isinstance(numbers, list) or len(numbers) < 2 or len(numbers) % 2:
            raise ValueError("expected an even count of numbers, at least two")
        if not all(is_number(number) and 0 <= number <= 100 for number in numbers):
            raise ValueError("expected numbers from 0 to 100")
        gpus = len(numbers) // 2 - 1
        return cls(numbers[0], numbers[1], tuple(numbers[2 : 2 + gpus]), tuple(numbers[2 + gpus :]))


class LoadMeter:
    """Looks at this host, now and then; for one thread."""

    def __init__(
        self,
        *,
        gpus: bool = True,
        now: Callable[[], float] = time.monotonic,
        proc: str = "/proc",
        ask: Callable[[], str] | None = None,
    ) -> None:
        self._now, self._proc = now, Path(proc)
        self._ask = (ask or ask_gpus) if gpus else None
        self._busy, self._total = self._processor_time()
        self._due = self._gpus_due = -math.inf
        self._gpus: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())

    def look(self) -> HostLoad | None:
        """The load since the look before; None too soon after it, or where no kernel tells it."""
        if self._now() < self._due:
            return None
        busy, total = self._processor_time()
        memory = self._memory_percent()
        if memory is None or total <= self._total:
            return None
        self._due = self._now() + LOAD_INTERVAL_S
        cpu = 100 * (busy - self._busy) / (total - self._total)
        self._busy, self._total = busy, total
        if self._ask is not None and self._now() >= self._gpus_due:
            self._gpus = gpu_loads(self._ask())
            # a machine without GPUs, or with a tool that fails, is not asked again
            self._gpus_due = self._now() + GPU_INTERVAL_S if self._gpus[0] else math.inf
        return HostLoad(_percent(cpu), memory, *self._gpus)

    def _processor_time(self) -> tuple[int, int]:
        """Busy and all processor time since the host's start; zeros where nobody tells it."""
        try:
            first = (self._proc / "stat").read_text().partition("\n")[0].split()
            times = [int(number) for number in first[1:9]]
        except (OSError, ValueError):
            return 0, 0
        return sum(times) - sum(times[3:5]), sum(times)  # all but idle, and waiting for a disk

    def _memory_percent(self) -> float | None:
        try:
            lines = (self._proc / "meminfo").read_text().splitlines()
            parts = [line.partition(":") for line in lines]
            known = {name: int(rest.split()[0]) for name, _, rest in parts}
            return _percent(100 * (1 - known["MemAvailable"] / known["MemTotal"]))
        except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError):
            return None


def ask_gpus() -> str:
    """A line per GPU: use in percent, used and whole memory in MiB; empty without the tool."""
    return "\n".join(ask_nvidia(*_ASK, timeout_s=2.0))


def gpu_loads(told: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Use and used memory of each GPU in percent; empty if a line is not as expected.

    >>> gpu_loads('93, 71680, 143360\\n0, 0, 143360\\n')
    ((93.0, 0.0), (50.0, 0.0))
    """
    rows = [line.split(",") for line in told.splitlines() if line.strip()]
    try:
        uses = tuple(_percent(float(row[0])) for row in rows)
        return uses, tuple(_percent(100 * float(row[1]) / float(row[2])) for row in rows)
    except (ValueError, IndexError, ZeroDivisionError):
        return (), ()


def _percent(value: float) -> float:
    return round(min(max(value, 0.0), 100.0), 1)
