"""Holds back what TensorFlow writes to the standard error when it is imported (ADR 0140).

TensorFlow logs before its own switch ``TF_CPP_MIN_LOG_LEVEL`` holds: what its libraries can do, and
that a machine has no GPU. ``import sparkdl`` makes this process' import of TensorFlow hold those
lines back, and so does the start of a worker's framework. Everything else is passed on at once, and
if the import fails or the process dies, all lines are shown. ``TF_CPP_MIN_LOG_LEVEL=0`` shows them
always.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pkgutil
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_SWITCH = "TF_CPP_MIN_LOG_LEVEL"
_ANSWER_S = 5.0
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def start_lines_held() -> Iterator[None]:
    """Within, lines on file descriptor 2 that are known to say nothing are held back.

    They are dropped at the end of the block, or written if it raises. All else that this process,
    its threads and its children write there is passed on at once, by a process of its own. Without
    effect where that process cannot be started, within another such block, and where the user has
    set ``TF_CPP_MIN_LOG_LEVEL=0``. Afterwards the descriptor is as it was before.
    """
    if os.environ.get(_SWITCH) == "0" or not _one_at_a_time.acquire(blocking=False):
        yield
        return
    try:
        held = _Held.start()
        failed = True
        try:
            yield
            failed = False
        finally:
            if held is not None:
                held.end(show=failed)
    finally:
        _one_at_a_time.release()


class _Held:
    """File descriptor 2 while it is a pipe to the filter."""

    def __init__(self, filtering: subprocess.Popen[bytes], saved: int, writer: int) -> None:
        self._filtering, self._saved, self._writer = filtering, saved, writer

    @classmethod
    def start(cls) -> _Held | None:
        """None where the filter cannot be started."""
        source = pkgutil.get_data("sparkdl.process", "start_lines_filter.py")
        if os.name != "posix" or not sys.executable or source is None:
            return None
        with contextlib.ExitStack() as undo:
            try:
                saved = os.dup(2)
                undo.callback(os.close, saved)
                reader, writer = os.pipe()
                undo.callback(os.close, writer)
                filtering = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", source.decode(), str(saved), *_no_gpu()],
                    stdin=reader, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    pass_fds=[saved],
                    start_new_session=True,  # an interrupt from the keyboard does not end it
                )  # fmt: skip
                os.close(reader)
            except OSError:  # no descriptor 2, or no process to be had
                return None
            held = cls(filtering, saved, writer)
            if not held._answers():
                filtering.kill()
                held._reap()
                return None
            _flush()
            os.dup2(writer, 2)
            undo.pop_all()
            return held

    def end(self, *, show: bool) -> None:
        """Makes the descriptor what it was before."""
        from sparkdl.process.start_lines_filter import DROP, SHOW

        _flush()
        with contextlib.suppress(OSError):  # closed by someone meanwhile
            if os.path.sameopenfile(2, self._writer):  # else someone has put another file there
                os.dup2(self._saved, 2)
        with contextlib.suppress(OSError):
            os.write(self._writer, SHOW if show else DROP)
        os.close(self._writer)
        os.close(self._saved)
        self._answers()
        self._reap()

    def _answers(self) -> bool:
        assert self._filtering.stdout is not None
        out = self._filtering.stdout.fileno()
        return bool(select.select([out], [], [], _ANSWER_S)[0]) and bool(os.read(out, 1))

    def _reap(self) -> None:
        assert self._filtering.stdout is not None
        self._filtering.stdout.close()
        # It lives on while a child that was started meanwhile has the pipe as its standard error.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._filtering.wait(0.5)


class _TensorFlowFinder:
    """Finds TensorFlow as the other finders do, and makes its import hold its lines back."""

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "tensorflow" or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.now = False
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                from sparkdl.process.closing import environment

                del loader.exec_module
                # Without its switch, which it reads now, TensorFlow would log INFO later, too.
                level = {} if _SWITCH in os.environ else {_SWITCH: "1"}
                with start_lines_held(), environment(**level):
                    execute(module)
                    if not _has_gpu():  # says so once; where there is a GPU it is left alone
                        with contextlib.suppress(Exception):
                            module.config.list_physical_devices("GPU")

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def hold_start_lines() -> None:
    """Makes this process' import of TensorFlow hold its lines back, if it is still to come."""
    if "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, _TensorFlowFinder())


def _has_gpu() -> bool:
    return any(map(os.path.exists, _GPU_DEVICES))


def _no_gpu() -> list[str]:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return ["no-gpu"] if hidden or not _has_gpu() else []


def _flush() -> None:
    with contextlib.suppress(Exception):  # None, closed, or someone's own class
        sys.stderr.flush()
