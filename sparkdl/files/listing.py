"""The files that a path means, as Spark finds them: patterns, hidden files, folders of partitions.

The one listing of data for ``fit``, ``evaluate``, ``predict``, streams and the command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from sparkdl.errors import DataError, ResourceError
from sparkdl.files.storage import explained
from sparkdl.files.streams import FilePlace, place_of

_SPECIAL = re.compile(r"[*?\[{\\]")
_CHOICE = re.compile(r"(?<!\\)\{([^{}]*)\}")
_DESCRIPTIONS = frozenset({"dataset_info.json", "features.json", "state.json"})
"""Names of files that Hugging Face and TFDS put beside those with the rows."""
_BESIDE = re.compile(r".*\.json|.*\.txt|cache-.*\.arrow")
"""Those, labels.txt of TFDS, and the results that datasets' map puts beside what it reads."""
_MOST_CHOICES = 10_000
"""Number of paths at most that the braces of a pattern may mean."""


@dataclass(frozen=True)
class FoundFile:
    """A file, and how large it is.

    Args:
        path: As :func:`sparkdl.files.streams.open_input` takes it.
        inner: Its path from the folder on in which it was looked for.
    """

    path: str
    size_bytes: int
    inner: str

    @property
    def partition_values(self) -> dict[str, str]:
        """Values of all rows, from the folders, as written: ``{'day': '3'}`` for ``day=3/f``."""
        folders = (name.partition("=") for name in self.inner.split("/")[:-1] if "=" in name)
        return {unescaped(key): value for key, _, value in folders}


def find_files(path: str, *, recursive: bool = False) -> list[FoundFile]:
    """The files that a path means to Spark, ordered by path.

    A folder means the files in it; with folders ``name=value`` in it, the files of these alone.
    Hidden files (``_x``, ``.x``, ``x._COPYING_``) and empty ones hold no rows.

    Args:
        path: A file, a folder, or a pattern of Hadoop of such: ``*``, ``?``, ``[ab]``, ``[^a]``,
            ``{a,b}``; a backslash before such a sign means the sign.
        recursive: Whether all files below a folder count, as ``recursiveFileLookup`` says to Spark.

    Raises:
        ResourceError: There is no such file, or the folder cannot be looked into.
        DataError: Files of one folder have other partitions than those of another, or none; or
            several folders that a pattern names have partitions, each of its own.
    """
    with explained("read", path):
        found = {file.path: file for top in _tops(path) for file in _in(top, path, recursive)}
    if not found:
        raise ResourceError(
            f"no files at {path!r}",
            expected="a file, a folder with files, or a pattern such as '/data/*.tfrecord'",
            received="nothing that can be read: names that begin with _ or . and empty files do "
            "not count, nor do the folders in a folder",
            hint="this machine and the executors must see the same files",
        )
    bases = sorted({f.path[: -len(f.inner)] for f in found.values() if f.partition_values})
    if len(bases) > 1 and not recursive:
        raise DataError(
            f"folders at {path!r} have partitions each of its own",
            expected="partitions of one folder", received=", ".join(bases[:3]),
            hint="name the folder above, and choose rows by columns: fit(spark.read...filter(...))",
        )  # fmt: skip
    return sorted(found.values(), key=lambda file: file.path)


def escaped(text: str) -> str:
    """A folder's name or value as Spark writes it.

    >>> escaped('10:00'), unescaped('10%3A00')
    ('10%3A00', '10:00')
    """
    return re.sub(r"[\0-\x1f\x7f\"#%'*/:=?\\{[\]^]", lambda sign: f"%{ord(sign[0]):02X}", text)


def unescaped(text: str) -> str:
    """The same without escapes, each of which is one letter to Spark."""
    return re.sub("%([0-9a-fA-F]{2})", lambda found: chr(int(found[1], 16)), text)


TableFormat = Literal["delta", "iceberg", "hudi", "parquet"]
_LOGS: dict[str, TableFormat] = {
    "_delta_log": "delta", ".hoodie": "hudi", ".hoodie_partition_metadata": "hudi",
    "metadata": "iceberg", "_spark_metadata": "parquet",
}  # fmt: skip
"""Names in the folder of a table -> its format; the last one is that of a stream's output."""


class FoundTable(NamedTuple):
    """A table whose files are more than its rows; ``whole`` where not only a part was asked for."""

    format: TableFormat
    folder: str
    whole: bool


def table_at(path: str) -> FoundTable | None:
    """The table whose folder it is, or into which it reaches.

    Raises:
        ResourceError: A folder cannot be looked into.
    """
    from pyarrow import fs

    with explained("read", path):
        folders = {}
        for place, top in _tops(path):
            whole = top.type == fs.FileType.Directory
            folders[top.path if whole else top.path.rpartition("/")[0]] = place, whole
        for folder, (place, whole) in folders.items():
            name = "="
            while "=" in name or name == "data":  # Iceberg's folder of files
                for info in place.system.get_file_info([f"{folder}/{log}" for log in _LOGS]):
                    kind = None if info.type == fs.FileType.NotFound else _LOGS[_name(info)]
                    below = fs.FileSelector(info.path, allow_not_found=True)
                    if kind == "iceberg" and not any(
                        _name(file).endswith(".metadata.json")
                        for file in place.system.get_file_info(below)
                    ):
                        continue
                    if kind and (whole or kind != "parquet"):
                        return FoundTable(kind, place.outer(folder), whole)
                (folder, _, name), whole = folder.rpartition("/"), False
    return None


