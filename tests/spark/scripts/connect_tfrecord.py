"""Run by test_tfrecord.py in a process of its own: TFRecords and feeds through Spark Connect."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from sparkdl import Feeding

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
os.environ["PYTHONPATH"] = ROOT
sys.path.insert(0, ROOT)


def count(feed: Any) -> int:
    return sum(len(batch["x"]) for batch in feed.batches(7))


def main() -> None:
    from connect_port import own_port
    from pyspark.sql import SparkSession

    import sparkdl

    spark = (
        SparkSession.builder.remote("local[2]")
        .config("spark.connect.grpc.binding.port", own_port())
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    try:
        path = tempfile.mkdtemp() + "/rows.tfrecord"
        df = spark.createDataFrame(
            [(i, [float(i)] * 3, str(i)) for i in range(40)], "x bigint, v array<float>, t string"
        )
        df.write.format("tfrecord").mode("append").save(path)  # found without any registration
        back = spark.read.format("tfrecord").load(path)
        assert back.schema.simpleString() == "struct<t:string,v:array<float>,x:bigint>"
        assert {(r.x, tuple(r.v), r.t) for r in back.collect()} == {
            (r.x, tuple(r.v), r.t) for r in df.collect()
        }
        sparkdl.write_tfrecords(df, path, mode="overwrite", partition_by="t")
        assert sparkdl.read_tfrecords(spark, path).count() == 40
        assert (
            sum(sparkdl.run(count, num_workers=2, data=path, feeding=Feeding(uneven="keep"))) == 40
        )
        print("CONNECT TFRECORD OK")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
