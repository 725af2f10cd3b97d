"""``TFCluster.run``: a function on the nodes of a cluster with roles, fed by Spark or not."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from sparkdl.compat.tfos.nodes import MapFunction, call_fed_node, call_node, pickled
from sparkdl.data.feed import Uneven
from sparkdl.errors import ConfigError, WaitTimeoutError
from sparkdl.spark.run import run as run_ranks

_DEFAULT_EPOCHS = 10
_CHIEFS = ("chief", "master")


class InputMode:
    """Who reads the data: the function itself, or Spark."""

    TENSORFLOW = 0
    SPARK = 1


class TFCluster:
    """A cluster; see :func:`run`."""

    def __init__(
        self, sc: Any, map_fun: MapFunction, tf_args: Any, roles: dict[str, int], input_mode: int
    ) -> None:
        from pyspark.sql import SparkSession

        self._spark = SparkSession(sc)
        self._function, self._args, self._roles = map_fun, tf_args, roles
        self._default_fs = str(sc._jsc.hadoopConfiguration().get("fs.defaultFS") or "file:///")
        self._fed = input_mode == InputMode.SPARK
        self._error: BaseException | None = None
        self._trained = False
        self._thread: threading.Thread | None = None
        if not self._fed:
            self._thread = threading.Thread(target=self._run, name="sparkdl-tfcluster", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            run_ranks(
                call_node, (self._function, self._args, self._default_fs),
                roles=self._roles, spark=self._spark, communicator="builtin",
            )  # fmt: skip
        except BaseException as error:
            self._error = error

    def train(
        self, dataRDD: Any, num_epochs: int = 0, feed_timeout: float = 600.0, qname: str = "input"
    ) -> None:
        """Calls the function on all nodes, with the rows of an RDD, and waits for its end.

        Args:
            dataRDD: Any elements that can be pickled.
            num_epochs: Times that they are given; 0: 10.
            feed_timeout: Seconds for which the function may ask for no rows while there are some.
            qname: As TensorFlowOnSpark has it; there are no queues here.

        Raises:
            ConfigError: The cluster has ``InputMode.TENSORFLOW``, was trained before, or is given a
                DStream.
            WorkerError: The function raised or stalled on a node; with its traceback.
        """
        self._check_fed("train")
        if self._trained:
            raise ConfigError(
                "this cluster's function has been called for training already",
                expected="one call of train, with num_epochs",
                received="a second one",
                hint="the function runs as long as one call of train does: make another cluster",
            )
        self._trained = True
        self._feed(dataRDD, num_epochs or _DEFAULT_EPOCHS, "drop", feed_timeout)

    def inference(self, dataRDD: Any, feed_timeout: float = 600.0, qname: str = "input") -> Any:
        """Calls the function on all nodes, with the rows of an RDD; what it gave as results.

        Args:
            dataRDD: Any elements that can be pickled.
            feed_timeout, qname: See :meth:`train`.

        Returns:
            An RDD of the results, one partition for each node.

        Raises:
            ConfigError: The cluster has ``InputMode.TENSORFLOW``.
            WorkerError: The function raised on a node; with its traceback.
        """
        self._check_fed("inference")
        results = self._feed(dataRDD, 1, "keep", feed_timeout)
        context = self._spark.sparkContext
        joined = [(number, part) for number, part in enumerate(results)]
        return context.parallelize(joined, max(1, len(joined))).flatMap(_second)

    def _feed(self, rdd: Any, epochs: int, uneven: Uneven, stall_s: float) -> list[list[Any]]:
        if hasattr(rdd, "foreachRDD"):
            raise _no_dstreams()
        if not hasattr(rdd, "mapPartitions"):
            raise ConfigError(
                "a cluster cannot be fed with this",
                expected="an RDD",
                received=type(rdd).__name__,
                hint="df.rdd is the RDD of a DataFrame",
            )
        frame = self._spark.createDataFrame(rdd.mapPartitions(pickled), "element binary")
        return run_ranks(
            call_fed_node, (self._function, self._args, self._default_fs), data=frame,
            roles=self._roles, epochs=epochs, uneven=uneven, communicator="builtin",
            stall_timeout_s=stall_s,
        )  # fmt: skip

    def _check_fed(self, method: str) -> None:
        if not self._fed:
            raise ConfigError(
                f"{method} feeds the nodes of a cluster",
                expected="TFCluster.run(..., input_mode=InputMode.SPARK)",
                received="InputMode.TENSORFLOW",
            )

    def shutdown(self, ssc: Any = None, grace_secs: float = 0, timeout: float = 259200) -> None:
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
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise WaitTimeoutError(
                    "the function of a cluster still runs",
                    expected=f"its end within {timeout:g} s",
                    received="nodes that run",
                )
        if self._error is not None:
            raise self._error

    def tensorboard_url(self) -> None:
        """None: no TensorBoard is started."""


def run(
    sc: Any,
    map_fun: MapFunction,
    tf_args: Any,
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
        tensorboard: Refused if True.
        input_mode: ``InputMode.TENSORFLOW``: the function begins now and reads its data itself;
            ``InputMode.SPARK``: it begins with ``train`` or ``inference``.
        log_dir, queues, release_port, reservation_timeout: As TensorFlowOnSpark has them; without
            a meaning here (nodes that do not start are an error after 300 s).
        driver_ps_nodes: Refused if True.
        master_node: ``'chief'`` or ``'master'``: a node is the chief; None: all are workers.
        eval_node: Whether a node is an evaluator.

    Raises:
        ConfigError: Something that is not there, or roles that do not fit.
    """
    refused = {"tensorboard": tensorboard, "driver_ps_nodes": driver_ps_nodes}
    asked = [name for name, value in refused.items() if value]
    if asked or master_node not in (None, *_CHIEFS):
        raise ConfigError(
            "this cluster cannot be made here",
            expected="tensorboard=False, driver_ps_nodes=False, master_node None or 'chief'",
            received=", ".join(asked) or f"master_node={master_node!r}",
            hint="the chief can write TensorBoard's files; parameter servers run on executors",
        )
    roles = {"chief": int(master_node is not None), "ps": num_ps, "evaluator": int(eval_node)}
    roles["worker"] = num_executors - sum(roles.values())
    if input_mode == InputMode.SPARK and (num_ps or eval_node):
        raise ConfigError(
            "Spark's rows are fed to a chief and to workers",
            expected="num_ps=0 and eval_node=False with InputMode.SPARK",
            received=f"num_ps={num_ps}, eval_node={eval_node}",
            hint="InputMode.TENSORFLOW, with a function that reads files",
        )
    if roles["worker"] < 0 or not (roles["worker"] or roles["chief"]):
        raise ConfigError(
            "a cluster without workers",
            expected="more executors than parameter servers and evaluators",
            received=f"num_executors={num_executors}, num_ps={num_ps}, eval_node={eval_node}",
        )
    found = {role: count for role, count in roles.items() if count}
    return TFCluster(sc, map_fun, tf_args, found, input_mode)


def _no_dstreams() -> ConfigError:
    return ConfigError(
        "DStreams cannot feed a cluster here",
        expected="an RDD for train and inference, ssc=None for shutdown",
        received="a stream of Spark's old streaming interface",
        hint="Structured Streaming has taken its place: a model's transform(streaming_df) predicts "
        "on one, and stream.writeStream.foreachBatch(f) calls f(df, number), where "
        "TFCluster.run(...).train(df.rdd, 1) trains on each batch",
    )


def _second(pair: tuple[int, list[Any]]) -> list[Any]:
    return pair[1]
