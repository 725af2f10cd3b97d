"""Files are written whole or not at all, under names that nobody can guess."""

from __future__ import annotations

import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from sparkdl.errors import ResourceError
from sparkdl.files import file_system, listing, storage, streams
from sparkdl.files.file_system import ArrowFileSystem, LocalFileSystem


@pytest.fixture(params=["local", "file", "file with one slash", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {
        "local": f"{tmp_path}/new/folder",
        "file": f"file://{tmp_path}/new/folder",
        "file with one slash": f"file:{tmp_path}/new/with%20space",
        "memory": f"memory://{uuid.uuid4().hex}/folder",
    }[request.param]


def test_what_is_written_is_read(folder: str) -> None:
    path = f"{folder}/a"
    assert not storage.exists(path)
    storage.check_writable(path)
    assert not storage.exists(path)
    for content in (b"one" * 1000, b"", b"two"):
        storage.write_bytes(path, content)
        assert storage.exists(path)
        assert storage.read_bytes(path) == storage.read_bytes(path, len(content)) == content
    with pytest.raises(ResourceError, match="too long"):
        storage.read_bytes(path, at_most=2)
    storage.delete(path)
    storage.delete(path)
    with pytest.raises(ResourceError, match="cannot be read"):
        storage.read_bytes(path)


def test_what_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (f"{tmp_path}/file/a", f"{tmp_path}/folder", "nosuchsystem://host/a"):
        for act in (
            lambda p=path: storage.check_writable(p),
            lambda p=path: storage.write_bytes(p, b""),
        ):
            with pytest.raises(ResourceError):
                act()
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_the_files_right_in_a_folder_are_listed(folder: str) -> None:
    for name, content in (("b.x", b"12345"), ("a.x", b""), ("a.y", b"1"), ("below/c.x", b"1")):
        storage.write_bytes(f"{folder}/{name}", content)
    assert storage.list_files(folder, ".x") == [f"{folder}/a.x", f"{folder}/b.x"]
    assert storage.sizes_of_files(f"{folder}/", ".x") == {f"{folder}/a.x": 0, f"{folder}/b.x": 5}
    assert storage.list_files(f"{folder}/a.y", ".x") == [f"{folder}/a.y"]
    with pytest.raises(ResourceError, match="cannot be read"):
        storage.list_files(f"{folder}/nowhere", "")


@pytest.mark.parametrize("arrow", [True, False])
def test_what_killed_writers_left_is_deleted_by_its_age(tmp_path: Path, arrow: bool) -> None:
    from pyarrow import fs

    system = ArrowFileSystem(fs.LocalFileSystem()) if arrow else LocalFileSystem()
    for age_s in (10, 1000):
        path = tmp_path / f".sparkdl-{age_s:024}.part"
        path.write_bytes(b"part")
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    system.delete_partial(str(tmp_path), 500)
    assert os.listdir(tmp_path) == [f".sparkdl-{10:024}.part"]
    (file,) = system.files_in(str(tmp_path))
    assert file.changed_at == pytest.approx(time.time() - 10, abs=5)


def test_a_folder_is_not_written_into(folder: str) -> None:
    storage.write_bytes(f"{folder}/a", b"inside")
    with pytest.raises(ResourceError, match="is a folder"):
        storage.write_bytes(folder, b"content")
    assert storage.list_files(folder, "") == [f"{folder}/a"]


def test_links_planted_at_a_guessed_name_are_not_followed(tmp_path: Path) -> None:
    """Before, the temporary name was the path and the process id."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in (f"a.{os.getpid()}.part", f".sparkdl-{os.getpid()}"):
        (folder / name).symlink_to(victim)
    storage.check_writable(f"{folder}/a")
    storage.write_bytes(f"{folder}/a", b"content")
    assert victim.read_bytes() == b"mine"
    assert not (folder / "a").is_symlink()


def test_a_link_at_the_very_name_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even who guesses the name gets nothing written elsewhere."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    monkeypatch.setattr(file_system.secrets, "token_hex", lambda size: "guessed")
    (tmp_path / ".sparkdl-guessed.part").symlink_to(victim)
    with pytest.raises(ResourceError, match="FileExistsError"):
        storage.write_bytes(f"{tmp_path}/a", b"content")
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_interrupts_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Before, Ctrl-C left a ``*.part``."""
    path = f"{tmp_path}/a"
    storage.write_bytes(path, b"before")

    def fail(*_: Any) -> None:
        raise error

    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ResourceError
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, fail)
            with pytest.raises(expected):
                storage.write_bytes(path, b"after")
        assert os.listdir(tmp_path) == ["a"]
        assert storage.read_bytes(path) == b"before"


def test_an_interrupt_leaves_nothing_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    folder = uuid.uuid4().hex
    storage.write_bytes(f"memory://{folder}/a", b"before")

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ArrowFileSystem, "_rename", fail)
    with pytest.raises(KeyboardInterrupt):
        storage.write_bytes(f"memory://{folder}/a", b"after")
    names = [
        os.path.basename(n) for n in fsspec.filesystem("memory").ls(f"/{folder}", detail=False)
    ]
    assert names == ["a"]
    assert storage.read_bytes(f"memory://{folder}/a") == b"before"


