"""Faults of what is around all processes of a cell: the clock, temporary folders, memory.

The clock: a library that is loaded into every process (driver, JVM, executors, workers, servers)
answers what asks for the time of day an hour later, or earlier, once a file is there; clocks that
only count on are as they were. Temporary folders: the cell runs in a namespace of its own, in which
``/tmp`` and ``/var/tmp`` are file systems that nobody can write to; Spark's folders are elsewhere,
as in a container with a read-only root.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

JUMPS_S = {"forward": 3600, "back": -3600}
_CLOCK, _FOLDER = "SPARKDL_FAULT_CLOCK", "SPARKDL_FAULT_FOLDER"
_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long jump(void) {
  static const char *path = 0;
  char text[16] = {0};
  if (!path && !(path = getenv("SPARKDL_FAULT_CLOCK"))) return 0;
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  long seconds = read(file, text, 15) > 0 ? atol(text) : 0;
  close(file);
  return seconds;
}
int clock_gettime(clockid_t id, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *) = 0;
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, at);
  if (!code && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += jump();
  return code;
}
int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec; at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""


def jump(which: str) -> None:
    """Lets the clock of all processes of this cell jump, ``'forward'`` or ``'back'``."""
    before = subprocess.run(["date", "+%s"], capture_output=True, text=True, check=True).stdout
    Path(os.environ[_CLOCK]).write_text(str(JUMPS_S[which]))
    after = subprocess.run(["date", "+%s"], capture_output=True, text=True, check=True).stdout
    if abs(int(after) - int(before) - JUMPS_S[which]) > 60:
        raise RuntimeError(f"the clock did not jump: {before.strip()}, {after.strip()}")


def place(kind: str) -> str | None:
    """Where a cell's folder has to be; None: anywhere."""
    return str(Path.home()) if kind == "readonly-tmp" else None


def environment(kind: str, folder: Path) -> dict[str, str]:
    """What the processes of a cell find in their environment.

    Args:
        kind: The fault.
        folder: The cell's.
    """
    if kind == "readonly-tmp":
        (folder / "spark").mkdir(exist_ok=True)
        return {"TMPDIR": "/tmp", _FOLDER: str(folder / "spark")}
    if not kind.startswith("clock-"):
        return {}
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_SHIM)
    build = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(build, check=True)
    return {"LD_PRELOAD": str(library), _CLOCK: str(folder / "clock")}


def command(kind: str, program: list[str]) -> list[str]:
    """A cell's command in the surroundings that it needs."""
    if kind != "readonly-tmp":
        return program
    mounts = " && ".join(f"mount -t tmpfs -o ro,size=4k tmpfs {at}" for at in ("/tmp", "/var/tmp"))
    return ["unshare", "-rm", "sh", "-c", f'{mounts} && exec "$@"', "sh", *program]


def settings() -> dict[str, str]:
    """What Spark is told about its own folders in these surroundings."""
    folder = os.environ.get(_FOLDER)
    if folder is None:
        return {}
    java = f"-Djava.io.tmpdir={folder} -XX:-UsePerfData"
    return {
        "spark.local.dir": folder, "spark.driver.extraJavaOptions": java,
        "spark.executor.extraJavaOptions": java, "spark.executorEnv.TMPDIR": "/tmp",
    }  # fmt: skip


def too_large(frame: Any) -> Any:
    """A frame one row of which takes more memory than an executor has."""
    from pyspark.sql import functions as F

    size = F.size(F.sequence(F.lit(0), F.lit(1 << 28) + F.col("label")))
    return frame.withColumn(
        "label", F.col("label") + F.when(F.col("label") == 5, size * 0).otherwise(0)
    )
