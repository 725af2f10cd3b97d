"""Which Python Spark starts for the tasks, and what it lacks."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from sparkdl.errors import ResourceError
from sparkdl.spark.session.running import is_connect
from sparkdl.spark.session.spark_errors import has_other_python, missing_module, missing_program

_building = threading.RLock()


@contextlib.contextmanager
def this_interpreter(context: Any | None) -> Iterator[bool]:
    """Within, Spark takes the right Python for the tasks of functions that are handed to it.

    That is the one of ``spark.pyspark.python``, which PySpark heeds with spark-submit alone, else
    with a local master, where executors are on this machine, this process': Spark would start
    ``python3`` of the PATH, which is another one where a virtual environment is used without being
    activated. With ``PYSPARK_PYTHON`` Spark has the right one. The user's own functions keep the
    interpreter that they had.

    Args:
        context: The SparkContext; None over Spark Connect, where Spark's server chooses.

    Yields:
        Whether the interpreter is another than the user's functions have.
    """
    if context is None:
        yield False
        return
    with _building:  # the choice, too: another thread's must not look like the user's
        before = context.pythonExec
        right = _right_one(context)
        context.pythonExec = right or before
        try:
            yield right is not None
        finally:
            context.pythonExec = before


def with_this_interpreter(rdd: Any) -> Any:
    """An RDD that a function of ours was just put on, computed by :func:`this_interpreter`.

    PySpark chooses the interpreter when it makes the Java side, and again for every function that
    it joins with this one; a plain RDD is not joined.

    Args:
        rdd: What ``mapPartitions`` or another of its kind returned.
    """
    from pyspark import RDD

    with this_interpreter(rdd.context) as another:
        return RDD(rdd._jrdd, rdd.context, rdd._jrdd_deserializer) if another else rdd


def context_of(spark: Any) -> Any | None:
    """The SparkContext of a session; None over Spark Connect."""
    return None if is_connect(spark) else spark.sparkContext


def _right_one(context: Any) -> str | None:
    """The interpreter that Spark should take for the tasks; None if it does."""
    if os.environ.get("PYSPARK_PYTHON") or context.pythonExec != "python3":
        return None
    named: str | None = context.getConf().get("spark.pyspark.python", None)
    is_local = str(context.master).startswith("local")
    return named or (sys.executable if is_local else None)


def interpreter_of(context: Any | None) -> str:
    """The interpreter of the tasks, for messages; both, where the user's functions have another."""
    if context is None:
        return "the interpreter of Spark's server (spark.pyspark.python there)"
    before = str(context.pythonExec)
    with this_interpreter(context) as another:
        if another:
            return f"{before!r} (the user's functions) or {context.pythonExec!r} (sparkdl's)"
    return repr(before)


def interpreter_problem(error: BaseException, interpreter: str) -> ResourceError | None:
    """The error that Spark's exception tells about the tasks' interpreter; None for others."""
    here = f"this process runs {sys.executable}, Python {sys.version.split()[0]}"
    hint = (
        "before the session starts set PYSPARK_PYTHON (or, with spark-submit, "
        "spark.pyspark.python) to an interpreter with sparkdl-keras that every executor has; "
        f"{here}"
    )
    program = missing_program(error)
    if program is not None:
        return ResourceError(
            "Spark cannot start Python on the executors",
            expected="an interpreter that every executor has",
            received=f"no program {program!r}",
            hint=hint,
        )
    if has_other_python(error):
        return ResourceError(
            "the executors run another version of Python",
            expected=f"Python {sys.version_info[0]}.{sys.version_info[1]}, as the driver",
            received=f"{interpreter}, of another version",
            hint=hint,
        )
    module = missing_module(error)
    if module is None:
        return None
    return ResourceError(
        f"the executors' Python has no module {module!r}",
        expected=f"an interpreter that imports {module!r}",
        received=f"{interpreter}, which does not",
        hint=hint,
    )
