"""Tables that lie beside a saved model, so that both can be copied elsewhere together."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.files import storage
from sparkdl.tables.checkpoints import TableReference
from sparkdl.tables.files import MANIFEST, TableFiles, discard

_CONFIG = "config.json"
_KEY = "stored"
"""The name in a layer's configuration of what says where its rows are."""
_QUOTED = f'"{_KEY}"'.encode()


def reference_in(content: bytes) -> TableReference | None:
    """The tables that a ``.keras`` file names; None if its model has none that a fit has written.

    Args:
        content: Of a whole file.
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


def copy_beside(content: bytes, folder: str) -> None:
    """Copies the tables that a ``.keras`` file names, file by file through this process.

    Args:
        content: Of a whole file. One without tables copies nothing.
        folder: Where to: a path or URI. Tables that it has are replaced.

    Raises:
        ResourceError: The files cannot be read or written.
    """
    reference = reference_in(content)
    if reference is None:
        return
    moved = replace(reference, folder=_absolute(folder))
    for name in moved.tables:
        source = TableFiles(reference.folder_of(name))
        target = moved.folder_of(name)
        if source.folder == target:
            continue
        discard(target)
        for path in source.paths():
            _copy(f"{source.folder}/{path}", f"{target}/{path}")
        _copy(f"{source.folder}/{MANIFEST}", f"{target}/{MANIFEST}")


def require_elsewhere(content: bytes, folder: str) -> None:
    """Raises ConfigError if the tables that a ``.keras`` file names lie below ``folder``, which is
    about to be replaced."""
    reference = reference_in(content)
    if reference is not None and f"{reference.folder}/".startswith(f"{folder.rstrip('/')}/"):
        raise ConfigError(
            f"{folder!r} would be replaced, and the rows of the model lie there",
            expected="another path",
            received=reference.folder,
        )


def found_beside(content: bytes, folder: str) -> tuple[bytes, TableReference | None]:
    """A ``.keras`` file that names the tables in ``folder``, if they are there.

    Args:
        content: Of a whole file.
        folder: That of :func:`copy_beside`, wherever it is now.

    Returns:
        The file, and its reference if that names this folder, else None.
    """
    reference = reference_in(content)
    if reference is None:
        return content, None
    if reference.folder == _absolute(folder):
        return content, reference
    moved = TableReference(_absolute(folder), reference.step, reference.tables)
    if not all(storage.exists(f"{moved.folder_of(name)}/{MANIFEST}") for name in moved.tables):
        return content, None
    told = moved.to_bytes().decode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
        for part in old.infolist():
            inside = old.read(part)
            if part.filename == _CONFIG:
                config = json.loads(inside)
                _told(config, lambda _: told)
                inside = json.dumps(config).encode()
            new.writestr(part, inside)
    return buffer.getvalue(), moved


def _absolute(folder: str) -> str:
    """Workers have working folders of their own."""
    here = storage.path_on_disk(folder)
    return folder if here is None else os.path.abspath(here)


def _told(config: Any, change: Callable[[str], str]) -> None:
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
