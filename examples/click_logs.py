"""A factorization machine on generated click logs, with its rows in tables spread over the workers.

26 fields with the cardinalities of the Criteo logs (33.8 million ids), ids by Zipf's law and of the
whole range of 64 bits, clicks drawn from a planted factorization machine. Prints the area under the
ROC curve (AUC) of the trained model and of the planted one, which no model can pass.

    python examples/click_logs.py [--rows 200000] [--epochs 2] [--workers 2] [--most-ids 10000]
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt

CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
FACTORS = 8
_FIELD = 1 << 32


def make_ids(rows: int, seed: int, most_ids: int) -> npt.NDArray[np.int64]:
    """Numbers of ids, of shape (rows, 26): field times 2^32 and the place in the field."""
    rng = np.random.default_rng(seed)
    columns = [
        field * _FIELD + (rng.zipf(1.05, rows) - 1) % min(cardinality, most_ids)
        for field, cardinality in enumerate(CARDINALITIES)
    ]
    return np.stack(columns, axis=1)


def teacher(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The planted logit of each row: weights and factors are functions of the id."""
    columns = [_numbers(ids, column) for column in range(FACTORS + 1)]
    weights, factors = 0.4 * columns[0], 0.15 * np.stack(columns[1:], axis=-1)
    pairs = 0.5 * (factors.sum(1) ** 2 - (factors**2).sum(1)).sum(-1)
    logits: npt.NDArray[np.float64] = weights.sum(1) + pairs - 1.0
    return logits


def _numbers(ids: npt.NDArray[np.int64], column: int) -> npt.NDArray[np.float64]:
    """Numbers from -1 to 1 that look random."""
    from sparkdl.tables.hashing import mix64

    hashes = mix64(mix64(ids) ^ np.uint64(column + 1))
    return hashes.astype(np.float64) / 2.0**63 - 1.0


def make_rows(
    rows: int, seed: int, most_ids: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """Ids of the whole range of 64 bits, clicks, and the planted logits."""
    from sparkdl.tables.hashing import mix64

    ids = make_ids(rows, seed, most_ids)
    logits = teacher(ids)
    drawn = np.random.default_rng(seed + 1).random(rows)
    clicks = (drawn < 1 / (1 + np.exp(-logits))).astype("float32")
    return mix64(ids).view(np.int64), clicks, logits


def make_model(optimizer: Any = None) -> Any:
    """A factorization machine: a bias, a weight and factors for each id."""
    import keras
    from keras import ops

    from sparkdl.layers import ServedEmbedding

    keras.utils.set_random_seed(1)
    ids = keras.Input((len(CARDINALITIES),), dtype="int64", name="ids")
    weights = ServedEmbedding(1, table="weights", initializer="zeros", optimizer=optimizer)(ids)
    factors = ServedEmbedding(FACTORS, table="factors", optimizer=optimizer)(ids)
    pairs = ops.square(ops.sum(factors, axis=1)) - ops.sum(ops.square(factors), axis=1)
    both = keras.layers.Concatenate()([ops.sum(weights, axis=1), 0.5 * pairs])
    score = keras.layers.Dense(1, activation="sigmoid", kernel_initializer="ones")(both)
    model = keras.Model(ids, score)
    model.compile(keras.optimizers.Adagrad(0.2), "binary_crossentropy")
    return model


def auc(clicks: npt.NDArray[Any], scores: npt.NDArray[Any]) -> float:
    """The area under the ROC curve."""
    order = np.argsort(scores, kind="stable")
    ranks = np.empty(len(scores))
    ranks[order] = np.arange(1, len(scores) + 1)
    positive = clicks > 0.5
    count = int(positive.sum())
    return float(
        (ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(clicks) - count))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--most-ids", type=int, default=2**31, help="of a field")
    options = parser.parse_args()

    from pyspark.sql import SparkSession

    from sparkdl import SparkModel

    spark = SparkSession.builder.master(f"local-cluster[{options.workers},1,2048]").getOrCreate()
    ids, clicks, _ = make_rows(options.rows, 0, options.most_ids)
    held_ids, held_clicks, held_logits = make_rows(options.rows // 4, 7, options.most_ids)
    with tempfile.TemporaryDirectory() as folder:
        spark_model = SparkModel(
            make_model(), "allreduce", num_workers=options.workers, batch_size=512
        )
        spark_model.fit({"ids": ids}, clicks, epochs=options.epochs, checkpoint_dir=folder)
        for name, table in spark_model.tables.items():
            print(f"table {name!r}: {len(table):,} rows of {table.dim}")
        found = spark_model.model.predict(held_ids, batch_size=4096, verbose=0)[:, 0]
    planted = auc(held_clicks, held_logits)
    print(f"AUC {auc(held_clicks, found):.4f}, of the planted model {planted:.4f}")
    spark.stop()


if __name__ == "__main__":
    main()
