"""``run``: any training function, once per rank of a barrier stage."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_args

from sparkdl.collective.communicator import maker_of
from sparkdl.config import COMMUNICATORS, LIMITS_OF_RUN, Limits, UseGpu, check_use_gpu
from sparkdl.data.feed import Uneven
from sparkdl.errors import ConfigError
from sparkdl.launch import interrupts
from sparkdl.launch.child import ProcessLauncher
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.function import (
    ROLES,
    Distributed,
    FunctionTask,
    Peers,
    Returned,
    call_here,
    check_roles,
    fed_ranks,
)
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.network import NETWORK_OF_RANKS, Network
from sparkdl.settings.values import (
    refuse_changed,
    require_flag,
    require_instance,
    require_int,
    require_name,
)
from sparkdl.spark.forms.fed_files import fed_files
from sparkdl.spark.forms.frames import PathForm
from sparkdl.spark.forms.opening import form_of
from sparkdl.spark.forms.shipped import removes_tables
from sparkdl.spark.runs.capacity import default_parallelism
from sparkdl.spark.runs.feeding import (
    Feeding,
    check_streaming,
    fed_frame,
    feed_settings,
    stream_settings,
    stream_workers,
)
from sparkdl.spark.runs.function_stage import (
    StageWatcher,
    check_backend,
    check_callable,
    dump_function,
    returned,
    run_stage,
)
from sparkdl.spark.runs.stream_feeding import Destination, StreamingRun

T = TypeVar("T")
VERBOSITIES = ("all", "log_callback_only")


@lists_its_arguments
def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_workers: int | None = None,
    *,
    data: object = None,
    epochs: int | None = 1,
    shuffle: bool = False,
    feeding: Feeding = Feeding(),
    communicator: str = "auto",
    driver_log_verbosity: str = "all",
    use_gpu: UseGpu = "auto",
    backend: str | None = None,
    distributed: Distributed | None = None,
    roles: Mapping[str, int] | None = None,
    ps_on_driver: bool = False,
    spark: object = None,
    network: Network = Network(),
    limits: Limits = Limits(),
) -> list[T] | Any:
    """Runs ``fn(*args, **kwargs)`` on every rank of one barrier stage; returns all results.

    With a streaming DataFrame as ``data`` it returns at once, and the functions run for as long as
    the stream does; see :class:`~sparkdl.spark.runs.stream_feeding.StreamingRun`.

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
        data: A DataFrame (or a path of Parquet, Arrow or TFRecord files), whose rows are spread
            over the ranks. Parquet and Arrow files (``.arrow``, ``.feather``) whose columns are
            numbers, texts, bytes or arrays of these do not go through Spark: each rank reads a
            range of the rows, so it must reach them. The function is then called as
            ``fn(feed, *args, **kwargs)``: ``feed`` has ``next_batch(n)``, ``batches(n)``, iteration
            over rows, ``to_tf_data(n)``, ``to_torch(n)``, ``should_stop()`` and ``terminate()``.
            Batches are dicts of NumPy arrays by column name. Of ``roles`` the chief and the workers
            share the rows; the feed of a parameter server or an evaluator has none. The rows stay
            on the rank, for the epochs after the first.
            Of a streaming DataFrame each micro-batch is spread over the ranks, and counts as done
            when their functions have taken its rows: the feed is asked again after the last one. A
            batch does not reach into the next micro-batch; ``feed.batch_id`` is Spark's number of
            it. ``should_stop()`` and the methods that give rows wait for the next one, and
            ``terminate()``, or a function that returns, ends the stream for all ranks. Beside the
            ranks Spark needs one slot more.
        epochs: Times that the feed gives all rows; None for ever. Those of a stream: once.
        shuffle: Whether each epoch has another order: blocks of some megabytes among each other,
            and the rows within each. Of a stream: the rows of each micro-batch.
        feeding: How the rows are given, beside that: a :class:`Feeding`, such as
            ``Feeding(uneven='pad')``.
        communicator: ``'builtin'``, ``'horovod'``, or ``'auto'``: Horovod where it imports on all
            ranks, for the function may call it by itself; else the built-in one.
        driver_log_verbosity: ``'all'``: every line that a rank prints reaches the driver;
            ``'log_callback_only'``: only ``sparkdl.log_to_driver(message)``.
        use_gpu: ``'auto'``: the GPUs that Spark gives to the task, or whatever the process sees
            where Spark schedules none; True: an error if Spark gives none; False: none is seen.
        backend: Keras backend of the ranks; None: the driver's, if it has imported Keras.
        distributed: Tells a framework that connects the ranks itself where they are, by variables
            of the environment. ``'tensorflow'``: ``TF_CONFIG``; rank 0 is the chief, the others are
            workers, and ``tf.distribute.MultiWorkerMirroredStrategy()`` finds all. ``'torch'``:
            ``MASTER_ADDR``, ``RANK`` and the others that ``torch.distributed.init_process_group``
            reads. ``'jax'``: ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and
            ``JAX_PROCESS_ID``. The function then runs in a process of its own, which ends with it.
        roles: Roles for ``'tensorflow'``: such as ``{'chief': 1, 'worker': 2, 'ps': 1,
            'evaluator': 1}``, ranks in this order. A ``'ps'`` is ended when the other ranks have
            returned, and so is a worker beside it and a chief, which sends it its work; with
            ``data`` no worker is, but an evaluator. The result of such a rank is None unless it has
            returned by itself.
        ps_on_driver: Whether the ranks with the role ``'ps'`` are processes of the driver's machine
            instead of Spark's tasks. They are the last ranks then.
        spark: The session; None: the active one.
        network: Where the driver and the ranks listen, and whether they encrypt: a
            :class:`~sparkdl.settings.network.Network`. ``encrypt=True`` is refused with Horovod,
            and with ``distributed`` and ``roles``, whose frameworks send by themselves; ``'auto'``
            warns where the rest is encrypted.
        limits: Memory and times: a :class:`~sparkdl.config.Limits`, such as
            ``Limits(collective_timeout_s=60, stall_timeout_s=None)``.

    Returns:
        What ``fn`` returned on each rank, in rank order; unpickled here, so the executors must be
        trusted with this machine. With a stream a
        :class:`~sparkdl.spark.runs.stream_feeding.StreamingRun`, which has ``stop()``,
        ``await_termination()`` and ``results``.

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
    require_name("communicator", communicator, COMMUNICATORS)
    refuse_changed(require_instance("network", network, Network), "run", NETWORK_OF_RANKS)
    require_instance("feeding", feeding, Feeding)
    refuse_changed(require_instance("limits", limits, Limits), "run", LIMITS_OF_RUN)
    if num_workers is not None:
        num_workers = require_int("num_workers", num_workers, 1)
    ps_on_driver = require_flag("ps_on_driver", ps_on_driver)
    num_workers = check_roles(roles, num_workers)
    peers = _peers(distributed, roles, ps_on_driver, is_fed=data is not None)
    form = form_of(data)
    check_streaming(form, feeding)
    streams = form.endless
    uneven: Uneven = feeding.uneven or ("keep" if streams else "drop")
    frame, feed, stream = None, feed_settings(data, epochs, shuffle, feeding, limits, uneven), None
    fed = fed_ranks(roles) if data is not None else None
    if feed is not None and streams:
        stream = stream_settings(feed, fed)
    with removes_tables():
        if feed is not None:
            frame, columns = fed_frame(form, spark, streams=streams, deals=True)
            feed, spark = replace(feed, columns=columns, fed=fed), frame.sparkSession
            if isinstance(form, PathForm):
                num_workers = num_workers or default_parallelism(spark)
                feed = replace(feed, files=fed_files(form.data, frame, columns, fed or num_workers))
                frame = None if feed.files is not None else frame
        beside = "" if data is None else "its feed before args"
        content = dump_function(fn, args, {} if kwargs is None else kwargs, beside)
        task = FunctionTask(
            content,
            secrets.token_bytes(32),
            DeviceRequest(
                check_backend(backend),
                check_use_gpu(use_gpu),
                unscheduled=True,
                own_process=peers is not None or streams,
            ),
            maker_of(communicator),
            timeout_s=limits.collective_timeout_s,
            start_timeout_s=limits.start_timeout_s,
            capture=driver_log_verbosity == "all",
            peers=peers,
            feed=None if streams else feed,
            stream=stream,
        )
        on_driver = (roles or {}).get("ps", 0) if ps_on_driver else 0
        if feed is not None and streams:
            wanted = None if num_workers is None else num_workers - on_driver
            count = stream_workers(spark, wanted) + on_driver
            fed_count = count if fed is None else fed
            to = Destination(
                fed_count, feed.columns, task.token.hex(), uneven, limits.start_timeout_s
            )

            def stage(watcher: StageWatcher) -> Returned:
                return run_stage(task, count, spark, network, on_driver=on_driver, watcher=watcher)

            return StreamingRun[T](stage, to, frame, feeding.checkpoint_dir, feeding.trigger, count)
        returned = run_stage(task, num_workers, spark, network, frame, on_driver)
        return [returned.load(rank) for rank in returned.results]


