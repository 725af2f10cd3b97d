"""Tables in files: each rank writes its part, and a manifest that comes last makes them a table.

::

    part-00002-of-00004.ids.npy  .values.npy  .state.npy  .meta.npy    sorted by the hash of the id
    part-00002-of-00004.waiting.npy                                    ids without a row, counted
    part-00002-of-00004.json                                           rows and checksums
    manifest.json                                                      settings, clock, all parts

A folder without a manifest is no table: a writer that is killed leaves none. Parts are ranges of
hashes (:mod:`sparkdl.tables.hashing`), so that any number of ranks loads them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, ResourceError
from sparkdl.files import storage
from sparkdl.files.file_system import DamagedFileError, open_regular
from sparkdl.tables.hashing import mix64
from sparkdl.tables.index import hash_range, in_order
from sparkdl.tables.store import BLOCK_ROWS, RowStore, TableRows

Array = npt.NDArray[Any]

MANIFEST = "manifest.json"
FORMAT = {"format": 1, "hash": "splitmix64", "block_rows": BLOCK_ROWS}
_MAX_JSON_BYTES = 1 << 26  # room for the checksums of 20 billion rows
_MAX_CLOCK = (1 << 63) - 1
_THREAD = "sparkdl-table-writer"
_NO_LOCK = contextlib.nullcontext()
_TYPES = {"ids": "<i8", "values": "<f4", "state": "<f4", "meta": "<u4", "waiting": "<i8"}


def write_part(
    store: RowStore,
    folder: str,
    rank: int,
    ranks: int,
    *,
    clock: int | None = None,
    lock: contextlib.AbstractContextManager[object] = _NO_LOCK,
) -> None:
    """Writes the rows of one rank, in blocks: no copy of the table is made.

    Args:
        store: The rows that ``rank`` owns. It changes meanwhile under ``lock`` alone.
        folder: A path or URI that all ranks see, without a manifest (:func:`discard`).
        rank: The rank that owns these rows.
        clock: The clock that is written: all ranks write the same. None: the store's.
        lock: Lock of the store, held where rows are read; it may be taken again and again.

    Raises:
        ResourceError: The folder cannot be written, or has a table already.
    """
    if storage.exists(f"{folder}/{MANIFEST}"):
        raise ResourceError(
            f"{folder!r} has a table already, which its parts would no longer fit",
            expected="a folder without a manifest", received=MANIFEST,
            hint="discard(folder) on one rank, before the others write",
        )  # fmt: skip
    clock = store.clock if clock is None else clock
    with lock:
        slots, hashes = store.slots()
        waiting = np.stack([a.astype(np.int64) for a in store.waiting.export()], axis=1)
    shapes = _shapes(store, len(slots), len(waiting))
    prefix = f"{folder}/{_name(rank, ranks)}"
    outputs = {n: _Output(f"{prefix}.{n}.npy", shape, _TYPES[n]) for n, shape in shapes.items()}
    try:
        with ThreadPoolExecutor(1, _THREAD) as writer:  # beside the copy of the next block
            written: Future[None] | None = None
            for block in in_order(slots, hashes, BLOCK_ROWS):
                with lock:
                    columns = _columns(store.rows_at(block))
                if written is not None:
                    written.result()
                written = writer.submit(_write_block, outputs, columns)
            if written is not None:
                written.result()
        for start in range(0, len(waiting), BLOCK_ROWS):
            outputs["waiting"].write(waiting[start : start + BLOCK_ROWS])
        with ThreadPoolExecutor(len(outputs), _THREAD) as writers:  # a disk takes several files
            sums = writers.map(_Output.finish, outputs.values())
            checksums = dict(zip(outputs, sums, strict=True))
    finally:
        for output in outputs.values():
            output.close()
    part = {"rows": len(slots), "waiting": len(waiting), "checksums": checksums}
    table = {"settings": store.settings, "clock": clock, "since": None, "ranks": ranks}
    _write_json(f"{prefix}.json", {**FORMAT, **table, "part": part})


def write_manifest(folder: str, ranks: int, *, changed: bool = False) -> None:
    """Makes the parts of all ranks a table. One rank calls it, when all have written theirs.

    Args:
        folder, ranks: See :func:`write_part`.
        changed: Whether rows were changed outside of a fit.

    Raises:
        ResourceError: A part is missing, or of another table or step.
    """
    described, parts = None, []
    for rank in range(ranks):
        path = f"{folder}/{_name(rank, ranks)}.json"
        found = read_json(path)
        parts.append(found.pop("part", None))
        if described is not None and found != described:
            raise _damaged(path, "the settings and clock of the other parts", "others")
        described = found
    manifest = {**(described or {}), "changed": changed, "parts": parts}
    _write_json(f"{folder}/{MANIFEST}", manifest)


def is_changed(folder: Path) -> bool:
    """Whether the tables of a folder are whole, and were changed outside of a fit."""
    with contextlib.suppress(ResourceError):
        found = [read_json(str(path)) for path in folder.glob(f"*/{MANIFEST}")]
        return any(manifest.get("changed") is True for manifest in found)
    return False


def discard(folder: str) -> None:
    """Deletes a folder's manifest, if there is one: it then has no table."""
    storage.delete(f"{folder}/{MANIFEST}")


