"""Any training function, once per rank: in a barrier stage, in local processes, or right here."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sparkdl.collective.communicator import COMMUNICATORS
from sparkdl.config import (
    UseGpu,
    check_use_gpu,
    require_int,
    require_name,
    require_seconds,
)
from sparkdl.coordinator.driver_client import DriverClient
from sparkdl.coordinator.host import CoordinatorHost
from sparkdl.coordinator.settings import Settings
from sparkdl.data.feed import Uneven
from sparkdl.errors import ConfigError, ResourceError, WaitTimeoutError
from sparkdl.launch import interrupts
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.failures import FailureDescription, RankFailure
from sparkdl.launch.function import (
    DriverUnreachableError,
    FunctionTask,
    Returned,
    call_here,
    dump_call,
)
from sparkdl.launch.processes import ProcessLauncher
from sparkdl.launch.task import Ranks
from sparkdl.learner import BACKENDS
from sparkdl.learner.framework import running_backend
from sparkdl.log_lines import show
from sparkdl.network import Encrypt, Network, PortSpec, require_encryptable
from sparkdl.spark.driver import cluster
from sparkdl.spark.driver.feeding import fed_frame, feed_settings
from sparkdl.spark.driver.launcher import SparkLauncher, SparkRanks
from sparkdl.spark.driver.network import certificate_of, listening_address, rank_listening
from sparkdl.spark.driver.slots import slot_pool
from sparkdl.transport.listeners import ListenOptions

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
    data: Any = None,
    epochs: int | None = 1,
    shuffle: bool = False,
    seed: int = 0,
    uneven: Uneven = "drop",
    memory_budget_mb: int = 1024,
    communicator: str = "auto",
    driver_log_verbosity: str = "all",
    use_gpu: UseGpu = "auto",
    backend: str | None = None,
    timeout_s: float = 600.0,
    tf_config: bool = False,
    spark: Any = None,
    port: PortSpec = 0,
    server_bind: str | None = None,
    server_address: str | None = None,
    worker_port: PortSpec = 0,
    worker_bind: str | None = None,
    encrypt: Encrypt = "auto",
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
        data: A DataFrame (or a path of Parquet or TFRecord files), whose rows are spread over the
            ranks. The function is then called as ``fn(feed, *args, **kwargs)``: ``feed`` has
            ``next_batch(n)``, ``batches(n)``, iteration over rows, ``to_tf_data(n)``,
            ``to_torch(n)``, ``should_stop()`` and ``terminate()``. Batches are dicts of NumPy
            arrays by column name. The rows stay on the rank, for the epochs after the first.
        epochs: Times that the feed gives all rows; None for ever.
        shuffle: Whether each epoch has another order: blocks of some megabytes among each other,
            and the rows within each.
        seed: Of that order.
        uneven: Where ranks have different numbers of rows: ``'drop'``: each epoch has as many as
            the rank with fewest, so all take equal steps; ``'pad'``: as many as the rank with
            most, others begin again; ``'keep'``: each its own, for functions in which the ranks do
            not wait for each other.
        memory_budget_mb: Rows of a rank beyond this are kept on its disk.
        communicator: ``'builtin'``, ``'horovod'``, or ``'auto'``: Horovod where it imports on all
            ranks, for the function may call it by itself; else the built-in one.
        driver_log_verbosity: ``'all'``: every line that a rank prints reaches the driver;
            ``'log_callback_only'``: only ``sparkdl.log_to_driver(message)``.
        use_gpu: ``'auto'``: the GPUs that Spark gives to the task, or whatever the process sees
            where Spark schedules none; True: an error if Spark gives none; False: none is seen.
        backend: Keras backend of the ranks; None: the driver's, if it has imported Keras.
        timeout_s: Limit for one collective operation; the error names the missing ranks.
        tf_config: True sets ``TF_CONFIG`` for TensorFlow's own strategies: rank 0 is the chief,
            the others are workers. ``tf.distribute.MultiWorkerMirroredStrategy()`` then finds all
            ranks. The function then runs in a process of its own, which ends with it.
        spark: The session; None: the active one.
        port: The driver's, where the ranks meet: 0 for any free one, a number or a range
            ``'7000-7010'``.
        server_bind: Address that the driver listens on; None: the narrowest that works.
        server_address: Address that the ranks connect to, if it differs (NAT, several networks).
        worker_port: The ranks' own ports: 0 for any free ones, or a range with two for each rank
            of a host.
        worker_bind: Address or network (``'10.0.0.0/8'``) that the ranks listen on; None: the
            address from which a rank's host reaches the driver.
        encrypt: Whether traffic between hosts is encrypted (TLS): ``'auto'``: as Spark's own;
            True; False. Horovod's cannot be.

    Returns:
        What ``fn`` returned on each rank, in rank order; unpickled here, so the executors must be
        trusted with this machine.

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
    require_name("driver_log_verbosity", driver_log_verbosity, VERBOSITIES)
    require_name("communicator", communicator, [n for n in COMMUNICATORS if n != "solo"])
    network = Network(port, server_bind, server_address, worker_port, worker_bind, encrypt)
    if num_workers is not None:
        require_int("num_workers", num_workers, 1)
    if not isinstance(tf_config, bool):
        raise ConfigError(
            "tf_config says whether to set TF_CONFIG, not to what",
            expected="True or False",
            received=repr(tf_config)[:200],
            hint="run knows the ranks' addresses; the function can change os.environ['TF_CONFIG']",
        )
    frame, feed = None, feed_settings(data, epochs, shuffle, seed, uneven, memory_budget_mb)
    if feed is not None:
        frame, columns = fed_frame(data, spark)
        feed, spark = replace(feed, columns=columns), frame.sparkSession
    task = FunctionTask(
        _dump_call(fn, args, {} if kwargs is None else kwargs),
        secrets.token_bytes(32),
        DeviceRequest(
            _check_backend(backend), check_use_gpu(use_gpu), unscheduled=True, own_process=tf_config
        ),
        communicator,
        timeout_s=require_seconds("timeout_s", timeout_s),
        start_timeout_s=START_TIMEOUT_S,
        capture=driver_log_verbosity == "all",
        tf_config=tf_config,
        feed=feed,
    )
    returned = _run_stage(task, num_workers, spark, network, frame)
    return [returned.load(rank) for rank in returned.results]


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
        require_name("driver_log_verbosity", driver_log_verbosity, VERBOSITIES)
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
        _check_callable(main)
        task = FunctionTask(
            b"" if self._np == -1 else _dump_call(main, (), kwargs),
            secrets.token_bytes(32),
            DeviceRequest(_check_backend(None), unscheduled=True),
            start_timeout_s=START_TIMEOUT_S,
            all_results=False,
            capture=self._np > 0 and self._verbosity == "all",
        )
        if self._np == -1:
            return call_here(task, lambda: main(**kwargs))
        if self._np > 0:
            return _run_stage(task, self._np, None, Network()).load(0)
        with interrupts.heard(), interrupts.CleanStack() as stack:
            ranks = stack.begin(ProcessLauncher(-self._np).launch(task))
            while not ranks.wait(0.1):
                interrupts.check()
            return _returned(ranks, -self._np).load(0)


@interrupts.heard()
def _run_stage(
    task: FunctionTask, num_workers: int | None, spark: Any, network: Network, rows: Any = None
) -> Returned:
    """Runs the function in a barrier stage and shows the ranks' lines."""
    spark = spark if spark is not None else cluster.session_of()
    certificate = certificate_of(spark, network)
    if certificate is not None:
        require_encryptable(task.communicator)
    listening = rank_listening(spark, network)
    task = replace(task, listening=listening, certificate=certificate)
    count = num_workers or cluster.default_parallelism(spark)
    cluster.check_barrier(spark, count)
    with interrupts.CleanStack() as stack:
        capacity = cluster.count_slots(spark)
        if capacity is not None:
            limit_s = task.start_timeout_s
            stack.enter_context(slot_pool(spark).take(count, capacity, "run", limit_s))
        driver = None
        if not cluster.is_connect(spark):
            settings = Settings(count, start_timeout_s=task.start_timeout_s)
            bind, advertised = listening_address(spark, network)
            listen = ListenOptions("socket", network.port, bind, advertised, web=False)
            chosen = network.port != 0 or network.server_bind is not None
            with contextlib.ExitStack() as tried:
                if not chosen:  # no address to listen on: the ranks meet through Spark
                    tried.enter_context(contextlib.suppress(OSError, ResourceError))
                with interrupts.held():
                    host = stack.enter_context(CoordinatorHost(settings, listen, certificate))
                driver, task = host.driver, replace(task, endpoint=host.endpoint)
        try:
            return _run_ranks(spark, task, count, driver, rows)
        except RankFailure as error:
            warnings.warn(
                f"{error.failure.error}\nAll ranks begin again and meet through Spark; what they "
                "print comes when they have ended.",
                RuntimeWarning,
                stacklevel=4,
            )
        return _run_ranks(spark, replace(task, endpoint=None), count, None, rows)


