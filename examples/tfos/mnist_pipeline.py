"""TensorFlowOnSpark's ``mnist_pipeline``: a TFEstimator trains, the TFModel recognizes.

python examples/tfos/mnist_pipeline.py --images_labels digits/tfr --output predictions
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import mnist_data_setup as setup


def main_fun(args: argparse.Namespace, ctx: Any) -> None:
    """Trains on the columns that this node is fed; the chief exports."""
    import numpy as np
    import tensorflow as tf

    feed = ctx.get_data_feed(input_mapping=args.input_mapping)

    def batches() -> Iterator[Any]:
        while not feed.should_stop():
            batch = feed.next_batch(args.batch_size)
            if len(batch["label"]) == args.batch_size:
                yield np.array(batch["image"], np.float32), np.array(batch["label"])

    signature = (
        tf.TensorSpec((None, setup.NUM_POINTS), tf.float32), tf.TensorSpec((None,), tf.int64),
    )  # fmt: skip
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    model = setup.compiled(args.learning_rate)
    model.fit(
        dataset,
        epochs=args.epochs,
        steps_per_epoch=setup.NUM_DIGITS // args.batch_size // ctx.num_workers,
        verbose=2 if ctx.job_name == "chief" else 0,
    )
    setup.export(model, args.export_dir, ctx.job_name == "chief")
    feed.terminate()


def run(spark: Any, args: argparse.Namespace) -> float:
    """Trains, writes the predictions as JSON, and returns the share of them that is right."""
    from pyspark.sql import functions as F

    from sparkdl.compat.tfos import dfutil
    from sparkdl.compat.tfos.pipeline import TFEstimator

    frame = dfutil.loadTFRecords(spark.sparkContext, args.images_labels)
    estimator = (
        TFEstimator(main_fun, args)
        .setInputMapping({"image": "image", "label": "label"})
        .setModelDir(args.model_dir)
        .setExportDir(args.export_dir)
        .setClusterSize(args.cluster_size)
        .setMasterNode("chief")
        .setEpochs(args.epochs)
        .setBatchSize(args.batch_size)
        .setGraceSecs(60)
    )
    model = estimator.fit(frame)
    model.setInputMapping({"image": "image"}).setOutputMapping({"logits": "logits"})
    scored = model.transform(frame)
    best = F.expr("array_position(logits, array_max(logits)) - 1").alias("prediction")
    scored.select(best).write.mode("overwrite").json(args.output)

    labels = [row.label for row in frame.select("label").collect()]
    found = [row.prediction for row in model.transform(frame).select(best).collect()]
    return sum(a == b for a, b in zip(labels, found, strict=True)) / len(labels)


if __name__ == "__main__":
    parser = setup.common(__doc__.splitlines()[0])
    parser.add_argument("--output", default="predictions")
    arguments = parser.parse_args()
    print(f"{run(setup.session(arguments.cluster_size), arguments):.1%} are recognized")
