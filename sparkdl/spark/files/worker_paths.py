"""Paths of data as workers find them: executors have no session that could be asked.

Runs on the driver.
"""

from __future__ import annotations

from sparkdl.errors import ResourceError
from sparkdl.files.arrow_file_system import NoFileSystemError
from sparkdl.files.storage import SCHEME, explained
from sparkdl.files.streams import FoundFile, find_files
from sparkdl.spark.files.connect import is_local_warehouse
from sparkdl.spark.files.finder import running_session
from sparkdl.spark.files.hadoop import HadoopFileSystem
from sparkdl.spark.session.running import is_connect


def path_for_workers(path: str) -> str:
    """A path that means to workers what ``path`` means to Spark.

    Without a scheme that is a path of Spark's default file system: unless it is this machine's, its
    URI is put before the path.

    Args:
        path: A path, URI or pattern.

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
        return path if hadoop.default_scheme() == "file" else hadoop.qualified(path)


def files_for_workers(path: str) -> list[FoundFile]:
    """The files that a path means to Spark, if this process finds them as workers would.

    Args:
        path: See :func:`sparkdl.files.streams.find_files`.

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
