"""Tables in files: each rank writes its part, and a manifest that comes last makes them a table.

To look rows up, files of this machine are mapped, and not read as a whole.

::

    part-00002-of-00004.ids.npy  .values.npy  .state.npy  .meta.npy    sorted by the hash of the id
    part-00002-of-00004.waiting.npy                                    ids without a row, counted
    part-00002-of-00004.json                                           rows and checksums
    manifest.json                                                      settings, clock, all parts

A folder without a manifest is no table: a writer that is killed leaves none. Parts are ranges of
hashes (:mod:`sparkdl.tables.index`), so that any number of ranks loads them.
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
from sparkdl.tables.admission import Mask
from sparkdl.tables.classes import Chunk
from sparkdl.tables.functions import Statistics
from sparkdl.tables.hashing import Hashes, Ids, mix64, signed
from sparkdl.tables.index import Slots, hash_range, in_order, owner
from sparkdl.tables.store import BLOCK_ROWS, RowStore, TableRows, Unknown
from sparkdl.weights import FloatArray

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
    _write_json(f"{folder}/{MANIFEST}", {**(described or {}), "changed": changed, "parts": parts})


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
            yield {n: self.tested(part, n, block, array)[wanted] for n, array in arrays.items()}

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


class TableReader:
    """The rows of a table in a folder, for predictions.

    Files of this machine are mapped: memory holds the blocks that were touched. Those elsewhere are
    read as a whole. A pickled reader opens its folder again. The checksums of a block of 16,384
    rows are tested when one of its rows is looked up first, which takes .26 ms for rows of 16
    numbers where the file is in memory (later lookups: 1,000 ids in .76 ms). Thread-safe.

    Args:
        folder: A path or URI.

    Raises:
        ResourceError: It is no table, or its files are not whole.
    """

    def __init__(self, folder: str) -> None:
        self._files = TableFiles(folder)
        store = RowStore.from_settings(self._files.settings)
        self.name, self.dim, self._start = store.name, store.dim, store.start
        ranks = range(self._files.ranks)
        self._ids = [self._files.array(part, "ids") for part in ranks]
        self._values = [self._files.array(part, "values") for part in ranks]
        self._untested = [np.ones(-(-len(ids) // BLOCK_ROWS), bool) for ids in self._ids]

    def __reduce__(self) -> tuple[Any, ...]:
        return TableReader, (self._files.folder,)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def folder(self) -> str:
        """The path or URI."""
        return self._files.folder

    @property
    def parts(self) -> int:
        """Parts of the table: as many as there were ranks."""
        return self._files.ranks

    @property
    def counts(self) -> bool:
        """Whether it is kept how often ids were seen."""
        return RowStore.from_settings(self._files.settings).tracks

    @property
    def step(self) -> int:
        """Steps after which the rows were written; see ``to_dataframe(since=...)``."""
        return self._files.clock

    def statistics(self) -> Statistics:
        """Numbers about all values; ``.get('nrm2')`` and other names that Angel's users know."""
        found = Statistics()
        for chunk in self.chunks(BLOCK_ROWS):
            found = found.joined(Statistics.of(chunk.centers))
        return found

    def pull(self, ids: Ids, default: Unknown = "zeros") -> FloatArray:
        """The rows of ids, of shape (ids, dim); see :meth:`look_up`."""
        return self.look_up(ids, default)[0]

    def look_up(self, ids: Ids, default: Unknown = "zeros") -> tuple[FloatArray, Mask]:
        """The rows of ids, and which of them the table has.

        Args:
            ids: Any, also one several times.
            default: What others have: zeros, or the start value that they had in training.

        Raises:
            DataError: An id is of uint64, and too large for int64.
            ResourceError: The bytes of the rows are not those that were written.
        """
        ids = signed(ids)
        rows, known = np.zeros((len(ids), self.dim), np.float32), np.zeros(len(ids), bool)
        hashes, owners = mix64(ids), owner(ids, self._files.ranks)
        for part in range(self._files.ranks):
            asked = np.flatnonzero(owners == part)
            if not len(asked) or not len(self._ids[part]):
                continue
            places = self._places(part, hashes[asked])
            self._test(part, places // BLOCK_ROWS)
            hits = self._ids[part].take(places, mode="clip") == ids[asked]
            found = asked[hits]
            known[found] = True
            rows[found] = self._values[part][places[hits]]
        if default == "initial":
            unknown = np.flatnonzero(~known)
            rows[unknown] = self._start.rows(ids[unknown])
        return rows, known

    def chunks(self, rows: int) -> Iterator[Chunk]:
        """All rows with their ids, in pieces of at most ``rows``."""
        for number, (ids, values) in enumerate(zip(self._ids, self._values, strict=True)):
            self._test(number, np.arange(len(self._untested[number])))
            for start in range(0, len(ids), rows):
                part = slice(start, start + rows)
                yield Chunk(np.asarray(ids[part], np.int64), np.asarray(values[part], np.float32))

    def _test(self, part: int, blocks: Slots) -> None:
        """Tests the checksums of blocks of a part that were not used before."""
        blocks = np.minimum(blocks, len(self._untested[part]) - 1)
        for block in np.unique(blocks[self._untested[part][blocks]]).tolist():
            for name, array in (("ids", self._ids[part]), ("values", self._values[part])):
                self._files.tested(part, name, block, array)
            self._untested[part][block] = False

    def _places(self, part: int, hashes: Hashes) -> Slots:
        """The place of the first id of a part whose hash is that or more, for each hash.

        Hashes are spread evenly: a place is guessed, guessed again from the hash that is there,
        and looked for in 6 deviations around that. So few pages of the file are touched.
        """
        size, ids = len(self._ids[part]), self._ids[part]
        first, end = hash_range(part, self._files.ranks)
        per_hash = size / (end - first)
        guess = ((hashes - np.uint64(first)).astype(np.float64) * per_hash).astype(np.int64)
        guess = np.minimum(guess, size - 1)
        missed = (hashes - mix64(ids.take(guess))).view(np.int64)
        guess = np.clip(guess + (missed * per_hash).astype(np.int64), 0, size)
        around = int(6 * np.sqrt(3 * np.sqrt(size))) + 16
        low, high = np.maximum(guess - around, 0), np.minimum(guess + around, size)
        places = self._bisected(part, hashes, low, high)
        outside = ((places == low) & (low > 0)) | ((places == high) & (high < size))
        again = np.flatnonzero(outside)
        if len(again):
            whole = np.zeros(len(again), np.int64), np.full(len(again), size)
            places[again] = self._bisected(part, hashes[again], *whole)
        return places

    def _bisected(self, part: int, hashes: Hashes, low: Slots, high: Slots) -> Slots:
        low, high, ids = low.copy(), high.copy(), self._ids[part]
        for _ in range(int((high - low).max()).bit_length()):
            middle = (low + high) >> 1
            less = (mix64(ids.take(middle, mode="clip")) < hashes) & (low < high)
            low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
        return low


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
