"""Shared by all tests: what each needs, and that it leaves nothing behind.

A test is marked with what it needs, by its folder or by a line of its file: ``keras`` (a backend is
imported, models are compiled), ``processes`` (it starts other processes), ``spark`` (a JVM). What
needs none of them is ``make check``.
"""

from __future__ import annotations

import atexit
import glob
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
from start.collecting import pytest_collection, pytest_runtest_protocol  # noqa: F401
from start.java_options import options_for_tests

os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background; tests of
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C and their children need it

_TESTS = Path(__file__).parent
_PATHS = (str(_TESTS.parent), str(_TESTS / "start"))  # this tree, and start/sitecustomize.py
_HELPERS = {p.parent for p in _TESTS.rglob("*.py") if not p.name.startswith(("test_", "conftest"))}
"""Folders with modules that tests share; ``start`` and scripts are for other processes."""
sys.path[:0] = sorted(str(p) for p in _HELPERS if p.name not in ("start", "scripts"))
os.environ["PYTHONPATH"] = os.pathsep.join((*_PATHS, os.environ.get("PYTHONPATH", ""))).rstrip(":")
for _name, _options in options_for_tests().items():
    os.environ.setdefault(_name, _options)
_NEEDS = {
    "spark": "spark",
    "yarn": "spark",
    "gpu": "processes",
    "parallel": "processes",
    "learning": "keras",
    "parity": "keras",
    "unit/learner": "keras",
}
"""A folder below ``tests/``, and the mark of all tests in it. A file elsewhere says it itself, in a
line ``pytestmark = pytest.mark.keras``, which is read before the file is imported."""
_SAYS = re.compile(r"(?m)^pytestmark = (?:\[\s*)?pytest\.mark\.(keras|processes|spark)\b")
_IN_PROCESS = {"inproc", "solo", "threads-2", "threads-3", "threads-4"}
"""Parameters of the contract suites for which no other process is started."""
hypothesis.settings.register_profile("loaded machine", deadline=None)
hypothesis.settings.load_profile("loaded machine")

_OURS = ("sparkdl",)
_SET_BY_OTHERS = (
    "PYTEST", "SPARK", "PYSPARK", "_",
    "TF2_", "TPU", "KMP_", "HDF5_", "ENABLE_RUNTIME_UPTIME",  # frameworks, when they are imported
)  # fmt: skip
"""Beginnings of the names of environment variables that others set in this process."""
_TEMP = tempfile.mkdtemp(prefix="pytest-")  # of this run alone, so that others do not show
os.environ["TMPDIR"] = tempfile.tempdir = _TEMP
atexit.register(shutil.rmtree, _TEMP, ignore_errors=True)


def _mark_of(path: Path) -> str | None:
    """What all tests of a file or folder need, if it is one of ``_NEEDS`` or below one."""
    if not path.is_relative_to(_TESTS):
        return None
    places = (path, *path.parents)
    found = (_NEEDS.get(p.relative_to(_TESTS).as_posix()) for p in places if _TESTS in p.parents)
    mark = next((mark for mark in found if mark), None)
    if mark is None and path.suffix == ".py" and path.name.startswith("test_"):
        said = _SAYS.search(path.read_text())
        mark = said[1] if said else None
    return mark


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m "not keras"`` files that need Keras are not even imported (a test named on the
    command line is)."""
    mark = _mark_of(collection_path)
    return True if mark and f"not {mark}" in (config.option.markexpr or "") else None


_imported_keras: list[str] = []
"""The file in whose collection Keras was imported."""


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if "keras" in sys.modules and not _imported_keras:
        _imported_keras.append(report.nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _imported_keras and "not keras" in (config.option.markexpr or ""):
        raise pytest.UsageError(
            f"{_imported_keras[0]} imports Keras: it needs the line pytestmark = pytest.mark.keras"
        )
    for item in items:
        mark = _mark_of(item.path)
        if mark is None and (_TESTS / "contract") in item.path.parents:
            callspec = getattr(item, "callspec", None)
            values = {v for v in callspec.params.values() if isinstance(v, str)} if callspec else ()
            mark = None if _IN_PROCESS.intersection(values) else "processes"
        if mark is not None:
            item.add_marker(getattr(pytest.mark, mark))
    items.sort(key=lambda item: _turn(item.path))


_FIRST = (
    "spark/test_notebooks.py",
    "unit/learner/test_learner_backends.py",
    "yarn",
    "spark",
    "parallel",
)
"""What begins first where files are tested side by side: the longest, so that short ones fill what
is left at the end."""


def _turn(path: Path) -> int:
    """When a file has its turn; files with the same number keep their order."""
    name = path.relative_to(_TESTS).as_posix()
    found = (i for i, start in enumerate(_FIRST) if name == start or name.startswith(start + "/"))
    return next(found, len(_FIRST))


def _threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(_OURS)}


def _children() -> set[int]:
    """Server processes and ranks below this one."""
    found = set()
    for pid in _descendants(os.getpid()):
        try:
            command = " ".join(psutil.Process(pid).cmdline())
            if "sparkdl.ps.server" in command or "sparkdl.launch.child" in command:
                found.add(pid)
        except psutil.Error:
            continue
    return found


def _descendants(root: int) -> list[int]:
    """All processes below one.

    A JVM has hundreds of threads, and each of them has a list of the processes that it started. So
    where there is any child, each process of the machine is asked for its parent.
    """
    listings = glob.glob(f"/proc/{root}/task/*/children")
    if not listings:  # not Linux
        return [child.pid for child in psutil.Process(root).children(recursive=True)]
    if not any(map(_read, listings)):
        return []
    below: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        words = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
        if words:
            below.setdefault(int(words[1]), []).append(int(name))
    found = list(below.get(root, ()))
    for pid in found:  # which grows meanwhile
        found += below.get(pid, ())
    return found


def _read(path: str) -> bytes:
    """A file of ``/proc``; empty where the process or thread has ended."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


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
        if os.environ.get(k) != before[3].get(k) and not k.startswith(_SET_BY_OTHERS)
    }
    assert not changed, f"environment changed: {changed}"
