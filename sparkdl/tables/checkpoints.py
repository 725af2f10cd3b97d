"""Tables of a run in files, after epochs and beside a saved model: where, and which are kept.

A model and the tables beside it can be copied elsewhere together.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import secrets
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import quote

from sparkdl.errors import ConfigError, ProtocolError
from sparkdl.files import storage
from sparkdl.tables.files import (
    MANIFEST,
    TableFiles,
    delete_table,
    discard,
    is_changed,
    load_rows,
    read_json,
    write_manifest,
    write_part,
)
from sparkdl.tables.store import RowStore, require_table_name

KEPT = 3
"""Steps whose tables are kept; the driver's checkpoints may be one or two epochs behind."""
_NAME = re.compile(r"step-[0-9]{12}-[0-9a-f]{8}")
_MAX_BYTES = 1 << 20
_NEWEST = ".newest.json"
"""Suffix of the folder's name: the file that says which of its tables are the newest."""


@dataclass(frozen=True)
class TableReference:
    """The tables of a run after some of its steps, as its state names them.

    Args:
        folder: Folder of all tables of one step; each lies in a folder of its own there.
        older: Folders of earlier steps that are still there, the newest first.
        changed: Whether the tables were changed after the fit that wrote them.
        seen: The newest tables of their folder when a file with these was loaded.
        beside: For a model's file: the folder, within the one beside it, of its tables.
    """

    folder: str
    step: int
    tables: tuple[str, ...]
    older: tuple[str, ...] = ()
    changed: bool = False
    seen: str = ""
    beside: str = ""

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> TableReference:
        """The counterpart of :meth:`to_bytes`.

        Raises:
            ProtocolError: The bytes are no reference.
        """
        try:
            if len(content) > _MAX_BYTES:
                raise ValueError(f"{len(content)} bytes")
            found = json.loads(content)
            names, older = tuple(map(str, found["tables"])), tuple(map(str, found["older"]))
            changed, beside = bool(found.get("changed", False)), str(found.get("beside", ""))
            for name in names:
                require_table_name(name)
            if beside and not _NAME.fullmatch(beside):
                raise ValueError(f"beside: {beside[:100]!r}")
            seen = str(found.get("seen", ""))
            return cls(
                str(found["folder"]), int(found["step"]), names, older, changed, seen, beside
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(
                "the state of a run does not say where its tables are",
                expected="folder, step, tables, older",
                received=f"{type(error).__name__}: {str(error)[:200]}",
            ) from error

    def folder_of(self, table: str) -> str:
        """That of one table."""
        return f"{self.folder}/{quote(table, safe='')}"

    def load(self, table: str, store: RowStore, rank: int, ranks: int) -> None:
        """Loads the rows of a table that ``rank`` owns; one that is new stays empty.

        Raises:
            ResourceError: The files are not whole.
            ConfigError: The table has another form than the store.
        """
        if table in self.tables:
            load_rows(store, self.folder_of(table), rank, ranks)


@dataclass(frozen=True)
class TableCheckpoints:
    """The folder in which a run keeps its tables.

    Args:
        folder: A path or URI that all ranks see.
    """

    folder: str

    def new_folder(self, step: int) -> str:
        """A folder for the tables after ``step`` steps; one rank makes the name for all."""
        return f"{self.folder}/step-{step:012d}-{secrets.token_hex(4)}"

    def write(self, reference: TableReference, stores: Mapping[str, RowStore], rank: int,
              ranks: int) -> None:  # fmt: skip
        for name, store in stores.items():
            write_part(store, reference.folder_of(name), rank, ranks)

    def finish(self, reference: TableReference, ranks: int, former: bytes = b"") -> None:
        """Makes what all ranks have written tables, and deletes those of earlier steps.

        Those are what ``former`` named, and ``reference`` does not; after a fit, on a disk of this
        machine, all that no state names but what another model's user has changed. Tables that
        were changed outside of a fit take the place of ``former`` or of none.

        Args:
            former: The reference before it; empty for none.

        Raises:
            ResourceError: A part is missing: do all ranks see the same folder?
            ConfigError: Other tables than ``former`` are the newest here.
        """
        for name in reference.tables:
            write_manifest(reference.folder_of(name), ranks, changed=reference.changed)
        before = TableReference.from_bytes(former) if former else None
        with self._locked():
            if reference.changed and before is not None:
                self.require_newest(before)
            newest = json.dumps({"newest": Path(reference.folder).name})
            storage.write_bytes(f"{self.folder}{_NEWEST}", newest.encode())
        kept = {reference.folder, *reference.older}
        if before is not None:
            for folder in {before.folder, *before.older} - kept:
                if self._is_own(folder):  # unlike those of a saved model, from which a run began
                    self.delete(replace(before, folder=folder))
        here = storage.path_on_disk(self.folder)
        if here is not None and not reference.changed:
            names = {Path(folder).name for folder in kept}
            for path in Path(here).iterdir():
                if _NAME.fullmatch(path.name) and path.name not in names and not is_changed(path):
                    shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> str:
        """The name of the newest tables here; empty where nobody has said it."""
        path = f"{self.folder}{_NEWEST}"
        return str(read_json(path).get("newest", "")) if storage.exists(path) else ""

    def require_newest(self, reference: TableReference) -> None:
        """Raises ConfigError if another process has put other tables in the place of these."""
        newest = self.newest()
        if newest not in ("", reference.seen, Path(reference.folder).name):
            raise ConfigError(
                f"the tables in {self.folder!r} were changed or trained meanwhile, by another "
                "process or model",
                expected=f"{reference.seen or Path(reference.folder).name} as the newest",
                received=newest,
                hint="nothing was changed here: load the model again, or save it elsewhere",
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Within, no other process of a disk's machines says which tables are the newest."""
        here = storage.path_on_disk(self.folder)
        if here is None:
            yield
            return
        os.makedirs(here, exist_ok=True)
        descriptor = os.open(here, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @classmethod
    def of(cls, reference: TableReference) -> TableCheckpoints:
        """The folder in which a reference's tables lie among those of other steps."""
        parent, _, name = reference.folder.rpartition("/")
        return cls(parent if _NAME.fullmatch(name) else reference.folder)

    def _is_own(self, folder: str) -> bool:
        parent, _, name = folder.rpartition("/")
        return parent == self.folder and _NAME.fullmatch(name) is not None

    def delete(self, reference: TableReference) -> None:
        """Deletes tables that no state names; elsewhere than on a disk only whole ones."""
        for name in reference.tables:
            delete_table(reference.folder_of(name))
        here = storage.path_on_disk(reference.folder)
        if here is not None and self._is_own(reference.folder):
            shutil.rmtree(here, ignore_errors=True)

    def after(self, former: bytes, step: int, tables: tuple[str, ...]) -> TableReference:
        """The reference of a new step, after the ``former`` one (empty: there is none)."""
        older: tuple[str, ...] = ()
        if former:
            before = TableReference.from_bytes(former)
            older = (before.folder, *before.older)[: KEPT - 1]
        return TableReference(self.new_folder(step), step, tables, older)

    def changed(self, former: TableReference) -> TableReference:
        """The reference of tables that are changed outside of a fit.

        Those that the fit has written stay, as its checkpoint names them.
        """
        older = former.older if former.changed else (former.folder, *former.older)[: KEPT - 1]
        return TableReference(
            self.new_folder(former.step), former.step, former.tables, older, changed=True
        )


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
