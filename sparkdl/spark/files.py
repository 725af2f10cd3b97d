"""Files where Spark's are: ``find_file_system`` is plugged into :mod:`sparkdl.files.storage`.

Hadoop's file systems are reached through the JVM of a classic session: its configuration and
credentials. On Spark Connect the client has no JVM: Spark reads and writes files, as folders of
rows. What is written there is a folder of the file's name with its content in chunks, which only
sparkdl reads. Files that others wrote there are read as well, unless they are empty: Spark reads
over those.

Executors have no session that could be asked: paths of data are found for them on the driver.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from sparkdl.errors import ResourceError
from sparkdl.files.file_system import (
    DamagedFileError,
    FileEntry,
    FileSystem,
    Kind,
    NoFileSystemError,
    RenamingFileSystem,
)
from sparkdl.files.listing import FoundFile, find_files
from sparkdl.files.storage import SCHEME, explained
from sparkdl.launch import interrupts
from sparkdl.spark.session.running import is_connect
from sparkdl.spark.session.versions import condition_of

CHUNK_BYTES = 4 << 20
"""What one call of the JVM carries (as text of a third more); an interrupt waits for its end."""
_SCHEMA = "part int, parts int, content binary"
_CHUNKS = re.compile(r"part-[^/]*\.parquet")
_ROOT = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]*:(//[^/]*)?")
"""A URI's scheme and authority."""


class ConnectFileSystem:
    """Whatever Spark reaches; see :class:`sparkdl.files.file_system.FileSystem`.

    A file is written by a job. One that is cut off, because the job failed, is found out when it is
    read. Spark cannot delete: a deleted file is an empty folder of its name.
    """

    plain = False

    def __init__(self, spark: Any) -> None:
        self._spark = spark

    def write(self, path: str, content: bytes) -> None:
        starts = range(0, max(len(content), 1), CHUNK_BYTES)
        rows = [
            (number, len(starts), content[start : start + CHUNK_BYTES])
            for number, start in enumerate(starts)
        ]
        self._write(path, rows, "overwrite")

    def read(self, path: str, at_most: int | None) -> bytes:
        from pyspark.sql import functions as f

        with _asked():
            if self._names(path) == [""]:
                whole = self._spark.read.format("binaryFile").load(path)
                parts = f.ceil(f.greatest(f.length("content"), f.lit(1)) / CHUNK_BYTES).cast("int")
                part = f.explode(f.sequence(f.lit(0), parts - 1)).alias("part")
                piece = f.expr(f"substring(content, part * {CHUNK_BYTES} + 1, {CHUNK_BYTES})")
                cut = whole.select("content", parts.alias("parts"), part)
                rows = cut.select("part", "parts", piece.alias("content"))
            else:
                rows = self._spark.read.schema(_SCHEMA).parquet(path)
            found = sorted((row.part, row.parts, bytes(row.content)) for row in rows.collect())
        if not found:
            raise FileNotFoundError(f"no file {path}")
        if [part for part, _, _ in found] != list(range(found[0][1])):
            raise DamagedFileError(
                f"{path!r} cannot be read: the file was not written whole",
                expected=f"{found[0][1]} chunks", received=f"{len(found)}",
                hint="the job that wrote it did not end",
            )  # fmt: skip
        return b"".join(content for _, _, content in found)[:at_most]

    def find(self, path: str) -> Kind | None:
        try:
            with _asked():
                names = self._names(path)
                if names == [""]:
                    return "file"
                if not all(map(_CHUNKS.fullmatch, names)):
                    return "folder"
                rows = self._spark.read.schema(_SCHEMA).parquet(path)
                return None if rows.isEmpty() else "file"
        except FileNotFoundError:
            return None

    def files_in(self, folder: str) -> list[FileEntry]:
        """Files that others wrote, but those with ``_`` or ``.`` first."""
        with _asked():
            return [FileEntry(n, None, None) for n in self._names(folder) if "/" not in n]

    def check_writable(self, path: str) -> None:
        """Makes an empty folder of that name, which counts as no file, unless there is one."""
        self._write(path, [], "ignore")

    def delete(self, path: str) -> None:
        if self.find(path) is not None:
            self._write(path, [], "overwrite")

    def delete_partial(self, folder: str, older_than_s: float) -> None:
        """Does nothing: what a job left is Spark's to delete."""

    def _write(self, path: str, rows: list[tuple[int, int, bytes]], how: str) -> None:
        with _asked():
            self._spark.createDataFrame(rows, _SCHEMA).coalesce(1).write.mode(how).parquet(path)

    def _names(self, path: str) -> list[str]:
        """Paths of the files below a folder, from it on; of a file, one that is empty."""
        reader = self._spark.read.format("binaryFile").option("recursiveFileLookup", "true")
        found = [str(row.path) for row in reader.load(path).select("path").collect()]
        inner = "/" + "/".join(filter(None, _ROOT.sub("", path).split("/")))
        strange = [place for place in found if inner not in place]
        if strange:
            raise OSError(f"Spark finds {strange[0]} at {path}")
        return sorted(place.partition(inner)[2].strip("/") for place in found)


