"""One rank of ``sparkdl.run``: the communicator comes up, the function runs, its result goes.

The launcher provides a *gathering* (a barrier stage's ``allGather``, or a parent process).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sparkdl.collective.communicator import Member, make_communicator
from sparkdl.collective.current import use
from sparkdl.config import UseGpu
from sparkdl.errors import DataError
from sparkdl.launch.gathering import AloneGathering, Gathering


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
        use_gpu: See :func:`sparkdl.config.check_use_gpu`.
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
    rank = gathering.rank
    connectors = (
        make_communicator("builtin", rank=rank, timeout_s=math.inf),  # others may train for days
        make_communicator(task.communicator, rank=rank, timeout_s=task.timeout_s),
    )
    with contextlib.ExitStack() as stack:
        for connector in connectors:
            stack.callback(connector.close)
        mine = json.dumps([c.prepare().to_json() for c in connectors])
        told = [json.loads(t) for t in gathering.all_gather(mine, task.start_timeout_s)]

        def join(index: int) -> Any:
            members = [Member.from_json(texts[index]) for texts in told]
            communicator = connectors[index].connect(members, task.token)
            stack.callback(communicator.close)
            return communicator

        farewell = join(0)  # now all ranks have left the gathering: from here on one may fail
        yield join(1), farewell


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
