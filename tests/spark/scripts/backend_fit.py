"""Run by test_backends.py with KERAS_BACKEND set: fit, predict and evaluate on that backend,
in the modes that are its arguments."""

from __future__ import annotations

import os
import sys

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


def main() -> None:
    import keras
    import numpy as np
    from pyspark.sql import SparkSession
    from sklearn.datasets import load_digits

    from sparkdl import SparkModel

    assert keras.backend.backend() == os.environ["KERAS_BACKEND"]
    spark = (
        SparkSession.builder.master("local-cluster[2,1,2048]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    data = load_digits()
    x = (data.data / 16).astype("float32")
    frame = spark.createDataFrame(
        [(x[i].tolist(), int(data.target[i])) for i in range(len(x))],
        "features array<float>, label int",
    ).cache()

    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.BatchNormalization(momentum=0.9),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    for mode in sys.argv[1:]:
        spark_model = SparkModel(make(), mode, num_workers=2)
        history = spark_model.fit(frame, epochs=6, verbose=0, validation_split=0.1)
        result = spark_model.evaluate(frame)
        print(mode, history.history["loss"], result, flush=True)
        assert result["accuracy"] > 0.93, result
        assert len(history.history["val_loss"]) == 6
        rows = spark_model.predict(frame).limit(20).collect()
        expected = spark_model.model.predict(
            np.array([r.features for r in rows], "float32"), verbose=0
        )
        np.testing.assert_allclose([r.prediction for r in rows], expected, atol=1e-5)
    spark.stop()
    print("BACKEND-TEST-OK")


if __name__ == "__main__":
    main()