def is_local_warehouse(spark: Any) -> bool:
    """Whether Spark's warehouse, and so most likely its default file system, is a local one."""
    return str(spark.conf.get("spark.sql.warehouse.dir", "file:")).startswith("file:")


@contextlib.contextmanager
def _asked() -> Iterator[None]:
    """Around what Spark does: its exceptions become OSError."""
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        told = str(error).splitlines()[0][:500]
        missing = condition_of(error) == "PATH_NOT_FOUND"
        raise (FileNotFoundError if missing else OSError)(told) from error


class HadoopFileSystem(RenamingFileSystem):
    """``hdfs:``, ``dbfs:``, ``abfss:``, ``s3a:``, ``viewfs:`` and whatever the session knows.

    Paths are URIs, or paths in the session's default file system.

    Args:
        spark: A classic session; its ``spark.hadoop.*`` and session settings are used.

    Raises:
        OSError: The JVM does not answer.
    """

    def __init__(self, spark: Any) -> None:
        self._spark = spark
        with jvm_called():
            self._gateway = spark.sparkContext._gateway
            self._hadoop = spark.sparkContext._jvm.org.apache.hadoop.fs
            self._settings = spark._jsparkSession.sessionState().newHadoopConf()

    def default_scheme(self) -> str:
        """The scheme of paths that have none: ``'file'``, ``'hdfs'``, ..."""
        with jvm_called():
            return str(self._hadoop.FileSystem.getDefaultUri(self._settings).getScheme())

    def knows(self, scheme: str) -> bool:
        """Whether the session can open files of a scheme."""
        try:
            with jvm_called():
                self._hadoop.FileSystem.getFileSystemClass(scheme, self._settings)
        except OSError:
            return False
        return True

    def qualified(self, path: str) -> str:
        """The URI of a path or pattern, also of one without a scheme."""
        with jvm_called():
            return str(self._qualified(path).toString())

    def read(self, path: str, at_most: int | None) -> bytes:
        """See :class:`FileSystem`. A folder is what a session of Spark Connect wrote."""
        if self.find(path) == "folder":
            return ConnectFileSystem(self._spark).read(path, at_most)
        parts: list[bytes] = []
        left = at_most
        with jvm_called():
            stream = self._of(path).open(self._hadoop.Path(path))
        try:
            while left is None or left > 0:
                with jvm_called():
                    part = bytes(
                        stream.readNBytes(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES))
                    )
                if not part:
                    break
                parts.append(part)
                left = None if left is None else left - len(part)
        finally:
            with jvm_called():
                stream.close()
        return b"".join(parts)

    def find(self, path: str) -> Kind | None:
        try:
            with jvm_called():
                status = self._of(path).getFileStatus(self._hadoop.Path(path))
                return "folder" if status.isDirectory() else "file"
        except FileNotFoundError:
            return None

    def on_disk(self, path: str) -> str | None:
        """The place of a path on this machine's disks; None if it is elsewhere.

        A relative path is below the directory in which the JVM began, as for what Spark itself
        writes; this process may have changed its own since.
        """
        with jvm_called():
            whole = self._qualified(path).toUri()  # with its scheme, from the root
            return str(whole.getPath()) if whole.getScheme() == "file" else None

    def files_in(self, folder: str) -> list[FileEntry]:
        found = []
        with jvm_called():
            for status in self._of(folder).listStatus(self._hadoop.Path(folder)):
                if not status.isDirectory():
                    name, size = str(status.getPath().getName()), int(status.getLen())
                    found.append(FileEntry(name, size, status.getModificationTime() / 1000))
        return sorted(found, key=lambda file: file.name)

    def delete(self, path: str) -> None:
        with jvm_called():
            self._of(path).delete(self._hadoop.Path(path), False)

    def _make_folder(self, path: str) -> None:
        with jvm_called():
            self._of(path).mkdirs(self._hadoop.Path(path))

    def _create(self, path: str, content: bytes) -> None:
        with jvm_called():
            stream = self._of(path).create(self._hadoop.Path(path), False)
        try:
            for start in range(0, len(content), CHUNK_BYTES):
                with jvm_called():
                    stream.write(content[start : start + CHUNK_BYTES])
        finally:
            with jvm_called():  # the content is safe when this returns
                stream.close()

    def _rename(self, source: str, target: str) -> None:
        # FileContext refuses 'hdfs:///a': it wants the name node that this means
        with jvm_called():
            old, new = (self._qualified(path) for path in (source, target))
        try:
            with jvm_called():
                context = self._hadoop.FileContext.getFileContext(
                    new.getFileSystem(self._settings).getUri(), self._settings
                )
        except OSError:  # a system without an AbstractFileSystem has no rename over a file
            with jvm_called():
                if not self._of(target).rename(old, new):
                    raise OSError(f"{source} was not renamed to {target}") from None
            return
        with jvm_called():
            rename = getattr(self._hadoop, "Options$Rename")
            over = self._gateway.new_array(rename, 1)
            over[0] = rename.OVERWRITE
            context.rename(old, new, over)

    def _qualified(self, path: str) -> Any:
        """The JVM's path with a scheme and, where the file system has one, an authority."""
        return self._of(path).makeQualified(self._hadoop.Path(path))

    def _of(self, path: str) -> Any:
        """The JVM's file system of a path; the JVM keeps it for the next call."""
        return self._hadoop.Path(path).getFileSystem(self._settings)