def _tops(path: str) -> Iterator[tuple[FilePlace, Any]]:
    for one in _without_braces(path):
        wild = _SPECIAL.search(one)
        if wild is None:
            place = place_of(one)
            yield place, place.system.get_file_info(place.inner)
            continue
        cut = one.rfind("/", 0, wild.start())
        place = place_of("." if cut < 0 else one[:cut] or "/")
        parts = [part for part in one[cut + 1 :].split("/") if part]
        yield from ((place, top) for top in _matching(place, parts))


def _without_braces(pattern: str) -> list[str]:
    """The patterns that ``{a,b}`` stands for, the innermost braces first."""
    patterns = [pattern]
    while any(_CHOICE.search(p) for p in patterns) and len(patterns) < _MOST_CHOICES:
        patterns = [
            one[: choice.start()] + part + one[choice.end() :]
            for one in patterns
            for choice in [_CHOICE.search(one)]
            if choice is not None
            for part in re.split(r"(?<!\\),", choice[1])
        ] + [one for one in patterns if not _CHOICE.search(one)]
    return list(dict.fromkeys(patterns))


def fits(name: str, pattern: str) -> bool:
    """Whether a name fits a pattern of Hadoop, see :func:`find_files`."""
    return any(_expression(one).fullmatch(name) for one in _without_braces(pattern))


def _expression(pattern: str) -> re.Pattern[str]:
    parts, inside, signs = [], False, iter(pattern)
    for sign in signs:
        if sign == "\\":
            parts.append(re.escape(next(signs, "\\")))
        elif inside:
            first = parts[-1] == "["
            inside = sign != "]" or first
            excludes = first and sign == "!"
            parts.append("^" if excludes else sign if sign in "^-]" else re.escape(sign))
        elif sign == "[":
            inside = True
            parts.append("[")
        else:
            parts.append({"*": "[^/]*", "?": "[^/]"}.get(sign) or re.escape(sign))
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error as error:
        raise DataError(
            f"the pattern {pattern!r} cannot be read",
            expected="*, ?, [ab], [^a], {a,b}; a backslash before a sign that means itself",
            received=str(error),
        ) from None


def _matching(place: FilePlace, pattern: list[str]) -> list[Any]:
    from pyarrow import fs

    tops, infos = [place.inner], []
    for number, wanted in enumerate(pattern):
        expression = _expression(wanted)
        infos = [
            info
            for top in tops
            for name, info in _of_rows(place.system.get_file_info(fs.FileSelector(top, True)), top)
            if expression.fullmatch(name)
        ]
        if number < len(pattern) - 1:
            infos = [info for info in infos if info.type == fs.FileType.Directory]
        tops = sorted(info.path for info in infos)
    return infos


def _in(top: tuple[FilePlace, Any], path: str, recursive: bool) -> list[FoundFile]:
    from pyarrow import fs

    place, info = top
    if info.type == fs.FileType.File:
        whole = [FoundFile(place.outer(info.path), int(info.size), _name(info))]
        return [] if is_hidden(_name(info)) or not info.size else whole
    if info.type != fs.FileType.Directory:
        return []
    infos = place.system.get_file_info(fs.FileSelector(info.path, recursive=True))
    files = [
        FoundFile(place.outer(file.path), int(file.size), inner)
        for inner, file in _of_rows(infos, info.path)
        if file.type == fs.FileType.File and file.size and not any(map(is_hidden, inner.split("/")))
    ]
    return files if recursive else _of_partitions(files, path)


def _of_rows(infos: list[Any], top: str) -> list[tuple[str, Any]]:
    """The parts of a folder, with their paths from there on, but what only describes the rows."""
    found = [(info.path[len(top) :].strip("/"), info) for info in infos]
    if any(inner in _DESCRIPTIONS for inner, _ in found):
        found = [(inner, info) for inner, info in found if not _BESIDE.fullmatch(inner)]
    return found


def is_hidden(name: str) -> bool:
    """Whether Spark passes over a file or folder of this name."""
    return (name[:1] == "_" and "=" not in name) or name[:1] == "." or name.endswith("._COPYING_")


def _of_partitions(files: list[FoundFile], path: str) -> list[FoundFile]:
    """The files of a folder, without those of plain folders in it."""
    first = next((f for f in files if f.partition_values), None)
    if first is None:
        return [file for file in files if "/" not in file.inner]
    spelled = {name.lower(): name for name in first.partition_values}
    found = []
    for file in files:
        if "/" not in file.inner:
            continue  # beside the folders of partitions, where Spark reads none
        names = [name.lower() for name in file.partition_values]
        if names != list(spelled) or len(names) < sum("=" in f for f in file.inner.split("/")[:-1]):
            raise DataError(
                f"folders at {path!r} have different partitions",
                expected=f"files below {'/'.join(f'{n}=...' for n in spelled.values())}, as in "
                f"{first.inner!r}",
                received=file.inner,
                hint="name the folders that belong together: a pattern such as "
                f"{path.rstrip('/')}/{next(iter(spelled.values()))}=*",
            )
        *folders, last = file.inner.split("/")
        ours = iter(map(escaped, spelled.values()))
        inner = [f"{next(ours)}={f.partition('=')[2]}" if "=" in f else f for f in folders]
        found.append(replace(file, inner="/".join([*inner, last])))
    return found


def _name(info: object) -> str:
    path: str = info.path  # type: ignore[attr-defined]
    return path.rstrip("/").rsplit("/", 1)[-1]
