"""A training job for spark-submit: Parquet in, a ``.keras`` model out.

    spark-submit ... examples/train_on_cluster.py --input hdfs:///data/train.parquet \
        --output hdfs:///models/model.keras --features features --label label --classes 10

``--features`` names an array or vector column, or several numeric columns separated by commas.
With ``--checkpoints`` the job goes on from the last checkpoint of an earlier job, if there is one.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl import SparkModel


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--features", default="features")
    parser.add_argument("--label", default="label")
    parser.add_argument("--classes", type=int, default=2)
    parser.add_argument("--mode", default="asynchronous")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--port", default="0", help="a port or a range such as 7000-7010")
    parser.add_argument("--checkpoints", help="folder on any file system")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    spark = SparkSession.builder.appName("sparkdl training").getOrCreate()
    df = spark.read.parquet(args.input)
    names = args.features.split(",")
    features: Any = names if len(names) > 1 else names[0]
    model = make_model(len(names) if len(names) > 1 else width(df, names[0]), args.classes)
    spark_model = SparkModel(
        model, args.mode, num_workers=args.workers, batch_size=args.batch_size, port=args.port
    )
    history = spark_model.fit(
        df,
        epochs=args.epochs,
        verbose=2,
        validation_split=0.1,
        features=features,
        label=args.label,
        checkpoint_dir=args.checkpoints,
        resume=args.checkpoints is not None,
    )
    spark_model.save(args.output)
    last = {name: round(values[-1], 4) for name, values in history.history.items()}
    print(f"saved {args.output}: {last or 'nothing was left to train'}")
    spark.stop()


def width(df: DataFrame, column: str) -> int:
    """Values per row of a vector or flat array column."""
    values = F.col(column)
    if df.schema[column].dataType.typeName() == "udt":
        values = vector_to_array(values)
    return int(df.select(F.size(values)).first()[0])


def make_model(inputs: int, classes: int) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(classes, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


if __name__ == "__main__":
    main()
