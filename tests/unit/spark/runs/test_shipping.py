"""A task on its way to the executors: large ones in several pieces, each of bounded size."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.errors import TransportError
from sparkdl.learner.archives.archive import ModelArchive
from sparkdl.process import payload
from sparkdl.process.payload import Pickled
from sparkdl.spark.executor.stage import TaskPieces, content_of
from sparkdl.spark.runs import launcher
from sparkdl.spark.runs.launcher import ship

FILE = np.random.default_rng(0).bytes(1000)
TABLE = np.arange(300, dtype="float32").reshape(-1, 4)
ARCHIVE = ModelArchive(FILE, b"code", "tensorflow", "key", values={"0": TABLE, "1": TABLE[:2]})


class Broadcast:
    """As PySpark's on an executor: a file, or with encryption the value alone."""

    def __init__(self, content: bytes, path: Path | None) -> None:
        self.size, self.destroyed = len(content), False
        if path is None:
            self.value = content
        else:
            path.write_bytes(pickle.dumps(content))
            self._path = str(path)

    def destroy(self) -> None:
        self.destroyed = True


@dataclass
class Context:
    folder: Path | None
    made: list[Broadcast] = field(default_factory=list)

    def broadcast(self, content: bytes) -> Broadcast:
        path = self.folder and self.folder / str(len(self.made))
        self.made.append(Broadcast(content, path))
        return self.made[-1]


class Session:
    """As a session of Spark Connect, whose files the executors have by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def addArtifacts(self, *paths: str, file: bool) -> None:
        for path in paths:
            Path(path).rename(self.folder / Path(path).name)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, size in (
        (launcher, "INLINE_BYTES", 100), (launcher, "FILE_BYTES", 100),
        (payload, "LARGE_BYTES", 100), (payload, "PIECE_BYTES", 192),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, size)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_large_task_goes_in_pieces(tmp_path: Path, encrypted: bool) -> None:
    context = Context(None if encrypted else tmp_path)
    task: Any = {"bytes": FILE, "list": [TABLE, TABLE[:2]], "columns": np.asfortranarray(TABLE)}
    shipped = ship(task, context)
    assert isinstance(shipped, TaskPieces)
    assert len(context.made) > 10
    assert max(b.size for b in context.made) <= 192 + 64
    for _ in range(2):  # what one task writes into its arrays no other one sees
        loaded = payload.load(content_of(shipped))
        assert loaded["bytes"] == FILE
        for array in (loaded["list"][0], loaded["columns"]):
            np.testing.assert_array_equal(array, TABLE)
            assert array.flags.writeable
            assert array.flags.aligned
            array[:] = 0
        np.testing.assert_array_equal(loaded["list"][1], TABLE[:2])
    shipped.destroy()
    assert all(b.destroyed for b in context.made)


@pytest.mark.usefixtures("small_pieces")
def test_a_models_file_is_read_by_who_needs_it(tmp_path: Path) -> None:
    content = content_of(ship(ARCHIVE, Context(tmp_path)))  # type: ignore[arg-type]
    assert isinstance(content, Pickled)
    assert content.pieces == tuple(str(tmp_path / str(n)) for n in range(len(content.pieces)))
    archive = payload.load(pickle.loads(pickle.dumps(content)))  # by a process of the rank's own
    for path in content.pieces:  # another task's end takes nothing from this one
        Path(path).unlink()
    assert (archive.key, archive.objects) == ("key", b"code")
    assert not isinstance(archive.content, bytes)
    assert b"".join(payload.parts_of(archive.content)) == FILE
    again = payload.load(payload.dump(archive))
    assert b"".join(payload.parts_of(again.content)) == FILE
    for each in (archive, again):
        np.testing.assert_array_equal(each.values["0"], TABLE)
    with pytest.raises(TransportError, match="missing on its executor"):
        payload.load(content)


@pytest.mark.usefixtures("small_pieces")
def test_over_connect_the_pieces_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task: Any = [FILE, TABLE]
    shipped = ship(task, None, Session(tmp_path))
    monkeypatch.setattr("pyspark.SparkFiles.get", lambda name: str(tmp_path / name))
    loaded = payload.load(content_of(shipped))
    assert loaded[0] == FILE
    np.testing.assert_array_equal(loaded[1], TABLE)


@pytest.mark.usefixtures("small_pieces")
def test_what_lies_in_one_piece_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "PIECE_BYTES", 1 << 16)
    content = content_of(ship(ARCHIVE, Context(tmp_path)))  # type: ignore[arg-type]
    assert isinstance(content, Pickled)
    for buffer in content.read():
        assert isinstance(buffer, memoryview)
        assert isinstance(buffer.obj, mmap)


def test_a_small_task_and_one_over_connect_go_as_they_are() -> None:
    small: Any = b"small"
    assert ship(small, Context(None)) == payload.dump(small)
    large: Any = bytes(launcher.INLINE_BYTES + 1)
    assert ship(large, None) == payload.dump(large)
    arrays: Any = np.zeros(payload.LARGE_BYTES, "int8")
    assert ship(arrays, None) == payload.dump(arrays)
