"""Temporary folders that go also when their process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
import threading

from sparkdl.process.closing import Closing

_PREFIX = "sparkdl-files-"
_LOCK = "in-use"
_first_of_process = threading.Lock()
"""Taken for good by the first folder of a process."""


class TemporaryFolder(Closing):
    """A new folder, removed when it is closed.

    Nothing runs in a process that is killed (``kill -9``, memory), so its folder stays. Spark
    removes that of its worker with the executor's own files. Elsewhere the next process that
    makes a folder on this machine does: a folder in use holds a lock on one of its files, which
    the system takes away with the process, in containers too.
    """

    def __init__(self) -> None:
        parent = executor_folder() or tempfile.gettempdir()
        if _first_of_process.acquire(blocking=False):
            remove_left_folders(parent)
        while True:
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            lock_path = os.path.join(self.path, _LOCK)
            self._lock = os.open(lock_path, os.O_CREAT | os.O_RDWR, 0o600)
            with contextlib.suppress(OSError):  # a file system without locks: nobody removes it
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.path.exists(lock_path):
                break
            os.close(self._lock)  # taken by another process for one that was left, before the lock

    def close(self) -> None:
        """Removes the folder and what is in it."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def executor_folder() -> str | None:
    """The folder of the executor that this process works for; None outside of Spark's workers."""
    folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return folder if "blockmgr-" in folder and os.path.isdir(folder) else None


def remove_left_folders(directory: str) -> None:
    """Removes the folders of processes that are no more."""
    for path in glob.glob(os.path.join(glob.escape(directory), f"{_PREFIX}*", _LOCK)):
        with contextlib.suppress(OSError):  # another user's, in use, or just removed
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
            finally:
                os.close(lock)
