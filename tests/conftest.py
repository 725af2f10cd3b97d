"""Shared by all tests: nothing may be left behind, and no test may change the environment."""

from __future__ import annotations

import atexit
import glob
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

_OURS = ("sparkdl",)
_TEMP = tempfile.mkdtemp(prefix="pytest-")  # of this run alone, so that others do not show
os.environ["TMPDIR"] = tempfile.tempdir = _TEMP
atexit.register(shutil.rmtree, _TEMP, ignore_errors=True)


def _threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(_OURS)}


def _children() -> set[int]:
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if "sparkdl.ps.server" in " ".join(child.cmdline()):
                found.add(child.pid)
        except psutil.Error:
            continue
    return found


def _files() -> set[str]:
    return {*glob.glob("/dev/shm/sparkdl*"), *glob.glob(f"{_TEMP}/sparkdl-*")}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaks threads, server processes, shared memory, files or variables."""
    before = _threads(), _children(), _files(), dict(os.environ)
    yield
    deadline = time.monotonic() + 5
    while True:
        left = _threads() - before[0], _children() - before[1], _files() - before[2]
        if not any(left) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not any(left), f"left behind: threads {left[0]}, processes {left[1]}, files {left[2]}"
    changed = {
        k
        for k in {*os.environ, *before[3]}
        if os.environ.get(k) != before[3].get(k) and not k.startswith(("PYTEST", "SPARK", "PYSPARK",
                                                                       "TF2_", "_", "TPU"))
    }  # fmt: skip
    assert not changed, f"environment changed: {changed}"
