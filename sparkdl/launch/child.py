"""Ranks as processes of this machine: all of them, or one that needs other devices than its task.

Parent and child are the same user's processes on one machine and talk over a socket pair. The
child asks for one batch of its input after the other, and for the texts of the other ranks; it
sends its results, its lines and at last how it ended. So neither waits for the other with a full
buffer, and no more than one input batch is on the way. The child ends with its parent.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from types import MappingProxyType

import pyarrow as pa

from sparkdl import errors
from sparkdl.errors import TransportError, WorkerError
from sparkdl.failures import (
    SECONDARY_DELAY_S,
    ChildTraceback,
    Failure,
    RanksLost,
    is_secondary,
    one_line,
)
from sparkdl.launch.devices import needs_child
from sparkdl.launch.task import Launcher, RankContext, Ranks, Result, Task, batch_to_bytes
from sparkdl.launch.threads import LocalRanks, RestartedRanks
from sparkdl.process import payload
from sparkdl.process.closing import Closing
from sparkdl.process.log_lines import ChildOutput, Sink, show, start_module


def run_rank(
    content: bytes | payload.Pickled,
    rank: RankContext,
    batches: Iterator[pa.RecordBatch],
    on_output: Sink,
) -> Iterator[pa.RecordBatch]:
    """Runs a task where its devices are; an exception becomes what the task makes of it."""
    task: Task = payload.load(content)
    try:
        if needs_child(task.devices.place(rank.resources, rank.rank)):
            with Child(content, rank, on_output) as child:
                yield from child.results(batches)
        else:
            del content  # the task has all of it
            yield from task.run(rank, batches)
    except (Exception, SystemExit) as error:
        if rank.gathering is not None and is_secondary(error):
            time.sleep(SECONDARY_DELAY_S)  # Spark ends all ranks with the first that tells
        yield from task.failed(rank, error)


@dataclass(frozen=True)
class ChildSetup:
    """The first message."""

    parent: int
    task: bytes | payload.Pickled
    rank: RankContext
    gathers: bool
    logs: bool


@dataclass(frozen=True)
class InputBatch:
    """The answer to :class:`NextInput`: an Arrow stream of one batch; None after the last."""

    content: bytes | None


@dataclass(frozen=True)
class GatheredTexts:
    """The answer to :class:`GatherTexts`: every rank's text in rank order."""

    texts: list[str]


FromParent = ChildSetup | InputBatch | GatheredTexts


@dataclass(frozen=True)
class NextInput:
    """Asks for the next batch of the input."""


@dataclass(frozen=True)
class GatherTexts:
    """Asks for every rank's text, and gives this rank's."""

    text: str
    timeout_s: float


@dataclass(frozen=True)
class LogLine:
    """A line for the driver's log."""

    text: str


@dataclass(frozen=True)
class OutputBatch:
    """A batch that the task yielded, as an Arrow stream."""

    content: bytes


@dataclass(frozen=True)
class TaskRaised:
    """The last message: the task raised."""

    error: BaseException
    failure: Failure


@dataclass(frozen=True)
class TaskDone:
    """The last message: the task has ended."""


FromChild = NextInput | GatherTexts | LogLine | OutputBatch | TaskRaised | TaskDone


def received(connection: Connection) -> FromParent | FromChild | None:
    """The next message; None if the other side has ended."""
    try:
        message: FromParent | FromChild = connection.recv()
    except (EOFError, OSError):
        return None
    return message


