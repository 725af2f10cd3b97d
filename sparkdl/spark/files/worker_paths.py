"""Paths of data as workers find them: executors have no session that could be asked.

Runs on the driver.
"""

from __future__ import annotations

import os
from typing import Any

from sparkdl.errors import ResourceError
from sparkdl.files.arrow_file_system import NoFileSystemError
from sparkdl.files.file_system import FileSystem
from sparkdl.files.listing import FoundFile, find_files
from sparkdl.files.storage import SCHEME, explained
from sparkdl.spark.files.hadoop import (
    ConnectFileSystem,
    HadoopFileSystem,
    is_local_warehouse,
    jvm_called,
)
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
        scheme: Scheme of the URI, in small letters; None without one.

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


def path_for_workers(path: str) -> str:
    """A path that means to workers what ``path`` means to Spark.

    Without a scheme that is a path of Spark's default file system: unless it is this machine's, its
    URI is put before the path. A relative one begins in the folder where the JVM was started.

    Raises:
        NoFileSystemError: Only the server of Spark Connect knows what its default is.
        ResourceError: The session's JVM cannot be asked.
    """
    session = None if SCHEME.match(path) else running_session()
    if session is None:
        return path
    if is_connect(session):
        if is_local_warehouse(session):
            return path
        raise NoFileSystemError(
            f"{path!r} is in the default file system of Spark's server, which no client knows",
            expected="a URI, such as 'hdfs://name-node/rows.parquet'",
            received="a path without a scheme over Spark Connect",
            hint="'file:/...' is a path of each machine",
        )
    with explained("read", path):
        hadoop = HadoopFileSystem(session)
        is_plain = os.path.isabs(path) and hadoop.default_scheme() == "file"
        return path if is_plain else hadoop.qualified(path)


def files_for_workers(path: str) -> list[FoundFile]:
    """The files that a path means to Spark, if this process finds them as workers would.

    Args:
        path: See :func:`sparkdl.files.listing.find_files`.

    Raises:
        NoFileSystemError: This process finds none there; Spark, which has credentials and file
            systems of its own, may.
    """
    try:
        return find_files(path_for_workers(path))
    except NoFileSystemError:
        raise
    except ResourceError as error:
        raise NoFileSystemError(
            error.what, expected=error.expected, received=error.received, hint=error.hint
        ) from error
