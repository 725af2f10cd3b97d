"""Options of the JVMs that tests start, and an archive of the classes that Spark loads.

Tests start some hundred short-lived JVMs. Compiling well takes longer there than it saves, and a
third of the time that a session takes to begin is reading and checking the same classes of the same
jars: the JVM reads them from an archive instead, in the form that it keeps in memory ("class data
sharing", JEP 350). A JVM with other jars ignores the archive.

    python tests/start/java_options.py ARCHIVE    # writes the archive, with a small job of Spark
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

LIGHT = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
ARCHIVE = Path(sys.prefix) / ".spark-classes.jsa"


def options_for_tests(archive: Path = ARCHIVE) -> dict[str, str]:
    """Environment variables for all JVMs that Spark starts below this process.

    They name no folder with a configuration: the JVM reads no archive where one is among the paths
    of the classes.
    """
    options = LIGHT
    if archive.exists():
        options += f" -XX:SharedArchiveFile={archive} -Xlog:disable"
    executors = f'"-Dspark.executor.extraJavaOptions={options}"'
    return {"SPARK_SUBMIT_OPTS": f"{options} {executors}", "SPARK_LAUNCHER_OPTS": LIGHT}


def write(archive: Path) -> None:
    """Runs a job with shuffles, a cache and Python workers, and writes which classes it loaded."""
    part = archive.with_name(f"{archive.name}.{os.getpid()}.part")
    os.environ["SPARK_SUBMIT_OPTS"] = f"{LIGHT} -Xlog:disable -XX:ArchiveClassesAtExit={part}"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local-cluster[1,1,1024]")
    settings = {
        "spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false", "spark.sql.shuffle.partitions": "2",
        "spark.executor.extraJavaOptions": LIGHT, "spark.python.unix.domain.socket.enabled": "true",
    }  # fmt: skip
    spark = builder.config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    rows = [([float(i)] * 8, i % 3) for i in range(60)]
    frame = spark.createDataFrame(rows, "features array<float>, label int").repartition(2).cache()
    assert frame.count() == 60
    assert len(frame.groupBy("label").count().collect()) == 3
    assert frame.mapInArrow(lambda batches: batches, frame.schema).count() == 60
    assert spark.sparkContext.parallelize(range(60), 1).barrier().mapPartitions(list).count() == 60
    jvm = spark.sparkContext._gateway
    spark.stop()
    jvm.proc.stdin.close()  # the JVM ends, and writes the archive before it does
    jvm.proc.wait(300)
    part.replace(archive)


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve())
