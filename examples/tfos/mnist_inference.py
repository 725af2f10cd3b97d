"""TensorFlowOnSpark's ``mnist_inference``: nodes that do not know each other recognize digits.

    python examples/tfos/mnist_inference.py --images_labels digits/tfr --export_dir digits_export \\
        --output predictions

The model is what one of the other examples has exported. Each node takes its share of the TFRecord
files and writes a file with a label and a prediction in each line.
"""

from __future__ import annotations

import argparse
from typing import Any

import mnist_data_setup as setup


def inference(args: argparse.Namespace, ctx: Any) -> None:
    """Recognizes the digits of this node's share."""
    from pathlib import Path

    import tensorflow as tf

    features = {
        "image": tf.io.FixedLenFeature((setup.NUM_POINTS,), tf.float32),
        "label": tf.io.FixedLenFeature((), tf.int64),
    }
    loaded = tf.saved_model.load(args.export_dir)
    predict = loaded.signatures["serving_default"]
    files = tf.data.Dataset.list_files(f"{args.images_labels}/part-*", shuffle=False)
    records = files.shard(ctx.num_workers, ctx.executor_id).interleave(tf.data.TFRecordDataset)
    Path(args.output).mkdir(parents=True, exist_ok=True)
    with open(f"{args.output}/part-{ctx.executor_id:05d}", "w") as output:
        for batch in records.batch(args.batch_size):
            found = tf.io.parse_example(batch, features)
            logits = predict(image=found["image"])["logits"].numpy()
            for label, prediction in zip(found["label"].numpy(), logits.argmax(1), strict=True):
                output.write(f"{label} {prediction}\n")


def run(spark: Any, args: argparse.Namespace) -> None:
    """Recognizes all digits."""
    from sparkdl.compat.tfos import TFParallel

    TFParallel.run(spark.sparkContext, inference, args, args.cluster_size, use_barrier=False)


if __name__ == "__main__":
    parser = setup.common(__doc__.splitlines()[0])
    parser.add_argument("--output", default="predictions")
    arguments = parser.parse_args()
    run(setup.session(arguments.cluster_size), arguments)
