"""A fit of images that are larger than the memory of the driver's JVM."""

from __future__ import annotations

import glob
import os
import sys
import tempfile

import keras
import numpy as np
from pyspark.sql import SparkSession

from sparkdl import SparkModel

os.environ["PYSPARK_PYTHON"] = sys.executable
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.driver.memory", "512m")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.ui.enabled", "false")
    .getOrCreate()
)
memory = spark.sparkContext._jvm.java.lang.Runtime.getRuntime().maxMemory()
images = np.zeros((1000, 224, 224, 3), "float32")
images += np.arange(1000, dtype="float32").reshape(1000, 1, 1, 1) / 1000
targets = images[:, 0, 0, :1].copy()
assert images.nbytes > memory, memory
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((224, 224, 3)),
        keras.layers.AveragePooling2D(224),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
    ]
)
model.compile(keras.optimizers.SGD(0.1), "mse")
spark_model = SparkModel(model, mode="synchronous", num_workers=2, batch_size=500)
history = spark_model.fit((images, targets), epochs=1, verbose=0)
assert np.isfinite(history.history["loss"]).all()

print("TRAINED", *glob.glob(f"{tempfile.gettempdir()}/sparkdl-files-*/rows.parquet"), flush=True)
spark.stop()
