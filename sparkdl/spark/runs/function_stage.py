"""A function on every rank of a barrier stage: sent, followed, and its results collected."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from sparkdl.coordinator.driver_client import CoordinatorHost, DriverClient
from sparkdl.coordinator.group import Store
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import Cause, ConfigError, ResourceError, WaitTimeoutError
from sparkdl.failures import Failure, RankFailure
from sparkdl.launch import interrupts
from sparkdl.launch.child import JoinedLauncher, ProcessLauncher
from sparkdl.launch.function import FunctionTask, Returned, dump_call
from sparkdl.launch.task import Launcher, Ranks
from sparkdl.learner import BACKENDS
from sparkdl.learner.framework import running_backend
from sparkdl.process.log_lines import show
from sparkdl.process.user_warnings import warn_user
from sparkdl.settings.call_arguments import require_call
from sparkdl.settings.network import Network, require_encryptable, say_what_is_in_the_clear
from sparkdl.settings.values import require_name
from sparkdl.spark.forms.sources import dealt
from sparkdl.spark.runs import capacity
from sparkdl.spark.runs.capacity import slot_pool
from sparkdl.spark.runs.launcher import SparkLauncher
from sparkdl.spark.runs.resources import certificate_of, listening_address, rank_listening
from sparkdl.spark.session import running
from sparkdl.transport.address import ListenOptions

_LOG = logging.getLogger("sparkdl")


class StageWatcher(Protocol):
    """Takes part in a stage, on the driver."""

    @property
    def store(self) -> Store:
        """The store that the ranks share."""

    def begun(self, driver: DriverClient, fingerprint: str) -> None:
        """The coordinator runs, and has the run's certificate; the ranks come."""

    def check(self) -> None:
        """Called every 0.1 s while the ranks run; what it raises ends them."""


@interrupts.heard()
def run_stage(
    task: FunctionTask,
    num_workers: int | None,
    spark: object,
    network: Network,
    rows: object = None,
    on_driver: int = 0,
    watcher: StageWatcher | None = None,
) -> Returned:
    """Runs the function in a barrier stage and shows the ranks' lines.

    Args:
        num_workers: Ranks; None: as many as Spark has cores.
        spark: The session; None: the active one.
        rows: A frame that is spread over the ranks; None: they get no rows.
        on_driver: How many of the last ranks are processes of this machine instead.
        watcher: Takes part; the ranks must reach this machine then.

    Raises:
        ConfigError: Encryption was asked for, and cannot be had for all that the ranks send.
    """
    spark = spark if spark is not None else running.session_of()
    running.require_running(spark)
    certificate = certificate_of(spark, network)
    if certificate is not None:
        require_encryptable(task.communicator)
        if task.peers is not None:
            say_what_is_in_the_clear(task.peers.framework, network.encrypt)
    task = replace(task, listening=rank_listening(spark, network), certificate=certificate)
    count = num_workers or capacity.default_parallelism(spark)
    tasks = count - on_driver
    capacity.check_barrier(spark, tasks)
    with interrupts.CleanStack() as stack:
        slots = capacity.count_slots(spark)
        if slots is not None:
            stack.enter_context(slot_pool(spark).take(tasks, slots, "run", task.start_timeout_s))
        driver = None
        if not running.is_connect(spark):
            settings = Settings(count, start_timeout_s=task.start_timeout_s)
            bind, advertised = listening_address(spark, network)
            listen = ListenOptions("socket", network.port, bind, advertised, web=False)
            chosen = network.port != 0 or network.server_bind is not None or on_driver > 0
            chosen = chosen or watcher is not None
            store = None if watcher is None else watcher.store
            with contextlib.ExitStack() as tried:
                if not chosen:  # no address to listen on: the ranks meet through Spark
                    tried.enter_context(contextlib.suppress(OSError, ResourceError))
                with interrupts.held():
                    host = stack.enter_context(
                        CoordinatorHost(settings, listen, certificate, store)
                    )
                driver, task = host.driver, replace(task, endpoint=host.endpoint)
                if watcher is not None:
                    watcher.begun(driver, host.endpoint.fingerprint)
        if driver is None and on_driver:
            raise ConfigError(
                "ranks on the driver cannot meet those on executors",
                expected="a classic session, whose driver is this process",
                received="a Spark Connect client", hint="ps_on_driver=False",
            )  # fmt: skip
        try:
            return _run_ranks(spark, task, count, driver, rows, on_driver, watcher)
        except RankFailure as error:
            if on_driver or watcher is not None:
                raise error.failure.library_error() from None
            warn_user(
                f"{error.failure.error}\nAll ranks begin again and meet through Spark; what they "
                "print comes when they have ended."
            )
        return _run_ranks(spark, replace(task, endpoint=None), count, None, rows)


