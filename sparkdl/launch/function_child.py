"""A rank in a process of its own: local ranks on the driver, and tasks that need other devices.

The parent exchanges the ranks' texts and shows what they print.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable
from typing import Any

from sparkdl.errors import WaitTimeoutError, WorkerError
from sparkdl.launch.child_process import ChildProcess, ParentLine
from sparkdl.launch.devices import function_environment
from sparkdl.launch.failures import describe, worker_error
from sparkdl.launch.function_task import FunctionTask, Outcome, call
from sparkdl.launch.gathering import TAKEN_ALONG_S, Gathering
from sparkdl.launch.log_lines import LineSplitter, log_through, shorten
from sparkdl.launch.log_stream import show

_MODULE = "sparkdl.launch.function_child"
_TAIL_LINES = 40


class ChildFailure(Exception):
    """A rank's failure in the words of :func:`sparkdl.launch.failures.describe`."""

    def __init__(self, described: dict[str, Any]) -> None:
        super().__init__(described.get("error", ""))
        self.described = described


def call_in_child(
    pickled: bytes,
    gathering: Gathering,
    gpus: tuple[str, ...] | None,
    on_line: Callable[[str], None],
) -> Outcome:
    """Runs a barrier task's function in a child with the right devices.

    Raises:
        ChildFailure: The function raised there.
        WorkerError: The child died without an answer.
    """
    child = ChildProcess(_MODULE, gathering.rank, (pickled, gathering.rank, gpus))
    try:
        while (message := child.receive()) is not None:
            kind, content = message
            if kind == "gather":
                child.answer(gathering.all_gather(*content))
            elif kind == "line":
                on_line(content)
            elif kind == "failed":
                raise ChildFailure(content)
            else:
                outcome: Outcome = content
                return outcome
        raise WorkerError(gathering.rank, f"its child process {child.status()}")
    finally:
        child.close(grace_s=5.0)


def run_local(pickled: bytes, num_workers: int, start_timeout_s: float) -> list[Outcome]:
    """Runs all ranks as children of this process and shows what they print.

    Raises:
        WorkerError: A rank raised or died; the others are ended.
        WaitTimeoutError: Some ranks did not come in time; they are named.
    """
    children: list[ChildProcess] = []
    try:
        for rank in range(num_workers):
            setup = pickled, rank, None
            children.append(ChildProcess(_MODULE, rank, setup, output=subprocess.PIPE))
        return _Family(children, start_timeout_s).follow()
    finally:
        for child in children:
            child.close()


class _Family:
    """Local ranks until all have ended; one thread, no waiting without a limit."""

    def __init__(self, children: list[ChildProcess], start_timeout_s: float) -> None:
        self._children = children
        self._deadline = time.monotonic() + start_timeout_s
        self._start_timeout_s = start_timeout_s
        self._gathered: dict[int, str] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._failures: list[dict[str, Any]] = []
        self._failed_at = 0.0
        self._rounds = 0
        self._tails: dict[int, list[str]] = {c.rank: [] for c in children}
        self._selector = selectors.DefaultSelector()
        for child in children:
            self._selector.register(child.socket, selectors.EVENT_READ, (child, None))
            assert child.process.stdout is not None
            os.set_blocking(child.process.stdout.fileno(), False)
            splitter = LineSplitter(lambda line, rank=child.rank: self._show(rank, line))  # type: ignore[misc]
            self._selector.register(child.process.stdout, selectors.EVENT_READ, (child, splitter))

    def follow(self) -> list[Outcome]:
        try:
            while len(self._outcomes) < len(self._children):
                self._step()
                if self._failures and self._over():
                    raise self._error()
            self._last_output()
            return [self._outcomes[c.rank] for c in self._children]
        finally:
            self._selector.close()

    def _over(self) -> bool:
        """Whether the cause is known, or no one else may tell it any more."""
        known = not self._failures[-1]["taken_along"]
        late = time.monotonic() - self._failed_at > TAKEN_ALONG_S
        return known or late

    def _step(self) -> None:
        for key, _ in self._selector.select(0.1):
            child, splitter = key.data
            if key.fd not in self._selector.get_map():
                continue  # ended while another one was served
            if splitter is None:
                self._message(child)
            else:
                self._output(child, splitter)
        if self._rounds == 0 and time.monotonic() > self._deadline and not self._failures:
            missing = [c.rank for c in self._children if c.rank not in self._gathered]
            raise WaitTimeoutError(
                f"{len(missing)} of {len(self._children)} local ranks did not come",
                expected=f"all ranks within {self._start_timeout_s:g} s",
                received=f"nothing from ranks {', '.join(map(str, missing))}",
                hint="do they hang while they import a framework or unpickle the function?",
            )

    def _message(self, child: ChildProcess) -> None:
        message = child.receive()
        if message is None:
            self._selector.unregister(child.socket)
            if child.rank not in self._outcomes:
                status = child.status()
                told = {c["rank"] for c in self._failures}
                if child.rank not in told:
                    self._output_of(child)
                    tail = "\n".join(self._tails[child.rank])
                    self._fail(
                        {
                            "rank": child.rank,
                            "error": f"its process {status}",
                            "traceback": tail,
                            "taken_along": False,
                        }
                    )
            return
        kind, content = message
        if kind == "line":
            show(child.rank, content)
        elif kind == "failed":
            self._fail(content)
        elif kind == "gather":
            self._gathered[child.rank] = content[0]
            if len(self._gathered) == len(self._children):
                texts = [self._gathered[c.rank] for c in self._children]
                self._gathered.clear()
                self._rounds += 1
                for other in self._children:
                    other.answer(texts)
        else:
            self._outcomes[child.rank] = content

    def _fail(self, described: dict[str, Any]) -> None:
        self._failed_at = self._failed_at or time.monotonic()
        self._failures.append(described)

    def _error(self) -> WorkerError:
        causes = [f for f in self._failures if not f["taken_along"]]
        return worker_error((causes or self._failures)[0])

    def _output_of(self, child: ChildProcess) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data[0] is child and key.data[1] is not None:
                self._output(child, key.data[1])

    def _last_output(self) -> None:
        for child in self._children:
            child.process.wait(10.0)
            self._output_of(child)

    def _output(self, child: ChildProcess, splitter: LineSplitter) -> None:
        stream = child.process.stdout
        assert stream is not None
        while True:
            try:
                data = os.read(stream.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                splitter.end()
                self._selector.unregister(stream)
                return
            splitter.feed(data)

    def _show(self, rank: int, line: str) -> None:
        tail = self._tails[rank]
        tail.append(line)
        del tail[:-_TAIL_LINES]
        show(rank, line)


# -- the child's side ----------------------------------------------------------------------------


def main() -> None:
    """One rank: everything from the parent, the outcome to the parent."""
    import cloudpickle

    line = ParentLine()
    pickled, rank, gpus = line.setup
    try:
        task: FunctionTask = cloudpickle.loads(pickled)
        with (
            log_through(lambda text: line.tell("line", shorten(text))),
            function_environment(gpus, task.backend),
        ):
            outcome = call(task, line.gathering(rank))
    except (Exception, SystemExit) as error:
        line.tell("failed", describe(rank, error))
    else:
        line.tell("done", outcome)
    line.close()


if __name__ == "__main__":
    # as a module of its proper name, so that what is unpickled is what is defined here
    from sparkdl.launch.function_child import main as _main

    _main()
