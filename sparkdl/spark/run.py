"""Any training function, once per rank: in a barrier stage, in local processes, or right here."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sparkdl.collective.communicator import COMMUNICATORS
from sparkdl.config import UseGpu, check_use_gpu
from sparkdl.errors import (
    ConfigError,
    UnknownNameError,
    WaitTimeoutError,
    WorkerError,
)
from sparkdl.launch.failures import described_in, worker_error
from sparkdl.launch.function_child import run_local
from sparkdl.launch.function_task import FunctionTask, call_here
from sparkdl.launch.log_stream import LineServer, show
from sparkdl.launch.results import RESULT_SCHEMA
from sparkdl.learner import BACKENDS
from sparkdl.learner.archive import pickle_by_value
from sparkdl.spark.driver import cluster
from sparkdl.spark.executor.function_stage import function_stage

T = TypeVar("T")
VERBOSITIES = ("all", "log_callback_only")
START_TIMEOUT_S = 300.0
_LOG = logging.getLogger("sparkdl")


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_workers: int | None = None,
    *,
    communicator: str = "auto",
    driver_log_verbosity: str = "all",
    use_gpu: UseGpu = "auto",
    backend: str | None = None,
    timeout_s: float = 600.0,
    spark: Any = None,
) -> list[T]:
    """Runs ``fn(*args, **kwargs)`` on every rank of one barrier stage; returns all results.

    While it runs, ``sparkdl.communicator()`` is the communicator among the ranks (and
    ``horovod.tensorflow`` is initialised if that is the communicator). What the ranks print
    appears on the driver with the rank in front: at once on classic Spark, after the end where
    the executors cannot reach the driver (Spark Connect). GPUs that Spark gave to the task are
    the only ones that the function sees. Environment variables that it sets are put back.

    Args:
        fn: Pickled by value if it is not part of an installed package.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_workers: Ranks; they run at the same time. None: as many as Spark has cores.
        communicator: ``'auto'``, ``'builtin'`` or ``'horovod'``.
        driver_log_verbosity: ``'all'``: every line that a rank prints reaches the driver;
            ``'log_callback_only'``: only ``sparkdl.log_to_driver(message)``.
        use_gpu: ``'auto'``: the GPUs that Spark gives to the task, or whatever the process sees
            where Spark schedules none; True: an error if Spark gives none; False: none is seen.
        backend: Keras backend of the ranks; None: the driver's, if it has imported Keras.
        timeout_s: Limit for one collective operation; the error names the missing ranks.
        spark: The session; None: the active one.

    Returns:
        What ``fn`` returned on each rank, in rank order.

    Raises:
        ConfigError: A wrong argument, or a function that cannot be pickled.
        ResourceError: Too few slots, or dynamic allocation; no job was started.
        WorkerError: A rank raised; with its traceback. All others are ended within seconds.
        WaitTimeoutError: Not all ranks started in time; the missing ones are named.

    >>> import sparkdl
    >>> def square():
    ...     return sparkdl.communicator().rank ** 2
    >>> sparkdl.run(square, num_workers=2)  # doctest: +SKIP
    [0, 1]
    """
    _check_name("driver_log_verbosity", driver_log_verbosity, VERBOSITIES)
    _check_name("communicator", communicator, [n for n in COMMUNICATORS if n != "solo"])
    if num_workers is not None:
        _check_count("num_workers", num_workers)
    task = FunctionTask(
        function=_pickle_call(fn, args, {} if kwargs is None else kwargs),
        num_workers=num_workers or 0,
        token=secrets.token_bytes(32),
        communicator=communicator,
        timeout_s=_check_seconds("timeout_s", timeout_s),
        start_timeout_s=START_TIMEOUT_S,
        use_gpu=check_use_gpu(use_gpu),
        backend=_check_backend(backend),
        capture=driver_log_verbosity == "all",
    )
    results = _run_stage(task, spark)
    return [_unpickle(results[rank], rank) for rank in sorted(results)]


class HorovodRunner:
    """Databricks' ``HorovodRunner``: a training function on ``np`` processes at the same time.

    The ranks are connected by Horovod if it imports on all of them, else by the built-in
    communicator (the logger ``sparkdl`` says which); with Horovod ``hvd.init()`` inside the
    function finds it initialised.

    Args:
        np: Above 0: so many tasks of a barrier stage. Below -1: ``-np`` processes on the driver,
            whose output is shown whatever the verbosity. -1: in this process.
        driver_log_verbosity: ``'all'``: all output of the ranks reaches the driver;
            ``'log_callback_only'``: only ``sparkdl.log_to_driver(message)``.

    Raises:
        ConfigError: ``np`` is 0 or no whole number, or the verbosity is unknown.
    """

    def __init__(self, *, np, driver_log_verbosity="log_callback_only"):  # type: ignore[no-untyped-def]
        if isinstance(np, bool) or not isinstance(np, int) or np == 0:
            raise ConfigError(
                "HorovodRunner cannot run with this np",
                expected="a whole number: above 0 for tasks of Spark, -1 for this process, "
                "below -1 for -np processes on the driver",
                received=f"np={np!r}",
            )
        _check_name("driver_log_verbosity", driver_log_verbosity, VERBOSITIES)
        self._np, self._verbosity = np, driver_log_verbosity

    def run(self, main, **kwargs):  # type: ignore[no-untyped-def]
        """Runs ``main(**kwargs)`` on every rank and returns rank 0's result.

        Args:
            main: The training function; pickled by value, except for ``np=-1``.
            **kwargs: Its arguments.

        Raises:
            WorkerError: A rank raised; with its traceback.
            ResourceError: Too few slots, or dynamic allocation; no job was started.
        """
        task = FunctionTask(
            function=b"",
            num_workers=abs(self._np),
            token=secrets.token_bytes(32),
            communicator="auto",
            start_timeout_s=START_TIMEOUT_S,
            backend=_check_backend(None),
            all_results=False,
            capture=self._verbosity == "all",
        )
        if self._np == -1:
            _check_callable(main)
            return call_here(task, lambda: main(**kwargs))
        task = replace(task, function=_pickle_call(main, (), kwargs))
        if self._np > 0:
            return _unpickle(_run_stage(task, None)[0], 0)
        import cloudpickle

        outcomes = run_local(cloudpickle.dumps(task), -self._np, task.start_timeout_s)
        _tell_communicator(outcomes[0].communicator, len(outcomes))
        return _unpickle(outcomes[0].content or b"", 0)


def _run_stage(task: FunctionTask, spark: Any) -> dict[int, bytes]:
    """Runs the barrier stage; the pickled results by rank."""
    import cloudpickle

    spark = spark if spark is not None else cluster.session_of()
    count = task.num_workers or cluster.default_parallelism(spark)
    cluster.check_barrier(spark, count)
    with contextlib.ExitStack() as stack:
        server = None
        if not cluster.is_connect(spark):
            bind, advertised = cluster.driver_address(spark)
            with contextlib.suppress(OSError):  # no address to listen on: lines come at the end
                server = LineServer(bind, advertised, task.token, count)
                stack.callback(server.close)
        address = None if server is None else server.address
        pickled = cloudpickle.dumps(replace(task, num_workers=count, address=address))
        payload: Any = pickled
        if not cluster.is_connect(spark):
            payload = spark.sparkContext.broadcast(pickled)
            stack.callback(_quietly, payload.destroy)
        frame = spark.range(0, count, 1, count)
        stage = cluster.Stage(
            spark,
            lambda: frame.mapInArrow(
                function_stage(payload), RESULT_SCHEMA, barrier=True
            ).collect(),
            "sparkdl: run",
        )
        stack.callback(stage.cancel)
        stage.start()
        _follow(stage, server, count, task.start_timeout_s)
        rows = _rows_of(stage, server, count)
    done = {r.rank: json.loads(r.text) for r in rows if r.kind == "done"}
    kept = _joined(rows, "log")
    for rank in sorted(kept):
        for line in kept[rank].decode(errors="replace").splitlines():
            show(rank, line)
    _tell_communicator(done[0]["communicator"], count)
    results = _joined(rows, "result")
    return {rank: results.get(rank, b"") for rank in done if done[rank]["result"]}


def _follow(
    stage: cluster.Stage, server: LineServer | None, count: int, start_timeout_s: float
) -> None:
    """Shows the ranks' lines until the stage ends."""
    deadline = time.monotonic() + start_timeout_s
    while not stage.wait(0.0 if server is not None else 0.1):
        if server is None:
            continue
        for rank, line in server.poll(0.1):
            show(rank, line)
        # none at all: the executors may be unable to reach this machine, which is no failure
        if 0 < len(server.joined) < count and time.monotonic() > deadline:
            raise _missing(server.joined, count, start_timeout_s)
    if server is not None:
        for rank, line in server.drain():
            show(rank, line)


