"""The user's Spark session: which one, of which kind, and whether it still runs."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Any

from sparkdl.errors import ConfigError, ResourceError, SparkDLError, TransportError
from sparkdl.launch import interrupts
from sparkdl.settings.values import shown

_JVM_END_S = 5.0


def is_connect(spark: Any) -> bool:
    """Whether the session is a Spark Connect client (no SparkContext, no RDD)."""
    return "connect" in type(spark).__module__


def is_local(spark: Any) -> bool:
    """Whether all executors are on this machine (``local[…]``, ``local-cluster[…]``)."""
    if is_connect(spark):
        return False
    return str(spark.sparkContext.master).startswith("local")


def require_running(spark: Any) -> None:
    """Returns if the session still runs.

    Raises:
        ConfigError: It is no session.
        ResourceError: It was stopped.
        TransportError: The JVM of a classic session has ended.
    """
    if not hasattr(spark, "is_stopped" if is_connect(spark) else "sparkContext"):
        raise ConfigError(
            "spark must be the session",
            expected="a SparkSession, or None for the active one",
            received=shown(spark),
            hint="spark = SparkSession.builder.getOrCreate()",
        )
    problem = session_problem(spark)
    if problem is not None:
        raise problem


def require_running_rdd(rdd: Any) -> None:
    """The same for the context that an RDD belongs to."""
    problem = _context_problem(rdd.ctx)
    if problem is not None:
        raise problem


def session_problem(spark: Any) -> SparkDLError | None:
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
        "the Spark session has been stopped",
        expected="a session that runs, and data of it",
        received="its stop(), before the call or while it ran",
        hint="spark = SparkSession.builder.getOrCreate(), and read the data again",
    )


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
            "no Spark session is running",
            expected="an active SparkSession",
            received="none",
            hint="spark = SparkSession.builder.getOrCreate()",
        )
    return session