def delete_table(folder: str) -> None:
    """Deletes the files of a whole table, the manifest first; of a damaged one nothing."""
    with contextlib.suppress(ResourceError):
        paths = TableFiles(folder).paths()
        discard(folder)
        for path in paths:
            storage.delete(f"{folder}/{path}")


class TableFiles:
    """A table in a folder.

    Args:
        folder: A path or URI.

    Raises:
        ResourceError: There is no manifest, or it is damaged.
    """

    def __init__(self, folder: str) -> None:
        self.folder = str(folder).rstrip("/")
        path = f"{self.folder}/{MANIFEST}"
        found = read_json(path)
        try:
            if {key: found[key] for key in FORMAT} != FORMAT:
                raise ValueError(f"another format: {[found[key] for key in FORMAT]}")
            self.settings: dict[str, object] = dict(found["settings"])
            store = RowStore.from_settings(self.settings)
            self.clock, self.ranks = int(found["clock"]), int(found["ranks"])
            if not 0 <= self.clock <= _MAX_CLOCK or found["since"] is not None:
                raise ValueError(f"clock {self.clock:.6e}, since {found['since']}")
            self._parts = [
                (
                    _shapes(store, int(part["rows"]), int(part["waiting"])),
                    {str(n): [int(c) for c in sums] for n, sums in part["checksums"].items()},
                )
                for part in found["parts"]
            ]
            for shapes, checksums in self._parts:
                counts = {name: -(-shape[0] // BLOCK_ROWS) for name, shape in shapes.items()}
                if counts != {name: len(sums) for name, sums in checksums.items()}:
                    raise ValueError("checksums that do not fit the rows")
            if len(self._parts) != self.ranks or self.ranks < 1:
                raise ValueError(f"{len(self._parts)} parts of {self.ranks}")
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            ArithmeticError,
            MemoryError,
        ) as error:
            told = f"{type(error).__name__}: {str(error)[:200]}"
            raise _damaged(path, "the manifest of a table", told) from error

    def __len__(self) -> int:
        return sum(shapes["ids"][0] for shapes, _ in self._parts)

    def paths(self) -> list[str]:
        """The files of all parts, from the folder on."""
        found = []
        for part, (shapes, _) in enumerate(self._parts):
            prefix = _name(part, self.ranks)
            found += [f"{prefix}.{name}.npy" for name in shapes] + [f"{prefix}.json"]
        return found

    def array(self, part: int, name: str) -> Array:
        """One array of a part, mapped into memory where the file is on this machine.

        Raises:
            ResourceError: It cannot be read, or is not what the manifest says.
        """
        shape = self._parts[part][0][name]
        path = f"{self.folder}/{_name(part, self.ranks)}.{name}.npy"
        local = storage.path_on_disk(path)
        content = storage.read_bytes(path) if local is None else b""
        found: Array
        try:
            if local is None:
                found = np.load(io.BytesIO(content), allow_pickle=False)
            else:
                open_regular(local).close()  # a pipe would be waited for
                found = np.load(local, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy reads the head of an array as Python's syntax
            told = f"{type(error).__name__}: {str(error)[:200]}"
            raise _damaged(path, f"an array of shape {shape}", told) from error
        if found.shape != shape or found.dtype != np.dtype(_TYPES[name]):
            told = f"{found.dtype} of shape {found.shape}"
            raise _damaged(path, f"{_TYPES[name]} of shape {shape}", told)
        return found

    def blocks(self, rank: int, ranks: int) -> Iterator[TableRows]:
        """The rows that ``rank`` of ``ranks`` owns, by their hashes; checksums are tested."""
        for part in self._overlapping(rank, ranks):
            names = [name for name in self._parts[part][0] if name != "waiting"]
            for found in self._ranges(part, names, rank, ranks):
                state = found.get("state", np.zeros((len(found["ids"]), 0), np.float32))
                meta = [*found["meta"].T] if "meta" in found else []
                yield TableRows(found["ids"], found["values"], state, *meta)

    def waiting(self, rank: int, ranks: int) -> Iterator[Array]:
        """Ids without a row and how often each was seen, that ``rank`` owns: (n, 2)."""
        for part in self._overlapping(rank, ranks):
            if "waiting" in self._parts[part][0]:
                for found in self._ranges(part, ["waiting"], rank, ranks):
                    yield found["waiting"]

    def _overlapping(self, rank: int, ranks: int) -> Iterator[int]:
        first, end = hash_range(rank, ranks)
        for part in range(self.ranks):
            start, stop = hash_range(part, self.ranks)
            if start < end and first < stop:
                yield part

    def _ranges(
        self, part: int, names: list[str], rank: int, ranks: int
    ) -> Iterator[dict[str, Array]]:
        """Blocks of some arrays of a part, cut to the hashes that ``rank`` owns."""
        first, end = hash_range(rank, ranks)
        arrays = {name: self.array(part, name) for name in names}
        keys = arrays["ids"] if "ids" in arrays else arrays["waiting"][:, 0]
        low, high = _first_from(keys, first), _first_from(keys, end)
        for block in range(low // BLOCK_ROWS, -(-high // BLOCK_ROWS)):
            start = block * BLOCK_ROWS
            wanted = slice(max(low - start, 0), high - start)
            found = {}
            for name, array in arrays.items():
                found[name] = self.tested(part, name, block, array)[wanted]
            yield found

    def tested(self, part: int, name: str, block: int, array: Array) -> Array:
        """A block of an array of a part; raises ResourceError if its checksum is another."""
        start = block * BLOCK_ROWS
        whole = np.ascontiguousarray(array[start : start + BLOCK_ROWS])
        if zlib.crc32(whole.data) != self._parts[part][1][name][block]:
            path = f"{self.folder}/{_name(part, self.ranks)}.{name}.npy"
            raise _damaged(path, "the bytes that were written", f"others in block {block}")
        return whole


def load_rows(store: RowStore, folder: str, rank: int, ranks: int) -> None:
    """Loads the rows that ``rank`` of ``ranks`` owns, however many ranks wrote them.

    Raises:
        ResourceError: The files are not whole.
        ConfigError: The table has another form than the store.
    """
    files = TableFiles(folder)
    form = {key: store.settings[key] for key in ("dim", "rule")}
    found = {key: files.settings[key] for key in form}
    if form != found:
        raise ConfigError(
            f"the table in {folder!r} has another form than {store.name!r}", expected=str(form),
            received=str(found),
        )  # fmt: skip
    for number, block in enumerate(files.blocks(rank, ranks)):
        if number == 0:  # the files were found to be as long as they say
            store.reserve(len(files) // ranks)
        store.load(*block)
    for waiting in files.waiting(rank, ranks):
        store.waiting.count(waiting[:, 0], waiting[:, 1])
    store.clock = files.clock


class _Output:
    """An array that is written block by block; nobody sees it before it is whole."""

    def __init__(self, path: str, shape: tuple[int, ...], dtype: str) -> None:
        self._path, self._local = path, storage.path_on_disk(path)
        self._partial, self._checksums = "", list[int]()
        self._memory = io.BytesIO()
        self._file: BinaryIO = self._memory
        with storage.explained("written", path):
            if self._local is not None:
                head, tail = os.path.split(self._local)
                os.makedirs(head, exist_ok=True)
                self._partial = os.path.join(head, f".{tail}-{secrets.token_hex(8)}.part")
                self._file = open(self._partial, "xb")  # noqa: SIM115 (closed by close)
            header = {"descr": dtype, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(self._file, header)
        self._dtype = dtype

    def write(self, block: Array) -> None:
        block = np.ascontiguousarray(block, self._dtype)
        self._checksums.append(zlib.crc32(block.data))
        with storage.explained("written", self._path):
            self._file.write(block.data)

    def finish(self) -> list[int]:
        """Puts the file into its place; returns the checksum of each block."""
        if self._local is None:
            storage.write_bytes(self._path, self._memory.getvalue())
        else:
            with storage.explained("written", self._path):
                self._file.flush()
                os.fsync(self._file.fileno())
                os.replace(self._partial, self._local)
                self._partial = ""
        return self._checksums

    def close(self) -> None:
        self._file.close()
        if self._partial:
            storage.delete(self._partial)


def _write_block(outputs: dict[str, _Output], columns: dict[str, Array]) -> None:
    for name, block in columns.items():
        outputs[name].write(block)


def _shapes(store: RowStore, rows: int, waiting: int) -> dict[str, tuple[int, ...]]:
    """The arrays of a part and their shapes; one without numbers has no file."""
    if rows < 0 or waiting < 0:
        raise ValueError("a number of rows below 0")
    shapes: dict[str, tuple[int, ...]] = {"ids": (rows,), "values": (rows, store.dim)}
    if width := store.rule.width(store.dim):
        shapes["state"] = (rows, width)
    if store.tracks:
        shapes["meta"] = (rows, 2)
    if waiting:
        shapes["waiting"] = (waiting, 2)
    return shapes


def _columns(rows: TableRows) -> dict[str, Array]:
    found: dict[str, Array] = {"ids": rows.ids, "values": rows.values}
    if rows.state.shape[1]:
        found["state"] = rows.state
    if rows.counts is not None and rows.clocks is not None:
        found["meta"] = np.stack([rows.counts, rows.clocks], axis=1)
    return found


def _first_from(ids: Array, wanted: int) -> int:
    """The place of the first of ``ids``, sorted by hash, whose hash is ``wanted`` or more."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if int(mix64(np.asarray(ids[middle : middle + 1]))[0]) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


def _name(rank: int, ranks: int) -> str:
    return f"part-{rank:05d}-of-{ranks:05d}"


def _write_json(path: str, content: dict[str, Any]) -> None:
    storage.write_bytes(path, json.dumps(content).encode())


def read_json(path: str) -> dict[str, Any]:
    content = storage.read_bytes(path, _MAX_JSON_BYTES)
    try:
        found = json.loads(content)
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "a JSON object", str(error)[:200]) from error
    return found


def _damaged(path: str, expected: str, received: str) -> DamagedFileError:
    return DamagedFileError(
        f"{path!r} is not whole, or of something else", expected=expected, received=received,
        hint="the checkpoint before it, or a copy of this folder",
    )  # fmt: skip
