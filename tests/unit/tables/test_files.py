"""Tables in files: any number of ranks, kills, damage, deltas, lookups without loading."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sparkdl.errors import ConfigError, DataError, ProtocolError, ResourceError
from sparkdl.files import storage
from sparkdl.files.file_system import DamagedFileError
from sparkdl.tables.admission import CountFilter
from sparkdl.tables.checkpoints import TableCheckpoints, TableReference, reference_in
from sparkdl.tables.files import (
    MANIFEST,
    TableFiles,
    TableReader,
    discard,
    load_rows,
    write_manifest,
    write_part,
)
from sparkdl.tables.index import owner
from sparkdl.tables.store import RowStore

IDS = np.concatenate(
    [
        np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 9_990),
        [-(2**63), 2**63 - 1, -1, 0, 1, 2, 3, 4, 5, 6],
    ]
)


def make(rule: str = "adagrad", tracks: bool = False, filtered: bool = False) -> RowStore:
    entry = CountFilter(2) if filtered else None
    return RowStore(3, rule, name="ads", entry=entry, tracks=tracks)


def push(stores: list[RowStore], ids: np.ndarray, step: int = 0) -> None:
    """One step on the ranks that own the ids."""
    owners = owner(ids, len(stores))
    for rank, store in enumerate(stores):
        own = ids[owners == rank]
        store.push(own, np.random.default_rng(step).normal(size=(len(own), 3)), 0.1)


def pull(stores: list[RowStore], ids: np.ndarray) -> np.ndarray:
    owners = owner(ids, len(stores))
    rows = np.zeros((len(ids), 3), np.float32)
    for rank, store in enumerate(stores):
        rows[owners == rank] = store.pull(ids[owners == rank])
    return rows


def write(stores: list[RowStore], folder: Path | str) -> str:
    for rank, store in enumerate(stores):
        write_part(store, str(folder), rank, len(stores))
    write_manifest(str(folder), len(stores))
    return str(folder)


def load(folder: str, stores: list[RowStore]) -> list[RowStore]:
    for rank, store in enumerate(stores):
        load_rows(store, folder, rank, len(stores))
    return stores


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"])
@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (5, 2), (1, 4)])
def test_parts_of_some_ranks_are_loaded_by_others(
    tmp_path: Path, rule: str, writers: int, readers: int
) -> None:
    before = [make(rule, tracks=True) for _ in range(writers)]
    push(before, IDS)
    after = load(write(before, tmp_path), [make(rule, tracks=True) for _ in range(readers)])
    assert sum(map(len, after)) == len(IDS)
    assert [len(s) for s in after] == np.bincount(owner(IDS, readers)).tolist()
    assert (pull(after, IDS) == pull(before, IDS)).all()
    assert {s.clock for s in after} == {1}
    g = np.random.default_rng(9).normal(size=(len(IDS), 3)).astype(np.float32)
    for stores in (before, after):  # the state came, too: the next step is the same
        owners = owner(IDS, len(stores))
        for rank, store in enumerate(stores):
            store.push(IDS[owners == rank], g[owners == rank], 0.1)
    assert (pull(after, IDS) == pull(before, IDS)).all()
    counts = np.concatenate([np.asarray(s.export().counts) for s in after])
    assert (counts == 2).all()


def test_ids_that_wait_for_a_row_are_saved(tmp_path: Path) -> None:
    before = [make(filtered=True) for _ in range(2)]
    push(before, IDS[:4000])
    assert sum(map(len, before)) == 0
    after = load(write(before, tmp_path), [make(filtered=True) for _ in range(3)])
    push(after, IDS)
    assert sum(map(len, after)) == 4000


def test_a_writer_that_was_killed_leaves_no_table(tmp_path: Path) -> None:
    before = [make() for _ in range(2)]
    push(before, IDS)
    whole = write(before, tmp_path / "1")
    push(before, IDS, step=1)
    torn = str(tmp_path / "2")
    write_part(before[0], torn, 0, 2)
    with pytest.raises(ResourceError, match="part-00001-of-00002"):
        write_manifest(torn, 2)
    with pytest.raises(ResourceError, match=MANIFEST):
        TableReader(torn)
    assert len(load(whole, [make()])[0]) == len(IDS)


@pytest.mark.parametrize("place", ["disk", "memory://"])
def test_tables_of_older_steps_go_and_those_of_others_stay(tmp_path: Path, place: str) -> None:
    if place != "disk":
        pytest.importorskip("fsspec")
    top = str(tmp_path) if place == "disk" else f"memory://{tmp_path.name}"
    store = make()
    push([store], IDS[:10])
    saved = TableReference(f"{top}/model.keras.tables", 1, ("ads",))
    write_part(store, saved.folder_of("ads"), 0, 1)
    write_manifest(saved.folder_of("ads"), 1)
    checkpoints = TableCheckpoints(f"{top}/run/tables")
    references = [saved]
    for step in range(2, 7):  # a run that began with the tables of a saved model
        former = references[-1].to_bytes()
        references.append(checkpoints.after(former, step, ("ads",)))
        checkpoints.write(references[-1], {"ads": store}, 0, 1)
        checkpoints.finish(references[-1], 1, former)
    there = [storage.exists(f"{r.folder_of('ads')}/{MANIFEST}") for r in references]
    assert there == [True, False, False, True, True, True]
    changed = checkpoints.changed(references[-1])
    again = checkpoints.changed(changed)
    assert changed.older == (references[-1].folder, references[-2].folder) == again.older
    assert TableCheckpoints.of(changed) == checkpoints
    assert TableCheckpoints.of(saved).folder == saved.folder


def test_nothing_is_left_of_an_array_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    store = make()
    push([store], IDS)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="no space left"):
        write_part(store, str(tmp_path), 0, 1)
    assert list(tmp_path.iterdir()) == []


def test_parts_of_two_steps_are_no_table(tmp_path: Path) -> None:
    stores = [make() for _ in range(2)]
    write_part(stores[0], str(tmp_path), 0, 2)
    push(stores, IDS)
    write_part(stores[1], str(tmp_path), 1, 2)
    with pytest.raises(DamagedFileError, match="other parts"):
        write_manifest(str(tmp_path), 2)


def test_a_table_is_not_written_over_before_it_is_discarded(tmp_path: Path) -> None:
    store = make()
    folder = write([store], tmp_path)
    with pytest.raises(ResourceError, match="has a table already"):
        write_part(store, folder, 0, 1)
    discard(folder)
    push([store], IDS)
    assert len(TableFiles(write([store], folder))) == len(IDS)


def test_an_empty_table_is_a_table(tmp_path: Path) -> None:
    folder = write([make("sgd"), make("sgd")], tmp_path)
    assert len(load(folder, [make("sgd")])[0]) == 0
    assert (TableReader(folder).pull(IDS) == 0).all()


def test_rows_are_looked_up_without_loading_the_table(tmp_path: Path) -> None:
    stores = [make() for _ in range(3)]
    push(stores, IDS)
    reader = pickle.loads(pickle.dumps(TableReader(write(stores, tmp_path))))
    asked = np.concatenate([IDS[::-3], IDS[:5], np.arange(100, 200)])
    rows, known = reader.look_up(asked)
    assert known.tolist() == [True] * (len(asked) - 100) + [False] * 100
    assert (rows[:-100] == pull(stores, asked[:-100])).all()
    assert (rows[-100:] == 0).all()
    initial = reader.pull(asked, default="initial")
    assert (initial[-100:] == stores[0].start.rows(asked[-100:])).all()
    assert (initial[:-100] == rows[:-100]).all()
    assert (len(reader), reader.dim, reader.name) == (len(IDS), 3, "ads")


def test_a_table_on_another_file_system_is_read_as_a_whole(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    stores = [make() for _ in range(2)]
    push(stores, IDS)
    folder = write(stores, "memory://tables/ads")
    assert (TableReader(folder).pull(IDS) == pull(stores, IDS)).all()
    assert (pull(load(folder, [make() for _ in range(3)]), IDS) == pull(stores, IDS)).all()


def test_a_table_of_another_form_is_refused(tmp_path: Path) -> None:
    folder = write([make("sgd")], tmp_path)
    with pytest.raises(ConfigError, match="another form"):
        load_rows(make("adagrad"), folder, 0, 1)


PART = "part-00000-of-00001"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (f"{PART}.values.npy", lambda b: b[:-1]),
        (f"{PART}.values.npy", lambda b: b[:-1] + bytes([b[-1] ^ 1])),
        (f"{PART}.ids.npy", lambda b: b[:2000]),
        (f"{PART}.ids.npy", lambda b: b.replace(b"<i8", b"|O8")),
        (f"{PART}.ids.npy", lambda b: b"\x80\x04" + b),
        (f"{PART}.state.npy", lambda b: b.replace(b"(10000, 3)", b"(99999, 3)")),
        (MANIFEST, lambda b: b[:50]),
        (MANIFEST, lambda b: b"[1]"),
        (MANIFEST, lambda b: b.replace(b'"rows": 10000', b'"rows": -5')),
        (MANIFEST, lambda b: b.replace(b'"rows": 10000', b'"rows": 20000')),
        (MANIFEST, lambda b: b.replace(b'"dim": 3', b'"dim": 4')),
        (MANIFEST, lambda b: b.replace(b'"dim": 3', b'"dim": 1000000000000000')),
        (MANIFEST, lambda b: b.replace(b'"dim": 3', b'"dim": 1e99')),
        (MANIFEST, lambda b: b.replace(b'"rows": 10000', b'"rows": 1e999')),
        (MANIFEST, lambda b: b.replace(b'"seed": 0', b'"seed": []')),
        (MANIFEST, lambda b: b.replace(b'"uniform"', b'"normal"')),
        (MANIFEST, lambda b: b.replace(b'"ranks": 1', b'"ranks": 2')),
        (MANIFEST, lambda b: b.replace(b'"format": 1', b'"format": 9')),
        (MANIFEST, lambda b: b'{"a": ' * 5000),
        (MANIFEST, lambda b: b.replace(b'"clock": 1', b'"clock": %d' % 2**70)),
        (MANIFEST, lambda b: b.replace(b'"clock": 1', b'"clock": -1')),
        (MANIFEST, lambda b: b.replace(b'"since": null', b'"since": 2')),
        (MANIFEST, lambda b: b.replace(b'"ads"', b'"..", "a": 1')),
        (MANIFEST, lambda b: b.replace(b'"ads"', b'".."')),
        (MANIFEST, lambda b: b.replace(b'"ads"', b'"%s"' % (b"a" * 2**20))),
    ],
)
def test_files_that_are_not_whole_end_in_one_clear_error(
    tmp_path: Path, name: str, change: object
) -> None:
    store = make()
    push([store], IDS)
    folder = write([store], tmp_path)
    path = tmp_path / name
    before = path.read_bytes()
    path.write_bytes(change(before))  # type: ignore[operator]
    assert path.read_bytes() != before
    with pytest.raises((DamagedFileError, ConfigError)) as found:
        load_rows(make(), folder, 0, 1)
    assert found.value.received
    assert json.dumps(str(found.value))


def test_a_manifest_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(ResourceError, match="too long"):
        TableReader(str(tmp_path))


@pytest.mark.parametrize("name", ["..", ".", "", "a" * 201, "\u00e4" * 40, "\ud800", 3])
def test_a_name_that_is_no_folder_of_its_own_is_refused(name: object) -> None:
    with pytest.raises(ConfigError, match="cannot have this name") as found:
        RowStore(3, name=name)  # type: ignore[arg-type]
    assert len(str(found.value)) < 1000
    reference = json.dumps({"folder": "/a", "step": 1, "tables": [name], "older": []})
    if isinstance(name, str):
        with pytest.raises(ProtocolError, match="does not say where"):
            TableReference.from_bytes(reference.encode())
    assert RowStore(3, name="../a b").name == "../a b"  # as a path has it: one folder
    assert TableReference("/a", 1, ()).folder_of("../a b") == "/a/..%2Fa%20b"


@pytest.mark.parametrize("array", ["ids", "values"])
@pytest.mark.parametrize("chunks", [False, True])
def test_a_flipped_bit_is_found_when_its_block_is_looked_up(
    tmp_path: Path, array: str, chunks: bool
) -> None:
    many = np.arange(40_000)
    store = make()
    push([store], many)
    folder = write([store], tmp_path)
    path = tmp_path / f"{PART}.{array}.npy"
    before = path.read_bytes()
    place = len(before) - 100 * (8 if array == "ids" else 12)
    path.write_bytes(before[:place] + bytes([before[place] ^ 1]) + before[place + 1 :])
    reader = TableReader(folder)
    ids = np.load(tmp_path / f"{PART}.ids.npy")
    if chunks:
        with pytest.raises(DamagedFileError, match="block 2"):
            list(reader.chunks(100))
        return
    assert reader.look_up(ids[:16_384])[1].all()
    for _ in range(2):
        with pytest.raises(DamagedFileError, match="block 2"):
            reader.look_up(ids[-5:])


def test_an_id_of_another_number_is_refused(tmp_path: Path) -> None:
    store = make()
    push([store], np.arange(3))
    reader = TableReader(write([store], tmp_path))
    assert reader.look_up(np.array([2], np.uint64))[1].all()
    with pytest.raises(DataError, match="18446744073709551615"):
        reader.look_up(np.array([1, 2**64 - 1], np.uint64))
    for ids in ([1.0], [-1, 2**63], [True], ["1"], [[1, 2]], [[1], [2]], 1):
        with pytest.raises(DataError, match="no ids of a table"):
            reader.pull(np.asarray(ids))
    assert reader.pull([]).shape == (0, reader.dim)


def test_only_layers_of_ours_name_tables_in_a_model_file() -> None:
    """A layer of the user's own may have an argument of the same name."""

    def file(name: str, stored: str) -> bytes:
        buffer = io.BytesIO()
        config = {"config": {"layers": [{"registered_name": name, "config": {"stored": stored}}]}}
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("config.json", json.dumps(config))
        return buffer.getvalue()

    reference = TableReference("/runs/tables/step", 3, ("ads",))
    told = reference.to_bytes().decode()
    assert reference_in(file("sparkdl>ServedEmbedding", told)) == reference
    assert reference_in(file("mine>Layer", "in a cupboard")) is None
