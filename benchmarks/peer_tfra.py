"""One side of ``table_peers.py``: TFRA's map in an environment of its own, on one thread.

Reads lines of JSON: ``{"fill": n, "dim": d, "ids": file}``, then ``{"file": file}`` with ids and
their gradients; answers with the seconds of a lookup, and of a lookup with an Adagrad step.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ |= {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # TensorFlow and TFRA print
    import numpy as np
    import tensorflow as tf
    import tensorflow_recommenders_addons as tfra

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    told = json.loads(sys.stdin.readline())
    dim = told["dim"]
    table = tfra.dynamic_embedding.get_variable(
        "rows", key_dtype=tf.int64, value_dtype=tf.float32, dim=dim, devices=["/CPU:0"],
        initializer=tf.keras.initializers.RandomUniform(-0.05, 0.05), init_size=told["fill"],
    )  # fmt: skip
    optimizer = tfra.dynamic_embedding.DynamicEmbeddingOptimizer(
        tf.keras.optimizers.legacy.Adagrad(0.05)
    )

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, dim], tf.float32)]
    )
    def step(ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = tfra.dynamic_embedding.embedding_lookup(table, ids, name="looked")
            loss = tf.reduce_sum(rows * gradients)
        trained = table.get_trainable_by_name("looked")
        optimizer.apply_gradients([(tape.gradient(loss, trained), trained)])
        return loss

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def look_up(ids: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(table.lookup(ids)[:, 0])

    every = np.load(told["ids"])
    for start in range(0, len(every), 100_000):
        part = every[start : start + 100_000]
        step(tf.constant(part), tf.constant(np.full((len(part), dim), 0.01, np.float32)))
    print(json.dumps({"rows": int(table.size())}), file=answers, flush=True)
    for line in sys.stdin:
        with np.load(json.loads(line)["file"]) as found:
            ids, gradients = tf.constant(found["ids"]), tf.constant(found["gradients"])
        start_s = time.perf_counter()
        look_up(ids).numpy()
        middle_s = time.perf_counter()
        step(ids, gradients).numpy()
        print(
            json.dumps([middle_s - start_s, time.perf_counter() - middle_s]),
            file=answers,
            flush=True,
        )


if __name__ == "__main__":
    main()
