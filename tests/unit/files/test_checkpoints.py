"""Checkpoints: the newest whole one is gone on from; an index leads nowhere else."""

from __future__ import annotations

import json
import os
import time
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
from keras_zip import keras_zip, with_far_part

from sparkdl.errors import ConfigError, ResourceError
from sparkdl.files.checkpoints import Checkpoints
from sparkdl.files.file_system import ArrowFileSystem, DamagedFileError, LocalFileSystem
from sparkdl.files.model_file import with_parts
from sparkdl.files.run_state import RunState


def make(folder: Path, *epochs: int, run: str = "a") -> Checkpoints:
    checkpoints = Checkpoints.at(str(folder))
    assert checkpoints is not None
    checkpoints.run = run
    for epoch in epochs:
        checkpoints.save(keras_zip(b"w" * 1000), RunState(epoch, rule=b"rule %d" % epoch))
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def index(folder: Path) -> Any:
    return json.loads((folder / "checkpoint.json").read_text())


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    assert Checkpoints.at(None) is None
    checkpoints = make(tmp_path)
    assert checkpoints.restore() is None
    make(tmp_path, 1, 2, 5, 6, 6)
    assert names(tmp_path) == ["checkpoint.json", "epoch-00005.keras", "epoch-00006.keras"]
    restored = checkpoints.restore()
    assert restored is not None
    assert (restored.state.epoch, restored.state.rule) == (6, b"rule 6")


def test_checkpoints_that_somebody_needs_are_kept(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 1)
    checkpoints.keep({1, 3})  # the third is not there yet
    make(tmp_path, 2, 3, 4, 5, 6)
    assert [e for e in range(9) if checkpoints.after(e)] == [1, 3, 5, 6]
    assert checkpoints.after(3).state.rule == b"rule 3"  # type: ignore[union-attr]
    checkpoints.keep({3})
    assert [e for e in range(9) if checkpoints.after(e)] == [3, 5, 6]
    (tmp_path / "epoch-00003.keras").write_bytes(b"cut")
    assert checkpoints.after(3) is None
    checkpoints.keep({6})
    assert [e for e in range(9) if checkpoints.after(e)] == [5, 6]
    checkpoints.clear()
    assert names(tmp_path) == []
    checkpoints.keep({1})  # nothing to do
    assert names(tmp_path) == []


def test_training_goes_on_from_an_earlier_checkpoint(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 1, 2)
    checkpoints.keep({2})
    make(tmp_path, 3, 4, 5)
    assert not checkpoints.rewind(3)
    assert checkpoints.newest() == 5
    assert checkpoints.rewind(2)
    assert checkpoints.restore().state.epoch == 2  # type: ignore[union-attr]
    assert names(tmp_path) == ["checkpoint.json", "epoch-00002.keras"]
    make(tmp_path, 3, 4)
    assert [e for e in range(9) if checkpoints.after(e)] == [2, 3, 4]
    assert not make(tmp_path / "empty").rewind(1)


def test_what_is_cleared_is_begun_again(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    assert checkpoints.newest() == 0
    checkpoints.clear()  # nothing to do
    make(tmp_path, 1, 2)
    assert checkpoints.newest() == 2
    checkpoints.clear()
    assert names(tmp_path) == []
    assert checkpoints.newest() == 0


def test_what_killed_drivers_had_begun_to_write_is_deleted_a_day_later(tmp_path: Path) -> None:
    """Before, three killed drivers left three files of the model's size for ever."""
    two_days_ago = time.time() - 2 * 86_400
    make(tmp_path, 1)
    old = f".sparkdl-{'0' * 24}.part"
    stay = [f".sparkdl-{'1' * 24}.part", ".sparkdl-mine.part", f"sparkdl-{'2' * 24}.part"]
    for name in (old, *stay):
        (tmp_path / name).write_bytes(b"part")
        if name != stay[0]:
            os.utime(tmp_path / name, (two_days_ago, two_days_ago))
    (tmp_path / f".sparkdl-{'3' * 24}.part").mkdir()
    os.utime(tmp_path / "epoch-00001.keras", (two_days_ago, two_days_ago))
    make(tmp_path)
    left = [*stay, f".sparkdl-{'3' * 24}.part", "checkpoint.json", "epoch-00001.keras"]
    assert names(tmp_path) == sorted(left)


def test_a_folder_whose_files_cannot_be_listed_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("not allowed")

    monkeypatch.setattr(LocalFileSystem, "files_in", fail)
    make(tmp_path, 1)
    assert len(names(tmp_path)) == 2


def test_a_folder_anywhere() -> None:
    checkpoints = Checkpoints.at("memory://checkpoints/of/a/run/")
    assert checkpoints is not None
    for epoch in (1, 2, 3):
        checkpoints.save(keras_zip(), RunState(epoch))
    restored = checkpoints.restore()
    assert restored is not None
    assert restored.state.epoch == 3


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:600])


