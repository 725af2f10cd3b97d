"""A factorization machine beside a linear model, on clicks that follow from pairs alone.

Whether a user clicks on an ad depends on how well the two match, and on neither by itself: a linear
model of them, ``FTRLClassifier``, learns next to nothing, and a factorization machine does. Prints
the area under the ROC curve (AUC) of both, on rows that they have not seen.

    python examples/factorization_machine.py [--rows 40000] [--workers 2]
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import numpy as np

USERS, ADS, PLANTED = 200, 100, 4


def make_frame(spark: Any, rows: int, seed: int) -> Any:
    """Columns ``user``, ``ad``, ``ids`` (both, as numbers that do not meet) and ``click``."""
    drawn = np.random.default_rng(seed)
    users, ads = drawn.integers(0, USERS, rows), drawn.integers(0, ADS, rows)
    planted = np.random.default_rng(0).normal(size=(USERS + ADS, PLANTED))
    logits = 2 * (planted[users] * planted[USERS + ads]).sum(1)
    clicks = drawn.random(rows) < 1 / (1 + np.exp(-logits))
    columns = (users.tolist(), ads.tolist(), clicks.astype(int).tolist())
    made = [(f"u{u}", f"a{a}", [u, USERS + a], c) for u, a, c in zip(*columns, strict=True)]
    return spark.createDataFrame(made, "user string, ad string, ids array<bigint>, click int")


def make_machine(fields: int, factors: int) -> Any:
    """A bias, a weight of each id, and factors whose products are the weights of pairs of ids."""
    import keras
    from keras import ops

    from sparkdl.layers import ServedEmbedding

    ids = keras.Input((fields,), dtype="int64")
    weights = ServedEmbedding(1, table="weights", initializer="zeros")(ids)
    # Factors of zero would have no gradient: their products have that of each other.
    start = {"name": "normal", "stddev": 0.1}
    v = ServedEmbedding(factors, table="factors", initializer=start)(ids)
    # The sum of <v_i, v_j> over all pairs, without going over the pairs (Rendle, 2010).
    pairs = ops.square(ops.sum(v, axis=1)) - ops.sum(ops.square(v), axis=1)
    both = keras.layers.Concatenate()([ops.sum(weights, axis=1), 0.5 * pairs])
    click = keras.layers.Dense(1, activation="sigmoid", kernel_initializer="ones")(both)
    model = keras.Model(ids, click)
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy")
    return model


def compare(spark: Any, rows: int, workers: int) -> dict[str, float]:
    """The AUC of both models."""
    from pyspark.ml.evaluation import BinaryClassificationEvaluator
    from pyspark.ml.feature import FeatureHasher
    from pyspark.sql import functions as F

    from sparkdl import SparkModel
    from sparkdl.sparse import FTRLClassifier

    train, test = make_frame(spark, rows, 1), make_frame(spark, rows // 4, 2)
    hasher = FeatureHasher(inputCols=["user", "ad"], outputCol="features", numFeatures=1 << 30)
    linear = FTRLClassifier(labelCol="click", batchSize=500, maxIter=5, numWorkers=workers)
    scored = linear.fit(hasher.transform(train)).transform(hasher.transform(test))
    judge = BinaryClassificationEvaluator(labelCol="click")
    found = {"linear": judge.evaluate(scored)}

    machine = SparkModel(make_machine(2, 8), "allreduce", num_workers=workers, batch_size=128)
    with tempfile.TemporaryDirectory() as folder:  # where the workers write the rows of the tables
        machine.fit(train, 4, features="ids", label="click", verbose=0, checkpoint_dir=folder)
        scored = machine.predict(test, features="ids")
        raw = scored.withColumn("rawPrediction", F.col("prediction").cast("double"))
        found["factorization machine"] = judge.evaluate(raw)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master(f"local-cluster[{options.workers},1,2048]").getOrCreate()
    for name, auc in compare(spark, options.rows, options.workers).items():
        print(f"AUC {auc:.4f}: {name}")
    spark.stop()


if __name__ == "__main__":
    main()
