"""Run by test_robustness.py in a process of its own: what ends the session under a running job."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
os.environ["PYTHONPATH"] = ROOT
sys.path.insert(0, ROOT)


def main() -> None:
    import psutil
    import pytest
    from pyspark.sql import SparkSession

    import sparkdl
    from sparkdl.errors import ResourceError, TransportError
    from sparkdl.files import storage

    def sleep() -> None:
        time.sleep(300)

    def session() -> Any:
        return (
            SparkSession.builder.master("local[2]")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.ui.enabled", "false")
            .getOrCreate()
        )

    def expect_words_of_a_call_that_comes_later() -> None:
        import keras

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        spark = session()
        frame = spark.createDataFrame([([1.0, 2.0], 1.0)], "features array<float>, label float")
        rdd = spark.sparkContext.parallelize([([1.0, 2.0], 1.0)])
        spark.stop()
        spark_model = sparkdl.SparkModel(model)
        calls: list[Callable[[], object]] = [
            lambda: spark_model.fit(frame),
            lambda: spark_model.fit(rdd),
            lambda: spark_model.predict(frame),
            lambda: spark_model.predict(rdd),
            lambda: spark_model.evaluate(frame),
            lambda: sparkdl.write_tfrecords(frame, "folder"),
            lambda: sparkdl.read_tfrecords(spark, "folder"),
            lambda: sparkdl.register_udf(spark, "f", model),
        ]
        for call in calls:
            with pytest.raises(ResourceError, match="the Spark session has been stopped"):
                call()

    def expect(kind: type[Exception], words: str, action: Callable[[Any], None]) -> None:
        spark = session()
        fired: list[float] = []

        def act() -> None:
            while not spark.sparkContext.statusTracker().getActiveJobsIds():
                time.sleep(0.05)
            time.sleep(0.5)
            fired.append(time.monotonic())
            action(spark)

        actor = threading.Thread(target=act, daemon=True)
        actor.start()
        with pytest.raises(kind, match=words):
            sparkdl.run(sleep, num_workers=2)
        actor.join(60)  # a session that still stops would be the next one's
        assert time.monotonic() - fired[0] < 100, "beside a loaded machine, 2 s are usual"

    def kill_jvm(spark: Any) -> None:
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "SparkSubmit" in " ".join(process.cmdline()):
                    os.kill(process.pid, signal.SIGKILL)

    expect_words_of_a_call_that_comes_later()
    expect(ResourceError, "the Spark session has been stopped", lambda spark: spark.stop())
    storage.check_writable("local-path")  # no session: nobody to ask
    expect(TransportError, r"JVM of Spark's driver has ended(.|\n)*exit status -9", kill_jvm)
    with pytest.raises(ResourceError, match=r"JVM does not answer(.|\n)*'file:/\.\.\.'"):
        storage.check_writable("local-path")
    storage.check_writable(f"file:{os.getcwd()}/local-path")
    print("LOST SESSION OK")


if __name__ == "__main__":
    main()
