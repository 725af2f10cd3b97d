"""Writes digits as CSV lines and as TFRecord files, for the other examples of this folder.

    python examples/tfos/mnist_data_setup.py --output digits [--num_partitions 4]

The digits are the 1,797 of scikit-learn: 8 x 8 points and a label. ``digits/csv`` has a line
``label,point,point,...`` for each, ``digits/tfr`` an Example with ``image`` and ``label``.
"""

from __future__ import annotations

import argparse
from typing import Any

NUM_DIGITS, NUM_POINTS = 1797, 64


def make_model() -> Any:
    """A small network for pictures of 8 x 8 points; its input is ``image``."""
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    image = keras.Input((NUM_POINTS,), name="image")
    drawn = layers.Conv2D(16, 3, activation="relu")(layers.Reshape((8, 8, 1))(image))
    logits = layers.Dense(10, name="logits")(layers.Flatten()(drawn))
    return keras.Model(image, logits)


def compiled(learning_rate: float) -> Any:
    """The network, ready for training by all nodes together: the mean of their gradients counts."""
    import keras

    import sparkdl

    model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = sparkdl.DistributedOptimizer(keras.optimizers.Adam(learning_rate))
    model.compile(optimizer, loss, metrics=["sparse_categorical_accuracy"], jit_compile=False)
    return model


def export(model: Any, export_dir: str, is_chief: bool) -> None:
    """Exports the network for serving, with named input and output; all nodes call it."""
    import keras

    from sparkdl.compat.tfos import compat

    served = keras.Model({"image": model.input}, {"logits": model.output})
    compat.export_saved_model(served, export_dir, is_chief)


def write(spark: Any, output: str, num_partitions: int) -> None:
    """Writes the files."""
    from sklearn.datasets import load_digits

    from sparkdl.compat.tfos import dfutil

    digits = load_digits()
    rows = [
        ([float(point) / 16 for point in points], int(label))
        for points, label in zip(digits.data, digits.target, strict=True)
    ]
    rdd = spark.sparkContext.parallelize(rows, num_partitions)
    rdd.map(lambda row: ",".join(map(str, [row[1], *row[0]]))).saveAsTextFile(f"{output}/csv")
    frame = spark.createDataFrame(rdd, "image array<double>, label bigint")
    dfutil.saveAsTFRecords(frame, f"{output}/tfr")


def session(cluster_size: int) -> Any:
    """The session of ``spark-submit``, or one on this machine."""
    from pyspark.sql import SparkSession

    return SparkSession.builder.master(f"local[{cluster_size}]").getOrCreate()


def common(description: str) -> argparse.ArgumentParser:
    """A parser with the arguments that all the examples have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cluster_size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=0.005)
    parser.add_argument("--images_labels", default="digits/csv")
    parser.add_argument("--model_dir", default="digits_model")
    parser.add_argument("--export_dir", default="digits_export")
    return parser


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="digits")
    parser.add_argument("--num_partitions", type=int, default=4)
    args = parser.parse_args()
    write(session(2), args.output, args.num_partitions)


if __name__ == "__main__":
    main()