def _peers(
    distributed: Distributed | None,
    roles: Mapping[str, int] | None,
    ps_on_driver: bool,
    *,
    is_fed: bool,
) -> Peers | None:
    """The relation of the ranks that their frameworks are told; None for none."""
    if distributed is not None:
        require_name("distributed", distributed, get_args(Distributed))
    framework = distributed or ("tensorflow" if roles else None)
    if roles and framework != "tensorflow":
        raise ConfigError(
            "roles are for TensorFlow's strategies", expected="distributed='tensorflow' with them",
            received=f"distributed={distributed!r}",
        )  # fmt: skip
    named = {} if roles is None else roles
    if ps_on_driver and not {"ps"} < set(named):
        raise ConfigError(
            "there are no parameter servers that could run on the driver",
            expected="roles with a 'ps' and others, for ps_on_driver=True",
            received=f"roles={roles}",
        )
    if framework is None:
        return None
    order = sorted(ROLES, key=lambda role: ps_on_driver and role == "ps")  # stable
    found = tuple((role, named[role]) for role in order if role in named)
    return Peers(framework, found, is_fed=is_fed)


class HorovodRunner:
    """Databricks' ``HorovodRunner``: a training function on ``np`` processes at the same time.

    The ranks are connected by Horovod if it imports on all of them, else by the built-in
    communicator (the logger ``sparkdl`` says which); with Horovod ``hvd.init()`` inside the
    function finds it initialised.

    Args:
        np: Above 0: the tasks of a barrier stage. Below -1: ``-np`` processes on the driver, whose
            output is shown whatever the verbosity. -1: in this process.
        driver_log_verbosity: ``'all'``: all output of the ranks reaches the driver;
            ``'log_callback_only'``: only ``sparkdl.log_to_driver(message)``.

    Raises:
        ConfigError: ``np`` is 0 or no whole number, or the verbosity is unknown.
    """

    @lists_its_arguments
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
        check_callable(main)
        task = FunctionTask(
            b"" if self._np == -1 else dump_function(main, (), kwargs),
            secrets.token_bytes(32),
            DeviceRequest(check_backend(None), unscheduled=True),
            all_results=False,
            capture=self._np > 0 and self._verbosity == "all",
        )
        if self._np == -1:
            return call_here(task, lambda: main(**kwargs))
        if self._np > 0:
            return run_stage(task, self._np, None, Network()).load(0)
        with interrupts.heard(), interrupts.CleanStack() as stack:
            ranks = stack.begin(ProcessLauncher(-self._np).launch(task))
            while not ranks.wait(0.1):
                interrupts.check()
            return returned(ranks, -self._np).load(0)
