"""Temporary folders go with their process, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdl.files.temporary import TemporaryFolder, executor_folder, remove_left_folders

HOLDS = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from sparkdl.files.temporary import TemporaryFolder
with TemporaryFolder() as folder:
    print(folder.path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def holder(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_goes_when_it_is_closed(tmp_path: Path) -> None:
    with TemporaryFolder() as folder:
        Path(folder.path, "model.keras").write_bytes(b"weights")
        remove_left_folders(str(tmp_path))
        assert Path(folder.path, "model.keras").exists(), "a folder in use must stay"
    assert list(tmp_path.iterdir()) == []
    folder.close()


def test_a_worker_of_spark_has_it_where_spark_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is killed while it loads its model is perhaps the machine's last process."""
    home = tmp_path / "blockmgr-1"
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{home},/elsewhere")
    assert executor_folder() is None  # it is not there (any more)
    home.mkdir()
    with TemporaryFolder() as folder:
        assert Path(folder.path).parent == home
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))  # of a user's shell: Spark keeps it
    assert executor_folder() is None


@pytest.mark.processes
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_process_removes_what_a_killed_one_left(tmp_path: Path, end: int) -> None:
    killed, left = holder(tmp_path)
    Path(left, "model.keras").write_bytes(b"weights")
    other, used = holder(tmp_path)
    foreign = tmp_path / "sparkdl-files-foreign"  # without a lock: nothing is known about it
    foreign.mkdir()
    killed.send_signal(end)
    killed.wait(10)
    assert left.exists()
    third, own = holder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([used, own, foreign])
    for process in (other, third):
        process.communicate("", timeout=10)
    assert list(tmp_path.iterdir()) == [foreign]
    assert os.listdir(foreign) == []
