"""``TFParallel.run``: one function on several executors, each by itself."""

from __future__ import annotations

from typing import Any

from sparkdl.compat.tfos.nodes import ClusterFacts, MapFunction, call_node
from sparkdl.spark.run import run as run_ranks


def run(
    sc: Any, map_fn: MapFunction, tf_args: object, num_executors: int, use_barrier: bool = True
) -> None:
    """Calls ``map_fn(tf_args, ctx)`` on each node and waits for the end of all.

    Args:
        sc: The SparkContext.
        map_fn: The function.
        tf_args: Its first argument; a list becomes ``sys.argv``, too.
        num_executors: Nodes.
        use_barrier: As TensorFlowOnSpark has it; the nodes always run at the same time.

    Raises:
        ResourceError: Too few slots.
        WorkerError: The function raised on a node; with its traceback.
    """
    from pyspark.sql import SparkSession

    default_fs = str(sc._jsc.hadoopConfiguration().get("fs.defaultFS") or "file:///")
    run_ranks(
        call_node, (map_fn, tf_args, ClusterFacts(default_fs)), roles={"worker": num_executors},
        spark=SparkSession(sc), communicator="builtin",
    )  # fmt: skip
