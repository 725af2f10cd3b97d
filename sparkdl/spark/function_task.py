"""One rank of ``sparkdl.run``: the communicator comes up, the function runs, its result goes.

The launcher provides a *gathering* (a barrier stage's ``allGather``, or a parent process) and takes
the log lines. An exception is raised from the task with a description that the driver can read
(:func:`described_in`): Spark then ends the other ranks of the barrier stage.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sparkdl.collective.communicator import Member, make_communicator
from sparkdl.collective.current import use
from sparkdl.driver_log import Capture, log_through
from sparkdl.errors import DataError
from sparkdl.spark.gathering import (
    TAKEN_ALONG_S,
    AloneGathering,
    BarrierGathering,
    Gathering,
    taken_along,
)
from sparkdl.spark.log_stream import LineClient
from sparkdl.spark.resources import UseGpu, function_environment, function_needs_child
from sparkdl.spark.results import CHUNK_BYTES, Result, describe_error, to_batch

_MARK, _END = "--sparkdl-failure--", "--end--"
_TRACEBACK_CHARS = 8000


@dataclass(frozen=True)
class FunctionTask:
    """Everything that a rank needs; broadcast once.

    Args:
        function: cloudpickle of the dict ``fn``, ``args``, ``kwargs``.
        num_workers: Number of ranks.
        token: The run's secret.
        communicator: Its name.
        timeout_s: Limit for one collective operation.
        start_timeout_s: Limit for all ranks to come.
        use_gpu: See :func:`sparkdl.spark.resources.check_use_gpu`.
        backend: Keras backend; None: as the environment says.
        all_results: Whether other ranks than 0 send their result.
        capture: Whether standard output and error go to the driver.
        address: Where the driver takes log lines; None: they come with the result.
    """

    function: bytes
    num_workers: int
    token: bytes
    communicator: str = "auto"
    timeout_s: float = 600.0
    start_timeout_s: float = 300.0
    use_gpu: UseGpu = "auto"
    backend: str | None = None
    all_results: bool = True
    capture: bool = True
    address: tuple[str, int] | None = None


@dataclass(frozen=True)
class Outcome:
    """What a rank's call gave.

    Args:
        content: The pickled result, or None if the driver does not want it.
        communicator: Name of the communicator that was up.
    """

    content: bytes | None
    communicator: str


class RankFailure(RuntimeError):
    """Raised from a Spark task: a description for people, and one for the driver."""

    def __init__(self, described: dict[str, Any]) -> None:
        self.described = described
        text = json.dumps(described)
        super().__init__(
            f"rank {described['rank']} failed: {described['error']}\n{_MARK}{text}{_END}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailure, (self.described,)


def described_in(error: BaseException) -> dict[str, Any] | None:
    """What a :class:`RankFailure` inside Spark's exception describes, or None."""
    text = str(error)
    start = text.find(_MARK)
    end = text.find(_END, start)
    if start < 0 or end < 0:
        return None
    try:
        described: dict[str, Any] = json.loads(text[start + len(_MARK) : end])
    except ValueError:
        return None
    return described


def describe(rank: int, error: BaseException) -> dict[str, Any]:
    """An exception on a rank as JSON of bounded size."""
    described = describe_error(error)
    trace = described["traceback"]
    if len(trace) > _TRACEBACK_CHARS:
        described["traceback"] = f"...\n{trace[-_TRACEBACK_CHARS:]}"
    described["error"] = described["error"][:2000]
    return {**described, "rank": rank, "taken_along": taken_along(error)}


def call(task: FunctionTask, gathering: Gathering) -> Outcome:
    """Runs the user's function on this rank, with the communicator up.

    Raises:
        DataError: The result cannot be pickled.
        Exception: Whatever the function raises.
    """
    rank = gathering.rank
    with connected(task, gathering) as (communicator, farewell):
        objects = _unpickled(task.function, rank)
        with use(communicator):
            result = objects["fn"](*objects["args"], **objects["kwargs"])
        content = None
        if task.all_results or rank == 0:
            content = _pickled(result, rank)
        # a rank that is done stays, so that its leaving does not look like a failure
        farewell.barrier()
        return Outcome(content, str(getattr(communicator, "name", "")))