class Refusing(ArrowFileSystem):
    """A folder of this machine that renames over no file, as HDFS and SMB do.

    Args:
        silent: Refuses without an error, as fsspec's WebHDFS does.
        fails: Which renames fail, counted from 0, whatever is at the new name.
        late: Which are done, and fail then.
        error: How they fail.
    """

    def __init__(
        self, *, silent: bool = False, fails: tuple[int, ...] = (), late: tuple[int, ...] = (),
        error: BaseException | None = None,
    ) -> None:  # fmt: skip
        from pyarrow import fs

        super().__init__(self)
        self.local, self.silent, self.fails, self.renames = fs.LocalFileSystem(), silent, fails, 0
        self.late, self.error = late, error or OSError("503 SlowDown")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)

    def move(self, source: str, target: str) -> None:
        self.renames += 1
        if self.renames - 1 in self.fails:
            raise self.error
        if not os.path.exists(target):
            os.rename(source, target)
            if self.renames - 1 in self.late:
                raise self.error
        elif not self.silent:
            raise OSError("rename failed, errno: 5")


@pytest.mark.parametrize("silent", [True, False])
def test_where_nothing_is_renamed_over_a_file(tmp_path: Path, silent: bool) -> None:
    system = Refusing(silent=silent)
    for content in (b"one", b"two", b"three"):
        system.write(f"{tmp_path}/a", content)
        assert (tmp_path / "a").read_bytes() == content
        assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("fails", [(0, 1), (2,), (0, 2), (0, 1, 2, 3)])
def test_a_rename_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, fails: tuple[int, ...]
) -> None:
    """Before, the old file was deleted first, and then the new one, too."""
    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(OSError, match="503 SlowDown"):
        Refusing(fails=tuple(fails)).write(f"{tmp_path}/a", b"after")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"before"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("time is over")])
@pytest.mark.parametrize(("late", "content"), [(1, b"before"), (2, b"after")])
def test_a_rename_that_is_done_and_fails_leaves_one_of_them(
    tmp_path: Path, late: int, content: bytes, error: BaseException
) -> None:
    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(type(error)):
        Refusing(late=(late,), error=error).write(f"{tmp_path}/a", b"after")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == content


def test_what_cannot_be_renamed_back_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(OSError, match="503 SlowDown") as caught:
        Refusing(fails=(2, 3)).write(f"{tmp_path}/a", b"after")
    kept = {path.read_bytes(): str(path) for path in tmp_path.iterdir()}
    assert kept.keys() == {b"before", b"after"}
    assert all(path in str(caught.value) for path in kept.values())


def test_threads_that_write_one_path_do_not_mix(tmp_path: Path) -> None:
    """Before, both wrote to one temporary file: torn contents, or a name that was gone."""
    path = f"{tmp_path}/a"
    contents = [bytes([i]) * (200_000 + 50_000 * i) for i in range(4)]
    errors: list[BaseException] = []
    storage.write_bytes(path, contents[0])
    done = threading.Event()

    def write(content: bytes) -> None:
        try:
            for _ in range(25):
                storage.write_bytes(path, content)
        except BaseException as error:
            errors.append(error)

    def read() -> None:
        while not done.is_set():
            if storage.read_bytes(path) not in contents:
                errors.append(AssertionError("mixed"))

    threads = [threading.Thread(target=write, args=(c,)) for c in contents]
    reader = threading.Thread(target=read)
    for thread in (*threads, reader):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    reader.join()
    assert not errors
    assert os.listdir(tmp_path) == ["a"]


def test_the_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    storage.write_bytes(f"{tmp_path}/a", b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_scheme_that_nobody_knows_makes_no_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, ``dbfs:/a`` was written to a folder ``dbfs:`` of the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(storage, "_finders", [])  # a session of another test knows some
    for path in ("dbfs:/models/a", "viewfs://cluster/models/a", "file://elsewhere/models/a"):
        with pytest.raises(ResourceError, match=r"no file system|names the machine"):
            storage.write_bytes(path, b"")
    assert os.listdir(tmp_path) == []
    storage.write_bytes("run:1/a", b"no scheme without a slash")
    assert (tmp_path / "run:1" / "a").exists()


def test_who_is_plugged_in_decides_for_all_paths_but_those_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere(LocalFileSystem):
        def read(self, path: str, at_most: int | None) -> bytes:
            return f"elsewhere: {path}".encode()

    asked: list[tuple[str, str | None]] = []

    def find(path: str, scheme: str | None) -> Elsewhere | None:
        asked.append((path, scheme))
        if path == "unreachable:/a":
            raise OSError("nobody answers")
        return Elsewhere() if scheme in (None, "hdfs") else None

    monkeypatch.setattr(storage, "_finders", [])
    storage.plug_in(find)
    storage.plug_in(find)
    assert storage.read_bytes("HDFS:/a") == b"elsewhere: HDFS:/a"
    assert storage.read_bytes("models/a") == b"elsewhere: models/a"
    storage.write_bytes("memory://plugged/a", b"in memory")
    assert storage.read_bytes("memory://plugged/a") == b"in memory"
    assert set(asked) == {("HDFS:/a", "hdfs"), ("models/a", None), ("memory://plugged/a", "memory")}
    storage.write_bytes(f"file:{tmp_path}/a", b"here")
    assert (tmp_path / "a").read_bytes() == b"here"
    assert len(asked) == 4
    with pytest.raises(ResourceError, match="nobody answers"):
        storage.exists("unreachable:/a")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe has no writer, and /dev/zero no end: a reader would wait for ever."""
    os.mkfifo(tmp_path / "pipe.x")
    (tmp_path / "file.x").write_bytes(b"1")
    (tmp_path / "zero.x").symlink_to("/dev/zero")
    assert storage.sizes_of_files(str(tmp_path), ".x") == {f"{tmp_path}/file.x": 1}
    for name in ("pipe.x", "zero.x"):
        for read in (
            lambda path: storage.read_bytes(path),
            lambda path: storage.read_start(path, 10),
            lambda path: streams.open_input(path, mapped=True),
        ):
            with pytest.raises(ResourceError, match="regular file"):
                read(f"{tmp_path}/{name}")
    assert [file.inner for file in listing.find_files(str(tmp_path))] == ["file.x"]