def _change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[300] ^= 255
    path.write_bytes(content)


DAMAGE = {
    "truncated": _cut,
    "changed": _change,
    "empty": lambda p: p.write_bytes(b""),
    "gone": lambda p: p.unlink(),
    "with a part far behind its end": lambda p: p.write_bytes(with_far_part(2**63)),
    "of plain Keras": lambda p: p.write_bytes(keras_zip()),
    "of another epoch": lambda p: p.write_bytes((p.parent / "epoch-00002.keras").read_bytes()),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_one_before_a_damaged_one_is_gone_on_from(tmp_path: Path, kind: str) -> None:
    """Before: a raw BadZipFile, although the one before was whole."""
    checkpoints = make(tmp_path, 1, 2, 3)
    DAMAGE[kind](tmp_path / "epoch-00003.keras")
    with pytest.warns(
        RuntimeWarning, match=r"epoch-00003\.keras.*from epoch-00002\.keras, after 2"
    ):
        restored = checkpoints.restore()
    assert restored is not None
    assert (restored.state.epoch, restored.state.rule) == (2, b"rule 2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = checkpoints.restore()
    assert again is not None
    assert again.state.epoch == 2
    make(tmp_path, 4)
    assert index(tmp_path) == {
        "epoch": 4, "file": "epoch-00004.keras", "previous": "epoch-00002.keras", "run": "a",
    }  # fmt: skip


def test_another_run_in_the_folder_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """Before, its index named the newest of the other run as the one before its own."""
    make(tmp_path, 1).keep({2})
    make(tmp_path, 2, 3, 4, 5)
    second = make(tmp_path, 1, run="b")
    assert names(tmp_path) == ["checkpoint.json", "epoch-00001.keras"]
    assert index(tmp_path) == {
        "epoch": 1, "file": "epoch-00001.keras", "previous": None, "run": "b",
    }  # fmt: skip
    _cut(tmp_path / "epoch-00001.keras")
    with pytest.raises(ConfigError, match="no checkpoint"):
        second.restore()


def test_each_fit_is_a_run_and_one_that_goes_on_is_the_same(tmp_path: Path) -> None:
    first, second, third = (Checkpoints.at(str(tmp_path)) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    first.save(keras_zip(), RunState(1))
    assert second.restore() is not None
    second.save(keras_zip(), RunState(2))
    assert index(tmp_path)["previous"] == "epoch-00001.keras"
    third.save(keras_zip(), RunState(3))
    assert index(tmp_path)["previous"] is None
    assert first.run == second.run < third.run == index(tmp_path)["run"]


def test_without_an_index_the_newest_run_is_gone_on_from(tmp_path: Path) -> None:
    """Also where it has done less: before, the most epochs counted."""
    make(tmp_path, 1, 2, 3, 4, 5)
    kept = {path: path.read_bytes() for path in tmp_path.glob("*.keras")}
    second = make(tmp_path, 1, run="b")
    for path, content in kept.items():  # a driver that was killed while it deleted them
        path.write_bytes(content)
    (tmp_path / "checkpoint.json").unlink()
    assert second.newest() == 1
    with pytest.warns(RuntimeWarning, match="after 1"):
        assert second.restore().state.rule == b"rule 1"  # type: ignore[union-attr]
    make(tmp_path, 2, run="b")
    assert index(tmp_path)["previous"] == "epoch-00001.keras"


def test_checkpoints_of_earlier_versions_name_no_run(tmp_path: Path) -> None:
    for epoch in (1, 2):
        content = with_parts(keras_zip(), state=RunState(epoch))
        (tmp_path / f"epoch-{epoch:05d}.keras").write_bytes(content)
    told = {"epoch": 2, "file": "epoch-00002.keras", "previous": "epoch-00001.keras"}
    (tmp_path / "checkpoint.json").write_text(json.dumps(told))
    checkpoints = Checkpoints(str(tmp_path))
    assert checkpoints.restore().state.epoch == 2  # type: ignore[union-attr]
    checkpoints.save(keras_zip(), RunState(3))
    assert index(tmp_path)["previous"] == "epoch-00002.keras"
    make(tmp_path, 1, run="b")
    assert names(tmp_path) == ["checkpoint.json", "epoch-00001.keras"]


def test_what_a_killed_driver_did_not_delete_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the first checkpoint stayed, and the next fit went on from it."""
    checkpoints = make(tmp_path, 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "_delete", lambda self, names: None)
        make(tmp_path, 3)
    (tmp_path / "best.keras").write_bytes(keras_zip())  # somebody else's
    assert len(names(tmp_path)) == 5
    checkpoints.clear()
    assert names(tmp_path) == ["best.keras"]
    assert not checkpoints.exist
    assert checkpoints.restore() is None


@pytest.mark.parametrize("fails", ["epoch-00003.keras", "checkpoint.json"])
def test_a_file_that_cannot_be_read_now_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Before, the index forgot the newest checkpoint for ever."""
    checkpoints = make(tmp_path, 1, 2, 3)
    read = LocalFileSystem.read

    def fail(self: LocalFileSystem, path: str, at_most: int | None) -> bytes:
        if path.endswith(fails):
            raise OSError("503 SlowDown")
        return read(self, path, at_most)

    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "read", fail)
        with pytest.raises(ResourceError, match="503 SlowDown"):
            checkpoints.restore()
        if fails != "checkpoint.json":
            with pytest.raises(ResourceError, match="503 SlowDown"):
                checkpoints.after(3)
    assert checkpoints.restore().state.epoch == 3  # type: ignore[union-attr]


def test_a_folder_that_cannot_be_listed_now_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, training began at the start, without a word."""
    checkpoints = make(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoint.json").unlink()

    def fail(*_: Any) -> Any:
        raise OSError("503 SlowDown")

    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "files_in", fail)
        with pytest.raises(ResourceError, match="503 SlowDown"):
            checkpoints.restore()
    with pytest.warns(RuntimeWarning, match="after 3"):
        assert checkpoints.restore().state.epoch == 3  # type: ignore[union-attr]


def test_what_the_file_system_finds_damaged_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = make(tmp_path, 1, 2, 3)
    read = LocalFileSystem.read

    def fail(self: LocalFileSystem, path: str, at_most: int | None) -> bytes:
        if path.endswith("epoch-00003.keras"):
            raise DamagedFileError("half a file", expected="2 chunks", received="1")
        return read(self, path, at_most)

    monkeypatch.setattr(LocalFileSystem, "read", fail)
    with pytest.warns(RuntimeWarning, match=r"half a file \(1\).*after 2"):
        assert checkpoints.restore().state.epoch == 2  # type: ignore[union-attr]


def test_without_an_index_the_newest_whole_one_is_gone_on_from(tmp_path: Path) -> None:
    """Some stores cannot rename over a file: a driver that is killed between the deletion of the
    index and its new one leaves none. Before, training began at the start, without a word."""
    checkpoints = make(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoint.json").unlink()
    (tmp_path / "best.keras").write_bytes(keras_zip())  # somebody else's
    assert checkpoints.exist
    assert checkpoints.newest() == 3
    with pytest.warns(RuntimeWarning, match=r"checkpoint\.json.*epoch-00003\.keras, after 3"):
        restored = checkpoints.restore()
    assert restored is not None
    assert (restored.state.epoch, restored.state.rule) == (3, b"rule 3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoints.restore().state.epoch == 3  # type: ignore[union-attr]
    make(tmp_path, 4)
    assert names(tmp_path) == [
        "best.keras", "checkpoint.json", "epoch-00003.keras", "epoch-00004.keras",
    ]  # fmt: skip


def test_without_an_index_and_with_a_damaged_newest_one(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoint.json").unlink()
    _cut(tmp_path / "epoch-00003.keras")
    with pytest.warns(RuntimeWarning, match=r"checkpoint\.json.*epoch-00002\.keras, after 2"):
        assert checkpoints.restore().state.epoch == 2  # type: ignore[union-attr]
    _cut(tmp_path / "epoch-00002.keras")
    (tmp_path / "checkpoint.json").unlink()
    with pytest.raises(ConfigError, match=r"(?s)no checkpoint.*epoch-00003.*epoch-00002.*hint"):
        checkpoints.restore()


def test_without_an_index_all_that_is_there_is_cleared(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 1)
    checkpoints.keep({1})
    make(tmp_path, 2, 3)
    (tmp_path / "checkpoint.json").unlink()
    assert checkpoints.rewind(2)
    (tmp_path / "checkpoint.json").unlink()
    checkpoints.clear()
    assert names(tmp_path) == []


def test_a_driver_killed_while_it_writes_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system of fsspec, where the index is deleted before its new one has its name."""
    checkpoints = Checkpoints.at(f"memory://{uuid.uuid4().hex}")
    assert checkpoints is not None
    for epoch in (1, 2):
        checkpoints.save(keras_zip(), RunState(epoch))

    class Killed(BaseException):
        pass

    def move(self: ArrowFileSystem, source: str, target: str) -> None:
        if target.endswith("checkpoint.json"):
            self.delete(target)
            raise Killed
        rename(self, source, target)

    rename = ArrowFileSystem._rename
    with monkeypatch.context() as patched:
        patched.setattr(ArrowFileSystem, "_rename", move)
        with pytest.raises(Killed):
            checkpoints.save(keras_zip(), RunState(3))
    with pytest.warns(RuntimeWarning, match="after 3"):
        assert checkpoints.restore().state.epoch == 3  # type: ignore[union-attr]


def test_where_none_is_whole_the_error_says_so(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 1, 2)
    for path in tmp_path.glob("*.keras"):
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"(?s)no checkpoint.*epoch-00002.*epoch-00001.*delete"):
        checkpoints.restore()


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "null",
        "",
        "[" * 60_000,
        {"epoch": 3, "file": "../victim"},
        {"epoch": 3, "file": "../epoch-00003.keras"},
        {"epoch": 3, "file": "/etc/epoch-00003.keras"},
        {"epoch": 3, "file": "epoch-00003.keras\n"},
        {"epoch": 3, "file": "epoch-00003.keras", "previous": "../victim"},
        {"epoch": 3, "file": "epoch-00003.keras", "previous": "epoch-00003.keras"},
        {"epoch": -3, "file": "epoch--0003.keras"},
        {"epoch": -3, "file": "epoch-00003.keras"},
        {"epoch": 4, "file": "epoch-00003.keras"},
        {"epoch": "3", "file": "epoch-00003.keras"},
        {"epoch": 3, "file": 3},
        {"epoch": 3, "file": "epoch-00003.keras", "previous": {"a": 1}},
        {"epoch": 3, "file": "epoch-00003.keras", "kept": ["../victim"]},
        {"epoch": 3, "file": "epoch-00003.keras", "kept": 3},
        {"epoch": 3, "file": "epoch-00003.keras", "run": 3},
    ],
)
def test_an_index_names_checkpoints_of_its_folder_only(tmp_path: Path, content: Any) -> None:
    """Before, ``../victim`` was deleted, and negative epochs were gone on from."""
    folder = tmp_path / "run"
    checkpoints = make(folder, 3)
    (tmp_path / "victim").write_bytes(b"mine")
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "checkpoint.json").write_text(text)
    for act in (checkpoints.restore, lambda: make(folder, 4, 5)):
        with pytest.raises(ConfigError, match=r"no index of checkpoints"):
            act()
    assert (tmp_path / "victim").read_bytes() == b"mine"


def test_a_pipe_among_the_checkpoints_is_passed_over_or_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "epoch-00009.keras")
    checkpoints = make(tmp_path, 1, 2)
    (tmp_path / "checkpoint.json").unlink()
    with pytest.warns(RuntimeWarning, match=r"checkpoint\.json is gone"):
        assert checkpoints.restore().state.epoch == 2  # type: ignore[union-attr]
    (tmp_path / "checkpoint.json").unlink()
    os.mkfifo(tmp_path / "checkpoint.json")
    with pytest.raises(ResourceError, match="regular file"):
        checkpoints.restore()
