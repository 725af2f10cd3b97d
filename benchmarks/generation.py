"""Rows per second of generate, beside one process and Spark's batch udf; by turns in one run.

    python benchmarks/generation.py [--rows 512] [--max-length 64] [--batch-size 32] [--repeats 3]

A GPT-2 of 4 layers (256 wide, 2,000 tokens, random weights, greedy, no end token) writes on from
prompts of 1 to 24 words. "one process" is a loop of ``task.generate`` over batches of the same rows
on all cores of the machine; "batch udf" is ``pyspark.ml.functions.predict_batch_udf`` around
``task.generate`` in two executors of one core, and "sparkdl" is ``sparkdl.generate`` there. Each
way has compiled its calls before. The ways alternate; medians and the machine's load are printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import numpy as np
from workload import median, start_spark, table

WORDS, WORKERS = 2_000, 2


def make_task(max_length: int) -> Any:
    import keras
    import keras_hub

    keras.utils.set_random_seed(0)
    tokens = [*(f"w{i}" for i in range(WORDS)), "<|endoftext|>"]
    letters = list("Ġw0123456789")
    vocabulary = {t: i for i, t in enumerate([*letters, *tokens])}
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary, ["w 0"])
    backbone = keras_hub.models.GPT2Backbone(
        len(vocabulary), 4, 4, 256, 1024, max_sequence_length=max_length
    )
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=max_length)
    task = keras_hub.models.GPT2CausalLM(backbone, preprocessor)
    task.compile(sampler="greedy")
    return task


def make_prompts(rows: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(str(n) for n in rng.integers(0, 9, rng.integers(1, 25))) for _ in range(rows)]


def run_bare(rows: int, max_length: int, batch_size: int) -> None:
    """A process that writes all rows' texts whenever it is told to, and prints the seconds."""
    task, prompts = make_task(max_length), make_prompts(rows)
    task.generate(prompts[:batch_size], max_length=max_length, stop_token_ids=None)
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        for start in range(0, rows, batch_size):
            task.generate(
                prompts[start : start + batch_size], max_length=max_length, stop_token_ids=None
            )
        print(time.perf_counter() - started, flush=True)


def batch_udf(preset: str, max_length: int, batch_size: int) -> Any:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import StringType

    def make() -> Any:
        import keras_hub

        task = keras_hub.models.GPT2CausalLM.from_preset(preset)
        task.compile(sampler="greedy")

        def predict(texts: np.ndarray) -> np.ndarray:
            prompts = [str(text) for text in texts]
            made = task.generate(prompts, max_length=max_length, stop_token_ids=None)
            return np.array(made, object)

        return predict

    return predict_batch_udf(make, return_type=StringType(), batch_size=batch_size)


def seconds_of(frame: Any) -> float:
    started = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bare", action="store_true")
    given = parser.parse_args()
    sizes = (given.max_length, given.batch_size)
    if given.bare:
        run_bare(given.rows, *sizes)
        return
    import sparkdl

    settings = ["--rows", str(given.rows), "--max-length", str(sizes[0]), "--batch-size",
                str(sizes[1])]  # fmt: skip
    bare = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--bare", *settings],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    bare.stdout.readline()
    spark = start_spark(WORKERS)
    texts = [(text,) for text in make_prompts(given.rows)]
    frame = spark.createDataFrame(texts, "text string").repartition(WORKERS).cache()
    frame.count()
    with tempfile.TemporaryDirectory() as folder:
        preset = os.path.join(folder, "preset")
        make_task(sizes[0]).save_to_preset(preset)
        udf = batch_udf(preset, *sizes)
        ways = {
            "batch udf": frame.withColumn("generated", udf("text")),
            "sparkdl": sparkdl.generate(
                make_task(sizes[0]), frame, max_length=sizes[0], batch_size=sizes[1],
                stop_token_ids=None,
            ),
        }  # fmt: skip
        for written in ways.values():
            seconds_of(written)
        times: dict[str, list[float]] = {name: [] for name in ("one process", *ways)}
        for _ in range(given.repeats):
            bare.stdin.write("go\n")
            bare.stdin.flush()
            times["one process"].append(float(bare.stdout.readline()))
            for name, written in ways.items():
                times[name].append(seconds_of(written))
    bare.stdin.close()
    bare.wait()
    spark.stop()
    speeds = {name: given.rows / median(seconds) for name, seconds in times.items()}
    print(table(
        ["way", "rows/s", "sparkdl beside it"],
        [[n, f"{s:.1f}", f"{speeds['sparkdl'] / s:.2f}"] for n, s in speeds.items()],
    ))  # fmt: skip
    print(f"\nload {os.getloadavg()[0]:.1f}, {given.rows} rows, length {sizes[0]}")


if __name__ == "__main__":
    main()
