"""TensorFlowOnSpark's ``mnist_tf``: each node reads its share of TFRecord files by ``tf.data``.

python examples/tfos/mnist_tf.py --images_labels digits/tfr
"""

from __future__ import annotations

import argparse
from typing import Any

import mnist_data_setup as setup


def main_fun(args: argparse.Namespace, ctx: Any) -> None:
    """Trains on this node's share of the records; the chief exports."""
    import tensorflow as tf

    features = {
        "image": tf.io.FixedLenFeature((setup.NUM_POINTS,), tf.float32),
        "label": tf.io.FixedLenFeature((), tf.int64),
    }

    def parse(record: Any) -> Any:
        found = tf.io.parse_single_example(record, features)
        return found["image"], found["label"]

    files = tf.data.Dataset.list_files(f"{args.images_labels}/part-*", shuffle=False)
    records = files.interleave(tf.data.TFRecordDataset).shard(ctx.num_workers, ctx.executor_id)
    dataset = records.map(parse).cache().shuffle(1000, seed=0).repeat().batch(args.batch_size)
    model = setup.compiled(args.learning_rate)
    is_chief = ctx.job_name == "chief"
    model.fit(
        dataset,
        epochs=args.epochs,
        steps_per_epoch=setup.NUM_DIGITS // args.batch_size // ctx.num_workers,
        verbose=2 if is_chief else 0,
    )
    setup.export(model, args.export_dir, is_chief)


def run(spark: Any, args: argparse.Namespace) -> None:
    """Trains on a cluster."""
    from sparkdl.compat.tfos import TFCluster

    cluster = TFCluster.run(
        spark.sparkContext, main_fun, args, args.cluster_size, num_ps=0,
        input_mode=TFCluster.InputMode.TENSORFLOW, master_node="chief",
    )  # fmt: skip
    cluster.shutdown(grace_secs=60)


if __name__ == "__main__":
    arguments = setup.common(__doc__.splitlines()[0]).parse_args()
    run(setup.session(arguments.cluster_size), arguments)