@contextlib.contextmanager
def jvm_called() -> Iterator[None]:
    """Around calls of the JVM: interrupts wait, and its exceptions become OSError.

    Raises:
        DamagedFileError: Hadoop's check sum of a file is another.
        FileNotFoundError: The error of Java, with its first line.
        OSError: Any other exception of Java, or the JVM did not answer.
    """
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors.exceptions.captured import CapturedException

    try:
        with interrupts.held():  # one inside a call leaves the connection broken
            yield
    except Py4JJavaError as error:
        name = str(error.java_exception.getClass().getName())
        told = str(error.java_exception.toString()).splitlines()[0]
        if name == "org.apache.hadoop.fs.ChecksumException":
            raise DamagedFileError(
                "a file cannot be read: its bytes have changed",
                expected="the check sum that was written with them", received=told,
                hint="bring the file back from a copy, or delete it",
            ) from error  # fmt: skip
        missing = name == "java.io.FileNotFoundException"
        raise (FileNotFoundError if missing else OSError)(told) from error
    except CapturedException as error:  # what PySpark makes of some of Java's
        raise OSError(str(error).splitlines()[0]) from error
    except (Py4JError, ConnectionError) as error:
        told = f"Spark's JVM does not answer ({error}); 'file:/...' is a path of this machine"
        raise OSError(told) from error


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