class Child(Closing):
    """The parent's end of a child process."""

    def __init__(
        self,
        task: bytes | payload.Pickled,
        rank: RankContext,
        on_output: Sink,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._rank = rank
        self._connection, theirs = Pipe()
        with theirs:
            self._process = start_module(
                "sparkdl.launch.child", str(theirs.fileno()), options=["-u"],
                environment=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        assert self._process.stdout is not None
        self._output = ChildOutput(self._process, self._process.stdout, on_output)
        plain = replace(rank, gathering=None, log=None)
        gathers, logs = rank.gathering is not None, rank.log is not None
        try:
            self._connection.send(ChildSetup(os.getpid(), task, plain, gathers, logs))
        except OSError:  # it died at once: results() finds no message, and its status tells why
            return
        except BaseException:
            self.close()
            raise

    def results(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Feeds the child until it ends; what it yields.

        Raises:
            Exception: What the task raised there; its cause is a :class:`ChildTraceback`.
            RanksLost: The child was killed.
            WorkerError: It ended without an answer; with the end of its output.
        """
        while (message := received(self._connection)) is not None:
            if isinstance(message, NextInput):
                batch = next(batches, None)
                self._answer(InputBatch(None if batch is None else batch_to_bytes(batch)))
            elif isinstance(message, GatherTexts):
                self._answer(GatheredTexts(self._rank.all_gather(message.text, message.timeout_s)))
            elif isinstance(message, LogLine):
                if self._rank.log is not None:
                    self._rank.log(message.text)
            elif isinstance(message, OutputBatch):
                yield pa.ipc.open_stream(message.content).read_next_batch()
            elif isinstance(message, TaskRaised):
                raise message.error from ChildTraceback(message.failure)
            else:
                return
        status = self._process.wait(10.0)
        self._output.finish()
        if status < 0:
            told = f"its process was ended by {signal.Signals(-status).name}"
            raise RanksLost(self._rank.rank, told, self._output.tail)
        raise WorkerError(
            self._rank.rank, f"its process ended with status {status}", self._output.tail
        )

    def _answer(self, message: InputBatch | GatheredTexts) -> None:
        with contextlib.suppress(OSError):  # it has ended; the next message does not come either
            self._connection.send(message)

    def kill(self) -> None:
        """Ends the process by force; may be called by another thread."""
        self._process.kill()

    def close(self) -> None:
        """Ends the child, by force if it does not end by itself within some seconds."""
        self._connection.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.finish()


class ParentConnection:
    """The child's end, and its gathering; from now on the child ends with its parent.

    A thread receives the parent's answers: the input may be read while the ranks meet.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._connection = Connection(descriptor)
        self._lock = threading.Lock()
        setup = received(self._connection)
        if not isinstance(setup, ChildSetup):
            raise _parent_lost("no task")
        end_with(setup.parent)
        self._task = setup.task
        self._inputs: queue.SimpleQueue[InputBatch | None] = queue.SimpleQueue()
        self._texts: queue.SimpleQueue[GatheredTexts | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="sparkdl-parent", daemon=True).start()
        self._rank: RankContext = replace(
            setup.rank,
            gathering=self if setup.gathers else None,
            log=self._log if setup.logs else None,
        )

    def serve(self) -> None:
        """Runs the task and tells the parent how it ended."""
        end: TaskRaised | TaskDone
        try:
            task: Task = payload.load(self._task)
            for batch in task.run(self._rank, self._batches()):
                self._tell(OutputBatch(batch_to_bytes(batch)))
        except (Exception, SystemExit) as error:
            failure = Failure.of(self._rank.rank, error)
            end = TaskRaised(_portable(error), failure)
        else:
            end = TaskDone()
        with contextlib.suppress(OSError), contextlib.closing(self._connection):
            self._tell(end)  # the parent may have ended

    def all_gather(self, text: str, timeout_s: float) -> list[str]:
        self._tell(GatherTexts(text, timeout_s))
        answer = self._texts.get()
        if answer is None:
            raise _parent_lost("no texts of the other ranks")
        return answer.texts

    def settle(self) -> None:
        """At once: the parent's gathering settles before it tells of a failure."""

    def _batches(self) -> Iterator[pa.RecordBatch]:
        while True:
            self._tell(NextInput())
            answer = self._inputs.get()
            if answer is None:
                raise _parent_lost("no batch of the input")
            if answer.content is None:
                return
            yield pa.ipc.open_stream(answer.content).read_next_batch()

    def _log(self, line: str) -> None:
        self._tell(LogLine(line))

    def _tell(self, message: FromChild) -> None:
        with self._lock:
            self._connection.send(message)

    def _listen(self) -> None:
        while (message := received(self._connection)) is not None:
            if isinstance(message, InputBatch):
                self._inputs.put(message)
            elif isinstance(message, GatheredTexts):
                self._texts.put(message)
        self._inputs.put(None)
        self._texts.put(None)


def _parent_lost(received: str) -> TransportError:
    return TransportError(
        "this child process has lost its parent",
        expected="an answer of the process that started it",
        received=f"{received}: the connection ended",
    )


def _portable(error: BaseException) -> BaseException:
    """The exception if the parent has its class, else one of the same text.

    The parent must not import a framework to load it.
    """
    kind, name = type(error), type(error).__name__
    if kind in (getattr(builtins, name, None), getattr(errors, name, None)):
        with contextlib.suppress(Exception):
            plain = all(isinstance(arg, (str, int, float)) for arg in error.args)
            if plain and type(pickle.loads(pickle.dumps(error))) is kind:
                return error
    return RuntimeError(one_line(error))


def end_with(parent: int) -> None:
    """Ends this process when the parent ends, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class ProcessLauncher:
    """Starts ranks as processes of this machine; what they print is shown here.

    Leaving the launch kills the ranks that still run.

    Args:
        restarts: How often each rank may be started again after it failed; none if empty.
        environments: Variables of each rank's process, beside those of this one; none if empty.
        first_rank: The number of the first, if another launcher starts those before it. The ranks
            meet at a coordinator then, not here.
    """

    def __init__(
        self,
        num_ranks: int,
        restarts: Sequence[int] = (),
        environments: Sequence[Mapping[str, str]] = (),
        first_rank: int = 0,
    ) -> None:
        self._num_ranks, self._restarts = num_ranks, restarts
        self._environments = environments or [{}] * num_ranks
        self._first_rank = first_rank

    @contextlib.contextmanager
    def launch(self, task: Task) -> Iterator[LocalRanks]:
        content = payload.dump(task)
        children: list[Child] = []
        lock = threading.Lock()
        ended = threading.Event()

        def run(rank: RankContext) -> Iterator[pa.RecordBatch]:
            environment = self._environments[rank.rank]
            if self._first_rank:
                rank = self._shifted(rank)
            with lock:
                if ended.is_set():
                    return
                child = Child(content, rank, lambda line: show(rank.rank, line), environment)
                children.append(child)
            with child:
                try:
                    yield from child.results(iter(()))
                except (Exception, SystemExit) as error:
                    yield from task.failed(rank, error)

        def end() -> None:
            with lock:
                ended.set()
                for child in children:
                    child.kill()

        restarted = RestartedRanks(self._restarts, run, ended)
        with LocalRanks(self._num_ranks, restarted.run, end) as ranks:
            yield ranks

    def _shifted(self, rank: RankContext) -> RankContext:
        number = self._first_rank + rank.rank
        return replace(
            rank, rank=number, num_ranks=self._first_rank + self._num_ranks,
            gathering=None, log=lambda line: show(number, line),
        )  # fmt: skip


class JoinedLauncher:
    """Starts the ranks of several launchers, which meet at a coordinator."""

    def __init__(self, *launchers: Launcher) -> None:
        self._launchers = launchers

    @contextlib.contextmanager
    def launch(self, task: Task) -> Iterator[JoinedRanks]:
        with contextlib.ExitStack() as stack:
            yield JoinedRanks([stack.enter_context(one.launch(task)) for one in self._launchers])


class JoinedRanks:
    """Ranks of several launches; the first of these that fails ends the wait."""

    def __init__(self, launches: list[Ranks]) -> None:
        self._launches = launches
        self._results: dict[int, list[Result]] = {}
        self._error: Exception | None = None

    def wait(self, timeout_s: float) -> bool:
        for number, launch in enumerate(self._launches):
            if number in self._results or self._error is not None:
                continue
            if launch.wait(timeout_s / len(self._launches)):
                try:
                    self._results[number] = launch.results()
                except Exception as error:
                    self._error = error
        return self._error is not None or len(self._results) == len(self._launches)

    def results(self) -> list[Result]:
        if self._error is not None:
            raise self._error
        return [result for number in sorted(self._results) for result in self._results[number]]

    def results_so_far(self) -> list[Result]:
        return [result for launch in self._launches for result in launch.results_so_far()]


if __name__ == "__main__":
    # as a module of its proper name, so that what is unpickled is what is defined here
    from sparkdl.launch.child import ParentConnection as Parent

    Parent(int(sys.argv[1])).serve()
