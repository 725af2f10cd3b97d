"""Which paths are Spark's: those that its users mean by them."""

from __future__ import annotations

from typing import Any

from sparkdl.files.file_system import FileSystem
from sparkdl.spark.files.connect import ConnectFileSystem, is_local_warehouse
from sparkdl.spark.files.hadoop import HadoopFileSystem, jvm_called
from sparkdl.spark.session.running import is_connect

_HADOOPS = frozenset({"hdfs", "dbfs", "abfs", "abfss", "wasb", "wasbs", "s3a", "viewfs"})
"""Schemes that mean one of Hadoop's file systems, for a client that cannot ask Hadoop."""
_DOWNLOADS = frozenset({"http", "https", "ftp"})
"""Hadoop has file systems for them, of which none can be looked into: fsspec reads these."""


def find_file_system(path: str, scheme: str | None) -> FileSystem | None:
    """The file system of a path, if a session runs and Spark would not look on this machine.

    With a classic session: schemes that its Hadoop configuration knows, and paths without a scheme
    unless its default file system is local. On Spark Connect: Hadoop's own schemes, and paths
    without one unless Spark's warehouse is on a local file system.

    Args:
        path: A path or URI.
        scheme: Of the URI, in small letters; None without one.

    Raises:
        OSError: The session's JVM cannot be asked.
    """
    session = running_session()
    if session is None or scheme in _DOWNLOADS:
        return None
    if is_connect(session):
        here = is_local_warehouse(session) if scheme is None else scheme not in _HADOOPS
        return None if here else ConnectFileSystem(session)
    hadoop = HadoopFileSystem(session)
    if scheme is None:
        return None if hadoop.default_scheme() == "file" else hadoop
    return hadoop if hadoop.knows(scheme) else None


def running_session() -> Any | None:
    """The session of this process; None if none runs.

    Raises:
        OSError: Its JVM does not answer.
    """
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        with jvm_called():
            session = SparkSession.active()
            stopped = not is_connect(session) and session.sparkContext._jsc is None
    except PySparkRuntimeError:
        return None
    return None if stopped else session