def _run_ranks(
    spark: Any, task: FunctionTask, count: int, driver: DriverClient | None, rows: Any
) -> Returned:
    """Runs the stage to its end.

    Raises:
        RankFailure: A rank cannot reach the driver; the function has not been called.
        WorkerError: A rank raised.
    """
    frame = spark.range(0, count, 1, count) if rows is None else rows.repartition(count)
    launcher = SparkLauncher(
        frame, count, barrier=True, description="sparkdl: run",
        noun="barrier stage",
    )  # fmt: skip
    with interrupts.CleanStack() as stack:
        ranks = stack.begin(launcher.launch(task))
        _follow(ranks, driver, count, task.start_timeout_s)
        return _returned(ranks, count, driver)


def _returned(ranks: Ranks, count: int, driver: DriverClient | None = None) -> Returned:
    """What the ranks returned.

    Raises:
        RankFailure: A rank cannot reach the driver; the function has not been called.
        WorkerError: A rank raised.
    """
    try:
        returned = Returned.of(ranks.results())
    except RankFailure as error:
        failure = error.failure
        if failure.type == DriverUnreachableError.__name__:
            raise
        for line in failure.lines.splitlines():
            show(failure.rank, line)
        raise failure.worker_error(_hint(failure, count, driver)) from None
    _LOG.info("%d ranks were connected by the communicator %r", count, returned.communicator)
    return returned


