"""Files on Spark Connect, where the client has no JVM: Spark reads and writes them.

Spark writes folders of rows, not files: what is written here is a folder of the file's name with
its content in chunks, which only sparkdl reads. Files that others wrote there are read as well,
unless they are empty: Spark reads over those.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from sparkdl.files.file_system import DamagedFileError, FileEntry, Kind
from sparkdl.spark.session.versions import condition_of

CHUNK_BYTES = 4 << 20
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
            frame = self._spark.createDataFrame(rows, _SCHEMA)
            frame.coalesce(1).write.mode(how).parquet(path)

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
