"""Which Python Spark starts for the tasks, and what it lacks."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

from sparkdl.errors import ResourceError

_building = threading.Lock()
_MISSING = (
    re.compile(r"No module named '?([\w.]+)'?"),
    re.compile(r"(PyArrow|Pandas|NumPy|numpy|pandas|pyarrow)\b[^\n]{0,40} must be installed"),
)
_NO_PROGRAM = re.compile(r'Cannot run program "([^"]+)"')


@contextlib.contextmanager
def this_interpreter(context: Any | None) -> Iterator[bool]:
    """Within, Spark takes this process' Python for the tasks of functions that are handed to it.

    Only with a local master, where executors are on this machine, and only if the user has named
    no other (``PYSPARK_PYTHON``, ``spark.pyspark.python``): Spark would start ``python3`` of the
    PATH, which is another one where a virtual environment is used without being activated. The
    user's own functions keep the interpreter that they had.

    Args:
        context: The SparkContext; None over Spark Connect, where Spark's server chooses.

    Yields:
        Whether the interpreter is another than the user's functions have.
    """
    if context is None or not str(context.master).startswith("local") or _chosen(context):
        yield False
        return
    with _building:
        before = context.pythonExec
        context.pythonExec = sys.executable
        try:
            yield True
        finally:
            context.pythonExec = before


def _chosen(context: Any) -> bool:
    """Whether the user named the interpreter of the tasks."""
    if os.environ.get("PYSPARK_PYTHON") or context.pythonExec != "python3":
        return True
    return context.getConf().get("spark.pyspark.python", None) is not None


def interpreter_of(context: Any | None) -> str:
    """The interpreter of the tasks, for messages; see :func:`this_interpreter`."""
    if context is None:
        return "the interpreter of Spark's server (spark.pyspark.python there)"
    with this_interpreter(context):
        return repr(str(context.pythonExec))


def interpreter_problem(error: BaseException, interpreter: str) -> ResourceError | None:
    """What Spark's exception says of the interpreter of the tasks; None if it says nothing.

    Args:
        error: Of a job.
        interpreter: Which one it was, see :func:`interpreter_of`.
    """
    text = str(error)
    here = f"this process runs {sys.executable}, Python {sys.version.split()[0]}"
    hint = (
        "before the session starts set PYSPARK_PYTHON (or spark.pyspark.python) to an interpreter "
        f"with sparkdl-keras that every executor has; {here}"
    )
    program = _NO_PROGRAM.search(text)
    if program is not None:
        return ResourceError(
            "Spark cannot start Python on the executors",
            expected="an interpreter that every executor has",
            received=f"no program {program[1]!r}",
            hint=hint,
        )
    if "PYTHON_VERSION_MISMATCH" in text or "different minor version" in text:
        return ResourceError(
            "the executors run another version of Python",
            expected=f"Python {sys.version_info[0]}.{sys.version_info[1]}, as the driver",
            received=f"{interpreter}, of another version",
            hint=hint,
        )
    missing = next(filter(None, (pattern.search(text) for pattern in _MISSING)), None)
    if missing is None:
        return None
    module = missing[1]
    return ResourceError(
        f"the executors' Python has no module {module!r}",
        expected=f"an interpreter that imports {module!r}",
        received=f"{interpreter}, which does not",
        hint=hint,
    )