def _hint(failure: FailureDescription, count: int, driver: DriverClient | None) -> str:
    """Names the ranks that never started, if others waited for them."""
    if failure.type != "WaitTimeoutError" or driver is None:
        return ""
    joined = driver.status().workers
    absent = [str(rank) for rank in range(count) if rank not in joined]
    return f"ranks that never started: {', '.join(absent) or 'none'}" if joined else ""


def _follow(
    ranks: SparkRanks, driver: DriverClient | None, count: int, start_timeout_s: float
) -> None:
    """Shows the ranks' lines until they have ended."""
    deadline = time.monotonic() + start_timeout_s
    ended = False
    while not ended:
        ended = ranks.wait(0.1)
        interrupts.check()
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
        expected=f"all ranks within {start_timeout_s:g} s",
        received=f"nothing from ranks {names}",
        hint="look at their executors' logs; can they connect to this driver?",
    )


def _dump_call(fn: Any, args: Any, kwargs: Any) -> bytes:
    """The call as bytes.

    Raises:
        ConfigError: It is no call, or cannot be pickled.
    """
    _check_callable(fn)
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise ConfigError(
            "the function cannot be called with these arguments",
            expected="args: a tuple or list; kwargs: a dict",
            received=f"args {type(args).__name__}, kwargs {type(kwargs).__name__}",
        )
    try:
        return dump_call(fn, args, kwargs)
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


def _check_backend(backend: str | None) -> str | None:
    """The Keras backend of the ranks: as given, or the driver's where Keras is imported."""
    if backend is not None:
        require_name("Keras backend", backend, BACKENDS)
        return backend
    running = running_backend()
    return running if running in BACKENDS else None
