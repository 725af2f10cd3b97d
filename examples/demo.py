"""In one minute: train on two Spark workers, evaluate, save, load, predict.

Runs on scikit-learn's handwritten digits (1,797 images of 8x8 pixels), on two real executor
processes of this machine: ``make demo``. ``SPARK_MASTER`` names another cluster.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
print("1. Importing Keras, TensorFlow and Spark (some seconds) ...", flush=True)

from sparkdl import SparkModel, load_spark_model  # first: TensorFlow then starts without a word

# isort: split
import keras
import numpy as np
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

QUIET = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"


def main() -> int:
    started = time.monotonic()
    master = os.environ.get("SPARK_MASTER", "local-cluster[2,1,2048]")
    here = master.startswith("local")
    print(f"2. Starting Spark: {'two executor processes' if here else master} ...", flush=True)
    builder = SparkSession.builder.master(master).appName("sparkdl demo")
    if here:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        builder = builder.config("spark.driver.host", "127.0.0.1")
        builder = builder.config("spark.driver.extraJavaOptions", QUIET)
    spark = (
        builder.config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        accuracy = train_and_show(spark)
    finally:
        spark.stop()
    print(f"Done in {time.monotonic() - started:.0f} s.", flush=True)
    if accuracy < 0.95:
        print(f"held-out accuracy {accuracy:.4f}, expected at least 0.95", file=sys.stderr)
        return 1
    return 0


def train_and_show(spark: SparkSession) -> float:
    """Trains, evaluates, saves, loads and predicts; returns the held-out accuracy."""
    digits = load_digits()
    pixels = (digits.data / 16.0).astype("float32")
    order = np.random.default_rng(0).permutation(len(pixels))
    rows = [(pixels[i].tolist(), int(digits.target[i])) for i in order]
    df = spark.createDataFrame(rows, "features array<float>, label int")
    train, test = df.randomSplit([0.8, 0.2], seed=1)
    train, test = train.cache(), test.cache()

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

    print(f"3. Training on {train.count()} images of digits, 15 epochs, both executors at once:")
    spark_model = SparkModel(model, mode="asynchronous")
    history = spark_model.fit(train, epochs=15, batch_size=32)
    print(f"   loss {history.history['loss'][0]:.3f} -> {history.history['loss'][-1]:.3f}")

    print(f"4. Evaluating on {test.count()} images that were held out ...", flush=True)
    held_out = spark_model.evaluate(test)
    print(f"   held-out accuracy: {held_out['accuracy']:.4f}  (loss {held_out['loss']:.4f})")

    with tempfile.TemporaryDirectory() as folder:
        path = f"file://{folder}/digits.keras"
        spark_model.save(path)
        loaded = load_spark_model(path)
        print(f"5. Saved, and loaded back: {loaded}")
        predictions = loaded.predict(test)
        print("6. Predictions for some held-out rows:", flush=True)
        for row in predictions.select("label", "prediction").limit(5).collect():
            digit = int(np.argmax(row.prediction))
            print(f"  label {row.label}  predicted {digit}  p = {row.prediction[digit]:.3f}")
    return float(held_out["accuracy"])


if __name__ == "__main__":
    sys.exit(main())
