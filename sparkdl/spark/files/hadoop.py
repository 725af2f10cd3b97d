"""Hadoop's file systems through the JVM of a classic session: its configuration and credentials."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sparkdl.files.file_system import DamagedFileError, FileEntry, Kind, RenamingFileSystem
from sparkdl.launch import interrupts
from sparkdl.spark.files.connect import ConnectFileSystem

CHUNK_BYTES = 4 << 20
"""What one call of the JVM carries (as text of a third more); an interrupt waits for its end."""


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
