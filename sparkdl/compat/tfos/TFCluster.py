"""``TFCluster.run``: a function on the nodes of a cluster with roles, fed by Spark or not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sparkdl.compat.tfos import nodes
from sparkdl.compat.tfos.board import BoardRequest, BoardUrl
from sparkdl.compat.tfos.nodes import MapFunction, call_fed_node, pickled
from sparkdl.config import Limits
from sparkdl.errors import ConfigError, WaitTimeoutError
from sparkdl.settings.values import require_seconds
from sparkdl.spark.forms.opening import form_of
from sparkdl.spark.run import run as run_ranks
from sparkdl.spark.runs.function_stage import dump_function
from sparkdl.spark.runs.stream_feeding import StreamingRun
from sparkdl.spark.session.running import this_interpreter, with_this_interpreter


class InputMode:
    """The reader of the data: the function itself, or Spark."""

    TENSORFLOW = 0
    SPARK = 1


class TFCluster:
    """A cluster; see :func:`run`."""

    def __init__(
        self,
        sc: Any,
        map_fun: MapFunction,
        tf_args: object,
        roles: dict[str, int],
        input_mode: int,
        *,
        chief: str = "chief",
        ps_on_driver: bool = False,
        tensorboard: bool = False,
        log_dir: str | None = None,
        start_s: float = 600.0,
    ) -> None:
        from pyspark.sql import SparkSession

        self._spark = SparkSession(sc)
        self._function, self._args, self._roles = map_fun, tf_args, roles
        default_fs = str(sc._jsc.hadoopConfiguration().get("fs.defaultFS") or "file:///")
        self._facts = nodes.ClusterFacts(default_fs, chief)
        self._fed = input_mode == InputMode.SPARK
        self._ps_on_driver = ps_on_driver
        self._board = BoardUrl() if tensorboard else None
        self._log_dir, self._start_s = log_dir, start_s
        self._error: BaseException | None = None
        self._trained = False
        self._stream: StreamingRun[None] | None = None
        self._thread: threading.Thread | None = None
        if not self._fed:
            self._thread = threading.Thread(target=self._run, name="sparkdl-tfcluster", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._call_nodes(nodes.call_node)
        except BaseException as error:
            self._error = error

    def _call_nodes(self, on_node: Callable[..., None], **options: Any) -> object:
        """Calls the function on all nodes; with TensorBoard on the chief, if asked for."""
        requested: AbstractContextManager[BoardRequest | None] = nullcontext()
        if self._board is not None:
            requested = self._board.requested(self._spark, self._log_dir)
        with requested as board:
            return run_ranks(
                on_node, (self._function, self._args, self._facts, board),
                roles=self._roles, spark=self._spark, communicator="builtin",
                ps_on_driver=self._ps_on_driver, **options,
            )  # fmt: skip

    def train(
        self, dataRDD: Any, num_epochs: int = 0, feed_timeout: float = 600.0, qname: str = "input"
    ) -> StreamingRun[None] | None:
        """Calls the function on all nodes, with the rows of an RDD, and waits for its end.

        The chief and the workers share the rows. The feed of a parameter server or an evaluator has
        none, and they are ended when the others have returned.

        Args:
            dataRDD: Any elements that can be pickled. Or a streaming DataFrame, whose rows come as
                tuples; then this returns at once, and :meth:`shutdown` waits.
            num_epochs: Times that they are given; 0: 10.
            feed_timeout: Seconds for which the function may ask for no rows while there are some.
            qname: As TensorFlowOnSpark has it; there are no queues here.

        Returns:
            Of a stream a handle, with ``stop()``; else None.

        Raises:
            ConfigError: ``InputMode.TENSORFLOW``, a cluster that was trained before, or a DStream.
            WorkerError: The function raised or stalled on a node; with its traceback.
        """
        self._check_fed("train")
        if self._trained:
            raise ConfigError(
                "this cluster's function has been called for training already",
                expected="one call of train, with num_epochs", received="a second one",
                hint="the function runs as long as one call of train does: make another cluster",
            )  # fmt: skip
        if form_of(dataRDD).endless:
            return self._train_stream(dataRDD, num_epochs, feed_timeout)
        _check_rdd(dataRDD)
        self._trained = True
        with this_interpreter(dataRDD.context):
            frame = self._spark.createDataFrame(dataRDD.mapPartitions(pickled), "element binary")
        self._call_nodes(
            call_fed_node, data=frame, epochs=num_epochs or 10,
            limits=Limits(stall_timeout_s=feed_timeout),
        )  # fmt: skip
        return None

    def _train_stream(
        self, stream: Any, num_epochs: int, feed_timeout: float
    ) -> StreamingRun[None]:
        if self._board is not None:
            raise ConfigError(
                "TensorBoard does not run beside a function that a stream feeds",
                expected="tensorboard=False with a streaming DataFrame",
                received="tensorboard=True",
            )
        with this_interpreter(self._spark.sparkContext):
            frame = stream.mapInArrow(nodes.pickled_batches, "element binary")
        limits = Limits(stall_timeout_s=feed_timeout)
        run = self._call_nodes(call_fed_node, data=frame, epochs=num_epochs or 1, limits=limits)
        assert isinstance(run, StreamingRun)
        self._trained, self._stream = True, run
        return run

    def inference(self, dataRDD: Any, feed_timeout: float = 600.0, qname: str = "input") -> Any:
        """The function's results for the elements of an RDD: one for each, in order.

        Nothing runs before the results are asked for. Then each partition that is asked for calls
        the function once, in an ordinary task, as the only node of a cluster; the function gets the
        elements as it asks for them, and an empty partition does not call it. So results may be
        larger than memory, and ``take(5)`` computes one partition.

        Args:
            dataRDD: Any elements that can be pickled.
            feed_timeout: Seconds for which the function may neither ask for rows nor give results.
            qname: As TensorFlowOnSpark has it; there are no queues here.

        Returns:
            An RDD with the partitions of ``dataRDD``. Its actions fail with Spark's error, which
            has the traceback, where the function raises, stalls, or gives another number of results
            than it was given elements.

        Raises:
            ConfigError: The cluster has ``InputMode.TENSORFLOW``, a function that cannot be
                pickled, or no RDD.
        """
        self._check_fed("inference")
        _check_rdd(dataRDD)
        require_seconds("feed_timeout", feed_timeout)
        content = dump_function(self._function, (self._args,), {}, "its context after args")
        job = self._facts.chief if "chief" in self._roles else "worker"
        default_fs = self._facts.default_fs

        def infer(number: int, elements: Iterable[Any]) -> Iterator[Any]:
            return nodes.infer_elements(number, elements, content, default_fs, job, feed_timeout)

        return with_this_interpreter(dataRDD.mapPartitionsWithIndex(infer))

    def _check_fed(self, method: str) -> None:
        if not self._fed:
            raise ConfigError(
                f"{method} feeds the nodes of a cluster",
                expected="TFCluster.run(..., input_mode=InputMode.SPARK)",
                received="InputMode.TENSORFLOW",
            )

    def shutdown(self, ssc: object = None, grace_secs: float = 0, timeout: float = 259200) -> None:
        """Waits until the function has ended on all nodes; the SparkContext goes on.

        Args:
            ssc: A streaming context, refused.
            grace_secs: As TensorFlowOnSpark has it: time for an export that goes on after the feed.
                Here ``train`` has waited for it.
            timeout: The longest wait in seconds.

        Raises:
            ConfigError: A streaming context.
            WaitTimeoutError: The function still runs; it is not ended.
            WorkerError: It raised on a node; with its traceback.
        """
        if ssc is not None:
            raise _no_dstreams()
        ended = True
        if self._stream is not None:
            ended = self._stream.await_termination(timeout)
        elif self._thread is not None:
            self._thread.join(timeout)
            ended = not self._thread.is_alive()
        if not ended:
            raise WaitTimeoutError(
                "the function of a cluster still runs", expected=f"its end within {timeout:g} s",
                received="nodes that run",
            )  # fmt: skip
        if self._error is not None:
            raise self._error

    def tensorboard_url(self) -> str | None:
        """The address of the chief's TensorBoard.

        With ``InputMode.TENSORFLOW`` this waits until it has started; with ``InputMode.SPARK`` it
        runs while ``train`` does.

        Returns:
            None without ``tensorboard=True``, or where it does not run: not yet, or not any more.
        """
        if self._board is None:
            return None
        return self._board.wait(0.0 if self._fed else self._start_s)


def run(
    sc: object,
    map_fun: MapFunction,
    tf_args: object,
    num_executors: int,
    num_ps: int = 0,
    tensorboard: bool = False,
    input_mode: int = InputMode.TENSORFLOW,
    log_dir: str | None = None,
    driver_ps_nodes: bool = False,
    master_node: str | None = None,
    reservation_timeout: float = 600,
    queues: Sequence[str] = ("input", "output", "error"),
    eval_node: bool = False,
    release_port: bool = True,
) -> TFCluster:
    """A cluster whose nodes call ``map_fun(tf_args, ctx)``, as tasks of one barrier stage.

    Args:
        sc: The SparkContext.
        map_fun: The function; ``ctx`` is a :class:`~sparkdl.compat.tfos.TFNode.TFNodeContext`.
        tf_args: Its first argument; a list becomes ``sys.argv``, too.
        num_executors: Nodes, those of all roles.
        num_ps: Parameter servers among them.
        tensorboard: Whether TensorBoard runs beside the function of the chief (of the first worker
            where there is no chief), on a free port of its host and for as long as that runs; see
            :meth:`TFCluster.tensorboard_url`. Whoever reaches the host reaches it.
        input_mode: ``InputMode.TENSORFLOW``: the function begins now and reads its data itself;
            ``InputMode.SPARK``: it begins with ``train`` or ``inference``.
        log_dir: What TensorBoard shows; None: ``tensorboard_<executor_id>`` below the chief's
            working directory.
        queues, release_port: As TensorFlowOnSpark has them; without a meaning here.
        driver_ps_nodes: Whether parameter servers are processes of the driver's machine, so that
            ``num_executors - num_ps`` executors do. They are the last nodes then.
        reservation_timeout: The longest wait of ``tensorboard_url`` (nodes that do not start are an
            error after 300 s).
        master_node: ``'chief'`` or ``'master'``: a node is the chief, and ``ctx.job_name`` and
            ``ctx.cluster_spec`` call it so; in ``TF_CONFIG`` it is the chief, the only name of the
            two that TensorFlow's strategies know. None: all are workers.
        eval_node: Whether a node is an evaluator.

    Raises:
        ConfigError: Something that is not there, or roles that do not fit.
    """
    if master_node not in (None, "chief", "master") or (driver_ps_nodes and not num_ps):
        raise ConfigError(
            "this cluster cannot be made here",
            expected="master_node None or 'chief', num_ps of at least 1 for driver_ps_nodes",
            received=f"master_node={master_node!r}, num_ps={num_ps}",
        )
    roles = {"chief": int(master_node is not None), "ps": num_ps, "evaluator": int(eval_node)}
    roles["worker"] = num_executors - sum(roles.values())
    if roles["worker"] < 0 or not (roles["worker"] or roles["chief"]):
        raise ConfigError(
            "a cluster without workers",
            expected="more executors than parameter servers and evaluators",
            received=f"num_executors={num_executors}, num_ps={num_ps}, eval_node={eval_node}",
        )
    found = {role: count for role, count in roles.items() if count}
    return TFCluster(
        sc, map_fun, tf_args, found, input_mode, chief=master_node or "chief",
        ps_on_driver=driver_ps_nodes, tensorboard=tensorboard, log_dir=log_dir,
        start_s=require_seconds("reservation_timeout", reservation_timeout),
    )  # fmt: skip


def _check_rdd(rdd: object) -> None:
    if hasattr(rdd, "foreachRDD"):
        raise _no_dstreams()
    if not hasattr(rdd, "mapPartitions"):
        raise ConfigError(
            "a cluster cannot be fed with this", expected="an RDD", received=type(rdd).__name__,
            hint="df.rdd is the RDD of a DataFrame",
        )  # fmt: skip


def _no_dstreams() -> ConfigError:
    return ConfigError(
        "DStreams cannot feed a cluster here",
        expected="an RDD for train and inference, ssc=None for shutdown",
        received="a stream of Spark's old streaming interface",
        hint="Structured Streaming has taken its place: a model's transform(streaming_df) predicts "
        "on one, and TFCluster.run(...).train(streaming_df) feeds its rows; train(...).stop() ends "
        "that",
    )
