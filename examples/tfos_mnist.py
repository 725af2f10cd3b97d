"""Handwritten digits by TensorFlowOnSpark's names: Spark feeds the rows, the nodes train one model.

    python examples/tfos_mnist.py [--cluster_size 2] [--epochs 10] [--model_dir .]

A program for TensorFlowOnSpark changes its imports. Each node takes the gradients of its own batch,
``sparkdl.DistributedOptimizer`` averages them in Keras 3, and the chief saves the model; then that
recognizes the digits, lazily. The digits are the 1,797 of scikit-learn.
"""

from __future__ import annotations

import argparse
from typing import Any


def build_model() -> Any:
    """A small network for pictures of 8 x 8 points."""
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def main_fun(args: argparse.Namespace, ctx: Any) -> None:
    """Trains on the rows that this node is fed; the chief saves the model."""
    import keras
    import numpy as np

    import sparkdl

    model = build_model()
    optimizer = sparkdl.DistributedOptimizer(keras.optimizers.Adam(args.learning_rate))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        rows = feed.next_batch(args.batch_size)
        images = np.array([image for image, _ in rows], np.float32)
        last = model.train_on_batch(images, np.array([label for _, label in rows]))
    print(f"{ctx.job_name}/{ctx.task_index}: the loss is {float(last):.4f}")
    if ctx.job_name == "chief":
        model.save(f"{args.model_dir}/digits.keras")


def recognize(args: argparse.Namespace, ctx: Any) -> None:
    """Gives the digit on each picture."""
    import keras
    import numpy as np

    model = keras.saving.load_model(f"{args.model_dir}/digits.keras")
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        images = np.array([image for image, _ in feed.next_batch(args.batch_size)], np.float32)
        feed.batch_results(model.predict_on_batch(images).argmax(axis=1).tolist())


def train_and_recognize(sc: Any, args: argparse.Namespace) -> float:
    """The share of the digits that the trained model recognizes."""
    from sklearn.datasets import load_digits

    from sparkdl.compat.tfos import TFCluster

    digits = load_digits()
    rows = [(x.tolist(), int(y)) for x, y in zip(digits.data / 16, digits.target, strict=True)]
    rdd = sc.parallelize(rows, args.cluster_size)

    mode = TFCluster.InputMode.SPARK
    cluster = TFCluster.run(
        sc, main_fun, args, args.cluster_size, input_mode=mode, master_node="chief"
    )
    cluster.train(rdd, args.epochs)
    cluster.shutdown()

    cluster = TFCluster.run(sc, recognize, args, args.cluster_size, input_mode=mode)
    found = cluster.inference(rdd)
    right = found.zip(rdd).filter(lambda pair: pair[0] == pair[1][1]).count()
    cluster.shutdown()
    return right / len(rows)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster_size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=0.005)
    parser.add_argument("--model_dir", default=".")
    return parser.parse_args(argv)


def main() -> None:
    from pyspark.sql import SparkSession

    args = parse()
    spark = SparkSession.builder.master(f"local[{args.cluster_size}]").getOrCreate()
    print(f"{train_and_recognize(spark.sparkContext, args):.1%} of the digits are recognized")
    spark.stop()


if __name__ == "__main__":
    main()
