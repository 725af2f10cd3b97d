"""``spark.read.format('tfrecord')``, ``df.write.format('tfrecord')``: found by Spark by this name.

Spark imports each top-level module ``pyspark_*`` when it looks for data sources.
"""

from sparkdl.spark.tfrecord.source import DefaultSource

__all__ = ["DefaultSource"]
