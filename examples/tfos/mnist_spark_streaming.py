"""TensorFlowOnSpark's ``mnist_spark_streaming``: files that arrive in a folder feed the training.

    python examples/tfos/mnist_spark_streaming.py --images_labels arriving --seconds 600

Structured Streaming takes the place of DStreams. Nodes get different numbers of rows of a stream,
so those of a larger cluster must not wait for each other; here there is one node.
"""

from __future__ import annotations

import argparse
from typing import Any

import mnist_data_setup as setup


def main_fun(args: argparse.Namespace, ctx: Any) -> None:
    """Trains on lines of CSV for as long as the stream goes on; then exports."""
    import numpy as np

    feed = ctx.get_data_feed()
    model = setup.compiled(args.learning_rate)
    while not feed.should_stop():
        lines = [line for (line,) in feed.next_batch(args.batch_size)]
        if lines:
            rows = np.array([line.split(",") for line in lines], np.float32)
            model.train_on_batch(rows[:, 1:], rows[:, 0].astype(int))
    setup.export(model, args.export_dir, ctx.job_name == "chief")


def start(spark: Any, args: argparse.Namespace) -> tuple[Any, Any]:
    """A cluster, and the run that the stream feeds; ``stop()`` of that ends it."""
    from sparkdl.compat.tfos import TFCluster

    stream = spark.readStream.option("maxFilesPerTrigger", 1).text(args.images_labels)
    cluster = TFCluster.run(
        spark.sparkContext, main_fun, args, 1,
        input_mode=TFCluster.InputMode.SPARK, master_node="chief",
    )  # fmt: skip
    return cluster, cluster.train(stream, feed_timeout=86400)


if __name__ == "__main__":
    parser = setup.common(__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    cluster, run = start(setup.session(2), arguments)
    run.await_termination(arguments.seconds)
    run.stop()
    cluster.shutdown()
