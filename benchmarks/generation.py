"""Rows per second of generate, or of predict on strings, beside one process and Spark's batch udf.

    python benchmarks/generation.py [--rows 512] [--max-length 64] [--batch-size 32] [--repeats 3]
                                    [--classify]

A GPT-2 of 4 layers (256 wide, 2,000 tokens, random weights, greedy, no end token) writes on from
prompts of 1 to 24 words. "one process" is a loop of ``task.generate`` over batches of the same rows
on all cores of the machine; "batch udf" is ``pyspark.ml.functions.predict_batch_udf`` around
``task.generate`` in two executors of one core, and "sparkdl" is ``sparkdl.generate`` there. Each
way has a process and executors of its own, and has compiled its calls before. With ``--classify``
all predict with a text classifier on BERT of the same size instead. The ways alternate; medians and
the machine's load are printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import numpy as np
from workload import median, start_spark, table

WORDS, WORKERS = 2_000, 2
WAYS = ("one process", "batch udf", "sparkdl")


def make_classifier(max_length: int) -> Any:
    import keras
    import keras_hub

    keras.utils.set_random_seed(0)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(10))]
    backbone = keras_hub.models.BertBackbone(
        WORDS, 4, 4, 256, 1024, max_sequence_length=max_length, dropout=0.0
    )
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(
        keras_hub.models.BertTokenizer(vocabulary=vocabulary), sequence_length=max_length
    )
    return keras_hub.models.BertTextClassifier(
        backbone, num_classes=2, preprocessor=preprocessor, dropout=0.0
    )


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


def writer(task: Any, max_length: int) -> Callable[[list[str]], Any]:
    """A call that writes on from prompts, or predicts with a classifier."""
    if hasattr(task, "generate"):
        return lambda texts: task.generate(texts, max_length, stop_token_ids=None)
    return lambda texts: task.predict(texts, batch_size=len(texts), verbose=0)


def batch_udf(preset: str, max_length: int, batch_size: int, classify: bool) -> Any:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType, StringType

    def make() -> Any:
        import keras_hub

        if classify:
            task = keras_hub.models.TextClassifier.from_preset(preset)
        else:
            task = keras_hub.models.CausalLM.from_preset(preset)
            task.compile(sampler="greedy")
        call = writer(task, max_length)

        def predict(texts: np.ndarray) -> np.ndarray:
            made = call([str(text) for text in texts])
            return made if classify else np.array(made, object)

        return predict

    kind = ArrayType(FloatType()) if classify else StringType()
    return predict_batch_udf(make, return_type=kind, batch_size=batch_size)


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def bare(task: Any, rows: int, max_length: int, batch_size: int) -> Callable[[], object]:
    """Plain Keras on all rows: a loop of ``task.generate``, or one ``task.predict``."""
    call, prompts = writer(task, max_length), make_prompts(rows)
    if not hasattr(task, "generate"):
        return lambda: task.predict(prompts, batch_size=batch_size, verbose=0)
    return lambda: [call(prompts[at : at + batch_size]) for at in range(0, rows, batch_size)]


def on_spark(way: str, folder: str, task: Any, rows: int, max_length: int, batch_size: int) -> Any:
    """A job that computes all rows' texts or classes in two executors."""
    import sparkdl

    spark, classify = start_spark(WORKERS), not hasattr(task, "generate")
    texts = [(text,) for text in make_prompts(rows)]
    frame = spark.createDataFrame(texts, "text string").repartition(WORKERS).cache()
    frame.count()
    if way == "batch udf":
        preset = os.path.join(folder, "preset")
        task.save_to_preset(preset)
        made = frame.withColumn("made", batch_udf(preset, max_length, batch_size, classify)("text"))
    elif classify:
        made = sparkdl.predict(task, frame, features="text", batch_size=batch_size)
    else:
        made = sparkdl.generate(
            task, frame, max_length=max_length, batch_size=batch_size, stop_token_ids=None
        )
    return made.write.format("noop").mode("overwrite").save


def run_way(way: str, classify: bool, rows: int, max_length: int, batch_size: int) -> None:
    """A process that computes all rows whenever it is told to, and prints the seconds."""
    task = make_classifier(max_length) if classify else make_task(max_length)
    with tempfile.TemporaryDirectory() as folder:
        sizes = (task, rows, max_length, batch_size)
        call = bare(*sizes) if way == WAYS[0] else on_spark(way, folder, *sizes)
        call()
        print("ready", flush=True)
        for _ in sys.stdin:
            print(seconds_of(call), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--classify", action="store_true")
    parser.add_argument("--way", choices=WAYS)
    given = parser.parse_args()
    if given.way:
        run_way(given.way, given.classify, given.rows, given.max_length, given.batch_size)
        return
    settings = ["--rows", str(given.rows), "--max-length", str(given.max_length), "--batch-size",
                str(given.batch_size), *["--classify"] * given.classify]  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    with ExitStack() as stack:
        running = {}
        for name in WAYS:
            running[name] = stack.enter_context(subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), "--way", name, *settings],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            ))  # fmt: skip
            running[name].stdout.readline()
        for _ in range(given.repeats):
            for name, process in running.items():
                process.stdin.write("go\n")
                process.stdin.flush()
                times[name].append(float(process.stdout.readline()))
        for process in running.values():
            process.stdin.close()
    speeds = {name: given.rows / median(seconds) for name, seconds in times.items()}
    print(table(
        ["way", "rows/s", "sparkdl beside it"],
        [[n, f"{s:.1f}", f"{speeds['sparkdl'] / s:.2f}"] for n, s in speeds.items()],
    ))  # fmt: skip
    print(f"\nload {os.getloadavg()[0]:.1f}, {given.rows} rows, length {given.max_length}")


if __name__ == "__main__":
    main()
