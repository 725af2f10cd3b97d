"""The user's Spark session: of which kind, whether it still runs, and the Python of its tasks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError, ResourceError, SparkDLError, TransportError
from sparkdl.launch import interrupts
from sparkdl.settings.values import shown
from sparkdl.spark.session.spark_errors import has_other_python, missing_module, missing_program

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession

_JVM_END_S = 5.0


def is_connect(spark: object) -> bool:
    """Whether the session is a Spark Connect client (no SparkContext, no RDD)."""
    return "connect" in type(spark).__module__


def is_local(spark: SparkSession) -> bool:
    """Whether all executors are on this machine (``local[…]``, ``local-cluster[…]``)."""
    return not is_connect(spark) and str(spark.sparkContext.master).startswith("local")


def require_running(spark: SparkSession) -> None:
    """Returns if the session still runs.

    Raises:
        ConfigError: It is no session.
        ResourceError: It was stopped.
        TransportError: The JVM of a classic session has ended.
    """
    if not hasattr(spark, "is_stopped" if is_connect(spark) else "sparkContext"):
        raise ConfigError(
            "spark must be the session", expected="a SparkSession, or None for the active one",
            received=shown(spark), hint="spark = SparkSession.builder.getOrCreate()",
        )  # fmt: skip
    if (problem := session_problem(spark)) is not None:
        raise problem


def require_running_rdd(rdd: RDD[Any]) -> None:
    """The same for the context that an RDD belongs to."""
    if (problem := _context_problem(rdd.ctx)) is not None:
        raise problem


def session_problem(spark: SparkSession) -> SparkDLError | None:
    """Why the session does not run any more; None if it does."""
    if is_connect(spark):
        return _stopped() if spark.is_stopped else None
    return _context_problem(spark.sparkContext)


def _context_problem(context: Any) -> SparkDLError | None:
    try:
        with interrupts.held():  # one inside a call of the JVM leaves its connection broken
            stopped = context._jsc is None or bool(context._jsc.sc().isStopped())
    except Exception as error:
        return TransportError(
            "the JVM of Spark's driver has ended",
            expected="the process that this one started the session in",
            received=_end_of_jvm(context) or f"no answer: {type(error).__name__}",
            hint="it was killed (memory?), or it crashed: see its log and hs_err_pid*.log; "
            "restart this process for a new session",
        )
    return _stopped() if stopped else None


def _stopped() -> ResourceError:
    return ResourceError(
        "the Spark session has been stopped", expected="a session that runs, and data of it",
        received="its stop(), before the call or while it ran",
        hint="spark = SparkSession.builder.getOrCreate(), and read the data again",
    )  # fmt: skip


def _end_of_jvm(context: Any) -> str:
    """How the JVM ended, where this process started it."""
    process = getattr(context._gateway, "proc", None)
    if process is None:
        return ""
    try:  # its connections close before its exit status is known
        return f"exit status {process.wait(_JVM_END_S)}"
    except subprocess.TimeoutExpired:
        return ""


def session_of(data: Any = None) -> Any:
    """The session of a DataFrame or RDD, or the active one, or the default one in other threads.

    Raises:
        ResourceError: There is no session.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    # a Column has every attribute, its class has not
    session = data.sparkSession if hasattr(type(data), "sparkSession") else None
    if session is None:
        with contextlib.suppress(PySparkException):  # there is none
            session = SparkSession.active()
    if session is None:
        raise ResourceError(
            "no Spark session is running", expected="an active SparkSession", received="none",
            hint="spark = SparkSession.builder.getOrCreate()",
        )  # fmt: skip
    return session


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


def with_this_interpreter(rdd: RDD[Any]) -> Any:
    """An RDD that a function of ours was just put on, computed by :func:`this_interpreter`.

    PySpark chooses the interpreter when it makes the Java side, and again for every function that
    it joins with this one; a plain RDD is not joined.
    """
    from pyspark import RDD

    with this_interpreter(rdd.context) as another:
        return RDD(rdd._jrdd, rdd.context, rdd._jrdd_deserializer) if another else rdd


def context_of(spark: SparkSession) -> Any | None:
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
            expected="an interpreter that every executor has", received=f"no program {program!r}",
            hint=hint,
        )  # fmt: skip
    if has_other_python(error):
        return ResourceError(
            "the executors run another version of Python",
            expected=f"Python {sys.version_info[0]}.{sys.version_info[1]}, as the driver",
            received=f"{interpreter}, of another version", hint=hint,
        )  # fmt: skip
    module = missing_module(error)
    if module is None:
        return None
    return ResourceError(
        f"the executors' Python has no module {module!r}",
        expected=f"an interpreter that imports {module!r}",
        received=f"{interpreter}, which does not", hint=hint,
    )  # fmt: skip