def _missing(joined: set[int], count: int, start_timeout_s: float) -> WaitTimeoutError:
    names = ", ".join(str(r) for r in range(count) if r not in joined)
    return WaitTimeoutError(
        f"{count - len(joined)} of {count} ranks did not start",
        expected=f"all ranks within {start_timeout_s:g} s",
        received=f"nothing from ranks {names}",
        hint="look at their executors' logs",
    )


def _rows_of(stage: cluster.Stage, server: LineServer | None, count: int) -> list[Any]:
    error = stage.error
    if error is None:
        return list(stage.result)
    refused = cluster.barrier_refusal(error, count)
    if refused is not None:
        raise refused from error
    described = described_in(error)
    if described is None:
        raise _lost(error) from error
    for line in str(described.get("lines", "")).splitlines():
        show(described["rank"], line)
    hint = ""
    absent = [] if server is None else [r for r in range(count) if r not in server.joined]
    if described.get("type") == "WaitTimeoutError" and server is not None and server.joined:
        hint = f"ranks that never started: {', '.join(map(str, absent)) or 'none'}"
    raise worker_error(described, hint) from None


def _lost(error: BaseException) -> WorkerError:
    """A rank that died without a word; Spark's message names its partition."""
    text = str(error)
    found = re.search(r"barrier task ResultTask\(\d+, (\d+)\)", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return WorkerError(
        int(found[1]) if found else -1,
        f"Spark gave the barrier stage up: {first}",
        text[:8000],
        hint="a process that was killed (memory?), a lost executor, or sparkdl not installed there",
    )


def _joined(rows: list[Any], kind: str) -> dict[int, bytes]:
    parts: dict[int, list[bytes]] = {}
    for row in rows:
        if row.kind == kind:
            parts.setdefault(row.rank, []).append(bytes(row.content))
    return {rank: b"".join(pieces) for rank, pieces in parts.items()}


def _unpickle(content: bytes, rank: int) -> Any:
    import cloudpickle

    try:
        return cloudpickle.loads(content)
    except Exception as error:
        raise WorkerError(
            rank,
            f"its result cannot be read on the driver: {type(error).__name__}: {error}",
            hint="return plain objects: numbers, lists, NumPy arrays",
        ) from error


def _pickle_call(fn: Any, args: Any, kwargs: Any) -> bytes:
    """The call as bytes; whatever stands in a file of the user's travels by value."""
    _check_callable(fn)
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise ConfigError(
            "the arguments of the function are wrong",
            expected="args: a tuple or list; kwargs: a dict",
            received=f"args {type(args).__name__}, kwargs {type(kwargs).__name__}",
        )
    target = getattr(fn, "func", fn)  # functools.partial
    parts = {f"part{i}": part for i, part in enumerate((*args, *kwargs.values()))}
    try:
        return pickle_by_value(
            {"fn": fn, "target": target, "args": tuple(args), "kwargs": dict(kwargs), **parts}
        )
    except Exception as error:
        raise ConfigError(
            "the function or its arguments cannot be sent to the executors",
            expected="what cloudpickle can pickle",
            received=f"{type(error).__name__}: {error}",
            hint="make models, sessions, locks and open files inside the function",
        ) from error


def _check_callable(fn: Any) -> None:
    if not callable(fn):
        raise ConfigError(
            "there is nothing to run",
            expected="a function",
            received=f"{type(fn).__name__}: {fn!r}"[:200],
            hint="pass the function itself, not what it returns",
        )


def _check_name(kind: str, name: Any, known: Sequence[str]) -> None:
    if name not in known:
        raise UnknownNameError(kind, name, known)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{name} is wrong", expected="a whole number of at least 1", received=repr(value)
        )


def _check_seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{name} is wrong", expected="seconds above 0", received=repr(value))
    return float(value)


def _check_backend(backend: str | None) -> str | None:
    """The Keras backend of the ranks: as given, or the driver's where Keras is imported."""
    import sys

    if backend is not None:
        _check_name("Keras backend", backend, BACKENDS)
        return backend
    if "keras" not in sys.modules:
        return None
    import keras

    running = str(keras.backend.backend())
    return running if running in BACKENDS else None


def _tell_communicator(name: str, count: int) -> None:
    _LOG.info("%d ranks were connected by the communicator %r", count, name)


def _quietly(action: Callable[[], Any]) -> None:
    with contextlib.suppress(Exception):
        action()
