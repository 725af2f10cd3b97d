"""TensorFlowOnSpark's ``mnist_spark``: Spark feeds rows of digits, ``tf.data`` takes them.

python examples/tfos/mnist_spark.py --images_labels digits/csv
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import mnist_data_setup as setup


def main_fun(args: argparse.Namespace, ctx: Any) -> None:
    """Trains on the rows that this node is fed; the chief keeps checkpoints and exports."""
    import keras
    import numpy as np
    import tensorflow as tf

    feed = ctx.get_data_feed()

    def rows() -> Iterator[Any]:
        while not feed.should_stop():
            for image, label in feed.next_batch(args.batch_size):
                yield np.array(image, np.float32), label

    signature = tf.TensorSpec((setup.NUM_POINTS,), tf.float32), tf.TensorSpec((), tf.int64)
    dataset = tf.data.Dataset.from_generator(rows, output_signature=signature)
    model = setup.compiled(args.learning_rate)
    is_chief = ctx.job_name == "chief"
    path = f"{args.model_dir}/weights-{{epoch:04d}}.weights.h5"
    saving = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    model.fit(
        dataset.batch(args.batch_size),
        epochs=args.epochs,
        steps_per_epoch=setup.NUM_DIGITS // args.batch_size // ctx.num_workers,
        callbacks=[saving] if is_chief else [],
        verbose=2 if is_chief else 0,
    )
    setup.export(model, args.export_dir, is_chief)
    feed.terminate()  # a few rows are left: the steps were rounded down


def run(spark: Any, args: argparse.Namespace) -> None:
    """Trains on a cluster."""
    from sparkdl.compat.tfos import TFCluster

    def parse(line: str) -> tuple[list[float], int]:  # in here it travels to Spark's tasks by value
        label, *points = line.split(",")
        return [float(point) for point in points], int(label)

    sc = spark.sparkContext
    rows = sc.textFile(args.images_labels).map(parse)
    cluster = TFCluster.run(
        sc, main_fun, args, args.cluster_size, num_ps=0,
        input_mode=TFCluster.InputMode.SPARK, master_node="chief",
    )  # fmt: skip
    cluster.train(rows, args.epochs)
    cluster.shutdown(grace_secs=60)


if __name__ == "__main__":
    arguments = setup.common(__doc__.splitlines()[0]).parse_args()
    run(setup.session(arguments.cluster_size), arguments)
