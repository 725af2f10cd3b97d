#!/usr/bin/env bash
# PySpark 4.3.0 beside pyarrow 26.0.1: a folder of partitions named by a digit and the letter d or f is a number to Spark.
#
# Folders size=1d and size=2f give a column of doubles with 1.0 and 2.0 in Spark: it tries Java's parser of doubles, which
# takes the suffixes of Java's own literals. pyarrow's datasets give the texts "1d" and "2f" of the same folders. A column
# of sizes, product codes or chess squares ("1d") turns into numbers in one of two readers, without a word; one more folder
# such as size=3x makes it a column of texts in Spark, too.
# Needs Java 17. Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet pyspark==4.3.0 pyarrow==26.0.1
SPARK_LOCAL_IP=127.0.0.1 "$folder/env/bin/python" - "$folder" <<'PY'
import os
import sys

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pyspark
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
found = {}
for name, sizes in (("two", ("1d", "2f")), ("three", ("1d", "2f", "3x"))):
    rows = f"{sys.argv[1]}/{name}"
    for size in sizes:
        os.makedirs(f"{rows}/size={size}")
        pq.write_table(pa.table({"row": [0]}), f"{rows}/size={size}/a.parquet")
    read = spark.read.parquet(rows)
    of_arrow = ds.dataset(rows, partitioning="hive").to_table()["size"].to_pylist()
    found[name] = (
        read.schema["size"].dataType.simpleString(), sorted(row.size for row in read.collect()),
        sorted(map(str, of_arrow)),
    )
    print(f"PySpark {pyspark.__version__}, pyarrow {pa.__version__}: folders {sizes}:", found[name])
spark.stop()
wanted = {
    "two": ("double", [1.0, 2.0], ["1d", "2f"]),
    "three": ("string", ["1d", "2f", "3x"], ["1d", "2f", "3x"]),
}
raise SystemExit(found != wanted)
PY
