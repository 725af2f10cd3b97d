"""Tables that lie beside a saved model, so that both can be copied elsewhere together."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace

from sparkdl.errors import ConfigError, ProtocolError
from sparkdl.files import storage
from sparkdl.tables.checkpoints import TableCheckpoints, TableReference
from sparkdl.tables.files import MANIFEST, TableFiles, discard

_CONFIG = "config.json"
_KEY = "stored"
"""The name in a layer's configuration of what says where its rows are."""
ENDING = ".tables"
_QUOTED = f'"{_KEY}"'.encode()


def reference_in(content: bytes) -> TableReference | None:
    """The tables that a ``.keras`` file names; None if no fit has written a table of its model.

    Args:
        content: Content of a whole file.
    """
    found: list[str] = []

    def keep(text: str) -> str:
        found.append(text)
        return text

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        config = archive.read(_CONFIG)
    if _QUOTED not in config:
        return None
    _told(json.loads(config), keep)
    return TableReference.from_bytes(found[0].encode()) if found else None


def copy_beside(content: bytes, folder: str) -> bytes:
    """Copies the tables that a ``.keras`` file names, file by file through this process.

    Tables that lie there stay whole until the file that names them is replaced; see
    :func:`save_beside`.

    Args:
        content: Content of a whole file. One without tables copies nothing.
        folder: Where to: a path or URI.

    Returns:
        The file, which says which of the folder's tables are its own.

    Raises:
        ResourceError: The files cannot be read or written.
        ConfigError: The tables are of this folder, and another process has changed them there.
    """
    reference = reference_in(content)
    if reference is None:
        return content
    place, moved = TableCheckpoints(_absolute(folder)), reference
    if TableCheckpoints.of(reference) == place:
        place.require_newest(reference)
    else:
        moved = replace(reference, folder=place.folder)
        if any(storage.exists(f"{moved.folder_of(name)}/{MANIFEST}") for name in moved.tables):
            moved = replace(reference, folder=place.new_folder(reference.step))
        for name in moved.tables:
            source, target = TableFiles(reference.folder_of(name)), moved.folder_of(name)
            discard(target)
            for path in (*source.paths(), MANIFEST):
                _copy(f"{source.folder}/{path}", f"{target}/{path}")
    beside = moved.folder.removeprefix(place.folder).strip("/")
    if reference.beside == beside:
        return content
    return _telling(content, replace(reference, beside=beside))


def save_beside(content: bytes, path: str, write: Callable[[bytes], None]) -> None:
    """Writes a ``.keras`` file with its tables in the folder ``<path>.tables``; at no moment are
    those of the file at ``path`` less than whole.

    Args:
        content: See :func:`copy_beside`, as for what it raises.
        write: Writes the file that it is given to ``path``.
    """
    kept, place = copy_beside(content, path + ENDING), TableCheckpoints(_absolute(path + ENDING))
    new = _reference_beside(kept, place)
    former = b"" if new is None or not storage.exists(path) else storage.read_bytes(path)
    write(kept)
    with contextlib.suppress(zipfile.BadZipFile, KeyError, ValueError, ProtocolError):
        old = _reference_beside(former, place)
        if old is not None and new is not None and old.folder != new.folder:
            place.delete(old)


def _reference_beside(content: bytes, place: TableCheckpoints) -> TableReference | None:
    reference = reference_in(content)
    if reference is None:
        return None
    inside = f"{place.folder}/{reference.beside}" if reference.beside else place.folder
    return replace(reference, folder=inside, older=(), changed=False)


def require_elsewhere(content: bytes, folder: str) -> None:
    """Raises ConfigError if the tables that a ``.keras`` file names lie below ``folder``, which is
    about to be replaced."""
    reference = reference_in(content)
    if reference is not None and f"{reference.folder}/".startswith(f"{folder.rstrip('/')}/"):
        raise ConfigError(
            f"{folder!r} would be replaced, and the rows of the model lie there",
            expected="another path", received=reference.folder,
        )  # fmt: skip


def found_beside(content: bytes, folder: str) -> tuple[bytes, TableReference | None]:
    """A ``.keras`` file that names the tables in ``folder``, if they are there.

    Args:
        content: Content of a whole file.
        folder: The folder of :func:`copy_beside`, wherever it is now.

    Returns:
        The file, and its reference if that names this folder, else None.
    """
    place = TableCheckpoints(_absolute(folder))
    reference, moved = reference_in(content), _reference_beside(content, place)
    if reference is None or moved is None:
        return content, None
    if not all(storage.exists(f"{moved.folder_of(name)}/{MANIFEST}") for name in moved.tables):
        return content, reference if reference.folder == moved.folder else None
    moved = replace(moved, seen=place.newest())
    return _telling(content, moved), moved


def _telling(content: bytes, reference: TableReference) -> bytes:
    """A file that names other tables."""
    told = reference.to_bytes().decode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
        for part in old.infolist():
            inside = old.read(part)
            if part.filename == _CONFIG:
                config = json.loads(inside)
                _told(config, lambda _: told)
                inside = json.dumps(config).encode()
            new.writestr(part, inside)
    return buffer.getvalue()


def _absolute(folder: str) -> str:
    """Workers have working folders of their own."""
    here = storage.path_on_disk(folder)
    return folder if here is None else os.path.abspath(here)


def _told(config: object, change: Callable[[str], str]) -> None:
    """Calls ``change`` with each reference of a model's configuration, and puts in what it says."""
    if isinstance(config, list):
        for value in config:
            _told(value, change)
    elif isinstance(config, dict):
        own = config.get("config")
        of_table = str(config.get("registered_name")).startswith("sparkdl>")
        if of_table and isinstance(own, dict) and isinstance(own.get(_KEY), str):
            own[_KEY] = change(own[_KEY])
        for value in config.values():
            _told(value, change)


def _copy(source: str, target: str) -> None:
    here, there = storage.path_on_disk(source), storage.path_on_disk(target)
    if here is None or there is None:
        storage.write_bytes(target, storage.read_bytes(source))
        return
    with storage.explained("copied", source):
        os.makedirs(os.path.dirname(there), exist_ok=True)
        shutil.copyfile(here, there)
