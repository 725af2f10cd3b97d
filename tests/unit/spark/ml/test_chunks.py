"""A stage's bytes in files of this machine's disk: read as they were written, or refused."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.errors import ModelError
from sparkdl.spark.ml import files as ml_files

CHUNK, PER_FILE = 100, 4


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where 'the session' has every path; files of 4 chunks of 100 bytes."""
    monkeypatch.setattr(ml_files, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(ml_files, "_CHUNKS_PER_FILE", PER_FILE)
    monkeypatch.setattr(ml_files, "folder_here", lambda spark, path: path)
    return tmp_path / "model"


def read(folder: Path, content: bytes) -> bytes:
    said = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return ml_files.read_chunks(None, str(folder), said, "/stage")


def content_of(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize("size", [0, 1, CHUNK, PER_FILE * CHUNK, PER_FILE * CHUNK + 1, 1234])
def test_bytes_come_back(folder: Path, size: int) -> None:
    content = content_of(size)
    ml_files.write_here(str(folder), content)
    assert len(list(folder.iterdir())) == max(1, -(-size // (PER_FILE * CHUNK)))
    assert read(folder, content) == content


def test_files_of_any_names_and_rows_in_any_order(folder: Path) -> None:
    """As Spark may have written them: their names do not say which is first."""
    content = content_of(1234)
    ml_files.write_here(str(folder), content)
    files = sorted(folder.iterdir())
    for number, path in enumerate(files):
        path.rename(folder / f"part-00000-{9 - number}.parquet")
    first = folder / "part-00000-9.parquet"
    table = pq.read_table(first)
    pq.write_table(table.take(pa.array([2, 0, 3, 1])), first)
    (folder / "_SUCCESS").touch()
    (folder / ".part.parquet.crc").write_bytes(b"crc")
    os.mkfifo(folder / "pipe.parquet")
    assert read(folder, content) == content


def lose(folder: Path) -> None:
    (folder / "part-00001.parquet").unlink()


def lose_all(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def cut(folder: Path) -> None:
    path = folder / "part-00001.parquet"
    path.write_bytes(path.read_bytes()[:-200])


def change(folder: Path) -> None:
    path = folder / "part-00001.parquet"
    rows = pq.read_table(path)
    other = pa.array([b"x" * CHUNK] * len(rows), pa.binary())
    pq.write_table(rows.set_column(1, "chunk", other), path)


def repeat(folder: Path) -> None:
    shutil.copy(folder / "part-00001.parquet", folder / "part-00009.parquet")


@pytest.mark.parametrize("damage", [lose, lose_all, cut, change, repeat])
def test_damage_is_told(folder: Path, damage: Any) -> None:
    content = content_of(1234)
    ml_files.write_here(str(folder), content)
    damage(folder)
    with pytest.raises(ModelError, match=r"(?s)the model in '/stage' is not whole.*hint"):
        read(folder, content)


@pytest.mark.parametrize("size", [0, 1233, 1235, 2**62, -1, "1234", None])
def test_another_size_than_was_said_is_told(folder: Path, size: Any) -> None:
    content = content_of(1234)
    ml_files.write_here(str(folder), content)
    said = {"bytes": size, "sha256": hashlib.sha256(content).hexdigest()}
    with pytest.raises(ModelError, match=r"(?s)the model in '/stage' is not whole.*hint"):
        ml_files.read_chunks(None, str(folder), said, "/stage")


def write_bomb(folder: Path, rows: int) -> None:
    """One value of a MiB, which the file holds once, in so many rows."""
    value = pa.DictionaryArray.from_arrays(
        pa.array([0] * rows, pa.int32()), pa.array([bytes(1 << 20)], pa.binary())
    )
    folder.mkdir()
    table = pa.table({"idx": pa.array(range(rows), pa.int32()), "chunk": value})
    pq.write_table(
        table, folder / "part-00000.parquet", use_dictionary=["chunk"], store_schema=False
    )


@pytest.mark.parametrize(
    ("said", "told"),
    [(1234, "is not whole"), (60 << 20, "is not whole"), (400 << 20, "would fill")],
)
def test_no_more_is_read_than_was_said_and_than_the_files_can_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch, said: int, told: str
) -> None:
    """Before, a file of some KiB was unpacked to 400 MiB, whatever size was said."""
    write_bomb(folder, 400)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2 << 20
    sizes: list[int] = []
    in_order = ml_files._in_order

    def hear(tables: Iterable[pa.Table], model: str) -> Iterator[list[pa.Buffer]]:
        def heard() -> Iterator[pa.Table]:
            for table in tables:
                sizes.append(table.nbytes)
                yield table

        return in_order(heard(), model)

    monkeypatch.setattr(ml_files, "_in_order", hear)
    with pytest.raises(ModelError, match=f"(?s)^the model in '/stage' {told}.*hint"):
        ml_files.read_chunks(None, str(folder), {"bytes": said, "sha256": ""}, "/stage")
    assert sum(sizes) < said + (5 << 20)


@pytest.mark.parametrize("codec", ["gzip", "zstd", "brotli"])
def test_files_that_could_hide_any_size_are_refused(folder: Path, codec: str) -> None:
    content = content_of(1234)
    ml_files.write_here(str(folder), content)
    path = folder / "part-00001.parquet"
    pq.write_table(pq.read_table(path), path, compression=codec)
    with pytest.raises(ModelError, match=rf"(?s)is not whole.*compressed by {codec.upper()}"):
        read(folder, content)
