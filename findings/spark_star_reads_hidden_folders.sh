#!/usr/bin/env bash
# PySpark 4.3.0: a pattern that ends in a star reads the files of hidden folders, which the folder itself leaves out.
#
# In a folder with a.parquet, _staging/b.parquet and .old/c.parquet, spark.read.parquet(folder) gives the row of a alone, and
# so does folder/*.parquet. folder/* gives all three rows: each folder that the pattern names is a root of its own, and the
# rule of hidden names looks at what lies below a root only. A job's left-over folder is trained on without a word.
# Needs Java 17. Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet pyspark==4.3.0 pyarrow==26.0.1
SPARK_LOCAL_IP=127.0.0.1 "$folder/env/bin/python" - "$folder/rows" <<'PY'
import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
from pyspark.sql import SparkSession

rows = sys.argv[1]
for name in ("a", "_staging/b", ".old/c"):
    path = f"{rows}/{name}.parquet"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    pq.write_table(pa.table({"name": [name]}), path)
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
found = {}
for pattern in ("", "/*.parquet", "/*"):
    found[pattern] = sorted(row.name for row in spark.read.parquet(rows + pattern).collect())
    print(f"PySpark {pyspark.__version__}: folder{pattern} reads {found[pattern]}")
spark.stop()
wanted = {"": ["a"], "/*.parquet": ["a"], "/*": [".old/c", "_staging/b", "a"]}
raise SystemExit(found != wanted)
PY
