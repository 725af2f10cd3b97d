"""Run by test_killed_stream.py: trains on a stream, and may be killed by SIGKILL at any moment."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[3]
os.environ["PYTHONPATH"] = str(ROOT)
sys.path.insert(0, str(ROOT))


def main(folder: str, die_after: int) -> None:
    """Trains a model on the files in ``folder/in``, one a micro-batch.

    Args:
        folder: Has ``model.keras``; gets the numbers of the trained micro-batches in ``trained``,
            a line each, and at the end the weights in ``weights.npz``.
        die_after: Kill this process when that micro-batch is in the model and Spark does not know
            it yet; -1 for none.
    """
    import keras
    import numpy as np
    from pyspark.sql import SparkSession

    from sparkdl import SparkModel

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    reader = spark.readStream.schema("features array<float>, label long")
    stream = reader.option("maxFilesPerTrigger", 1).parquet(f"{folder}/in")
    model = keras.models.load_model(f"{folder}/model.keras")
    spark_model = SparkModel(
        model, mode="allreduce", num_workers=2, communicator="builtin", batch_size=8
    )

    def note(batch_id: int, history: Any) -> None:
        with open(f"{folder}/trained", "a") as file:
            file.write(f"{batch_id}\n")
        if batch_id == die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    training = spark_model.fit_stream(
        stream, checkpoint_dir=f"{folder}/run", trigger={"availableNow": True}, on_batch=note
    )
    assert training.await_termination(500)
    np.savez(f"{folder}/weights.npz", *training.model.get_weights())
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