def _run_ranks(
    spark: Any,
    task: FunctionTask,
    count: int,
    driver: DriverClient | None,
    rows: Any,
    on_driver: int = 0,
    watcher: StageWatcher | None = None,
) -> Returned:
    tasks = count - on_driver
    if rows is not None and on_driver and rows.isEmpty():  # ranks on the driver would wait
        task, rows = _without_rows(task), None
    fed = None if task.feed is None else task.feed.fed
    frame = spark.range(0, tasks, 1, tasks) if rows is None else dealt(rows, tasks, fed=fed)
    launcher: Launcher = SparkLauncher(
        frame, count, barrier=True, description="sparkdl: run", noun="barrier stage"
    )
    if on_driver:
        launcher = JoinedLauncher(launcher, ProcessLauncher(on_driver, first_rank=tasks))
    with interrupts.CleanStack() as stack:
        ranks = stack.begin(launcher.launch(task))
        _follow(ranks, driver, count, task.start_timeout_s, watcher)
        found = returned(ranks, count, driver)
    if rows is not None and not found.communicator:  # Spark starts no tasks for what has no rows
        return _run_ranks(spark, _without_rows(task), count, driver, None, on_driver, watcher)
    return found


def _without_rows(task: FunctionTask) -> FunctionTask:
    """The task with a feed that has no rows on any rank."""
    return task if task.feed is None else replace(task, feed=replace(task.feed, fed=0))


def returned(ranks: Ranks, count: int, driver: DriverClient | None = None) -> Returned:
    """The ranks' results.

    Raises:
        RankFailure: A rank cannot reach the driver; the function has not been called.
        WorkerError: A rank raised.
    """
    try:
        returned = Returned.of(ranks.results())
    except RankFailure as error:
        failure = error.failure
        if failure.cause is Cause.UNREACHED:
            raise
        for line in failure.lines.splitlines():
            show(failure.rank, line)
        raise failure.worker_error(_hint(failure, count, driver)) from None
    _LOG.info("%d ranks were connected by the communicator %r", count, returned.communicator)
    return returned


def _hint(failure: Failure, count: int, driver: DriverClient | None) -> str:
    """Names the ranks that never started, if others waited for them."""
    if failure.cause is not Cause.TIMEOUT or driver is None:
        return ""
    joined = driver.status().workers
    absent = [str(rank) for rank in range(count) if rank not in joined]
    return f"ranks that never started: {', '.join(absent) or 'none'}" if joined else ""


def _follow(
    ranks: Ranks,
    driver: DriverClient | None,
    count: int,
    start_timeout_s: float,
    watcher: StageWatcher | None,
) -> None:
    """Shows the ranks' lines until they have ended."""
    deadline = time.monotonic() + start_timeout_s
    ended = False
    while not ended:
        ended = ranks.wait(0.1)
        interrupts.check()
        if watcher is not None:
            watcher.check()
        if driver is None:
            continue
        for rank, line in driver.take_lines():
            show(rank, line)
        if not ended and time.monotonic() > deadline:
            joined = set(driver.status().workers)
            # none at all: the executors may be unable to reach this machine, which is no failure
            if 0 < len(joined) < count:
                raise _missing(joined, count, start_timeout_s)
            deadline = math.inf


def _missing(joined: set[int], count: int, start_timeout_s: float) -> WaitTimeoutError:
    names = ", ".join(str(r) for r in range(count) if r not in joined)
    return WaitTimeoutError(
        f"{count - len(joined)} of {count} ranks did not start",
        expected=f"all ranks within {start_timeout_s:g} s", received=f"nothing from ranks {names}",
        hint="look at their executors' logs; can they connect to this driver?",
    )  # fmt: skip


def dump_function(fn: Any, args: Any, kwargs: Any, beside: str = "") -> bytes:
    """The call as bytes.

    Args:
        beside: What the function is given by place beside ``args``, in words; empty for nothing.

    Raises:
        ConfigError: It is no call, the function does not take these arguments, or it cannot be
            pickled.
    """
    check_callable(fn)
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise ConfigError(
            "the function cannot be called with these arguments",
            expected="args: a tuple or list; kwargs: a dict",
            received=f"args {type(args).__name__}, kwargs {type(kwargs).__name__}",
        )
    hint = f"it is given {beside}" if beside else "args are its positional arguments"
    require_call("the function", fn, (*[beside] * bool(beside), *args), kwargs, hint)
    try:
        return dump_call(fn, args, kwargs)
    except Exception as error:
        raise ConfigError(
            "the function or its arguments cannot be sent to the executors",
            expected="what cloudpickle can pickle", received=f"{type(error).__name__}: {error}",
            hint="make models, sessions, locks and open files inside the function",
        ) from error  # fmt: skip


def check_callable(fn: object) -> None:
    if not callable(fn):
        raise ConfigError(
            "there is nothing to run", expected="a function",
            received=f"{type(fn).__name__}: {fn!r}"[:200],
            hint="pass the function itself, not what it returns",
        )  # fmt: skip


def check_backend(backend: str | None) -> str | None:
    """The Keras backend of the ranks: as given, or the driver's where Keras is imported."""
    if backend is not None:
        require_name("Keras backend", backend, BACKENDS)
        return backend
    running = running_backend()
    return running if running in BACKENDS else None