@contextlib.contextmanager
def connected(task: FunctionTask, gathering: Gathering) -> Iterator[tuple[Any, Any]]:
    """The communicator among all ranks, and another one to part by; closed whatever happens.

    Nothing that may fail comes before it, and nothing waits for the launcher after it: a barrier
    stage that ends while a task waits in ``allGather`` takes that task's executor down with it.
    """
    recipes = (
        (task.communicator, task.timeout_s),
        ("builtin", math.inf),  # the others may train on for days
    )
    with contextlib.ExitStack() as stack:
        connectors = [
            make_communicator(name, rank=gathering.rank, timeout_s=limit) for name, limit in recipes
        ]
        for connector in connectors:
            stack.callback(connector.close)
        mine = json.dumps([c.prepare().to_json() for c in connectors])
        told = [json.loads(t) for t in gathering.all_gather(mine, task.start_timeout_s)]
        made = []
        for i in (1, 0):  # the first that connects shows that all ranks have left the gathering
            members = [Member.from_json(texts[i]) for texts in told]
            made.append(connectors[i].connect(members, task.token))
            stack.callback(made[-1].close)
        yield made[1], made[0]


def _unpickled(function: bytes, rank: int) -> dict[str, Any]:
    import cloudpickle

    try:
        objects: dict[str, Any] = cloudpickle.loads(function)
    except Exception as error:
        raise DataError(
            f"rank {rank} cannot unpickle the function or its arguments",
            expected="modules that the executors can import",
            received=f"{type(error).__name__}: {error}",
            hint="ship them with spark.submit.pyFiles (addPyFile), or install them there",
        ) from error
    return objects


def _pickled(result: Any, rank: int) -> bytes:
    import cloudpickle

    try:
        content: bytes = cloudpickle.dumps(result)
    except Exception as error:
        raise DataError(
            f"the result of rank {rank} cannot be sent to the driver",
            expected="an object that cloudpickle can pickle",
            received=f"{type(result).__name__} ({type(error).__name__}: {error})",
            hint="return numbers, arrays or model.get_weights(); save what is large to a file",
        ) from error
    return content


def call_here(task: FunctionTask, function: Callable[[], Any]) -> Any:
    """Runs a function in this process as the only rank, and returns what it returns."""
    with connected(task, AloneGathering()) as (communicator, _), use(communicator):
        return function()


def gpus_of(context: Any, task: FunctionTask) -> tuple[str, ...] | None:
    """The GPUs that the function may see; None: Spark schedules none, so whatever is there."""
    from sparkdl.spark.resources import placement_of

    gpus = placement_of(context, task.backend or "tensorflow", task.use_gpu).gpus
    return gpus if gpus or task.use_gpu is False else None


def function_stage(payload: Any) -> Any:
    """The function for ``mapInArrow``; ``payload`` is a broadcast, or the pickled task itself."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from sparkdl.spark.function_task import run_function

        yield from run_function(batches, payload.value if hasattr(payload, "value") else payload)

    return run


def run_function(batches: Iterator[pa.RecordBatch], pickled: bytes) -> Iterator[pa.RecordBatch]:
    """One task of the barrier stage; yields the result in rows of bounded size.

    Raises:
        RankFailure: The function raised; Spark ends the other ranks.
    """
    import cloudpickle
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    for _ in batches:
        pass
    task: FunctionTask = cloudpickle.loads(pickled)
    rank = int(context.partitionId())
    lines = LineClient(task.address, task.token, rank)
    outcome, failure = None, None
    try:
        with log_through(lines.send), Capture(lines.send) if task.capture else _NOTHING:
            outcome = _call_on_devices(task, context, pickled, lines)
    except (Exception, SystemExit) as error:
        failure = getattr(error, "described", None) or describe(rank, error)
    kept = lines.close()
    if failure is not None:
        failure["lines"] = "\n".join(kept)[-2000:]
        if failure["taken_along"]:
            time.sleep(TAKEN_ALONG_S)
        raise RankFailure(failure)
    assert outcome is not None
    told = json.dumps({"communicator": outcome.communicator, "result": outcome.content is not None})
    yield to_batch([Result(rank, "done", told)])
    parts = [("log", "\n".join(kept).encode(errors="replace")), ("result", outcome.content or b"")]
    for kind, content in parts:
        for i in range(0, len(content), CHUNK_BYTES):
            yield to_batch([Result(rank, kind, "", content[i : i + CHUNK_BYTES])])


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def _call_on_devices(
    task: FunctionTask, context: Any, pickled: bytes, lines: LineClient
) -> Outcome:
    gathering = BarrierGathering(context)
    gpus = gpus_of(context, task)
    if function_needs_child(gpus, task.backend):
        from sparkdl.spark.function_child import call_in_child

        return call_in_child(pickled, gathering, gpus, lines.send)
    with function_environment(gpus, task.backend):
        return call(task, gathering)
