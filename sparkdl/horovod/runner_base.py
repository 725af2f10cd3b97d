"""Databricks' module path of ``HorovodRunner``."""

from sparkdl.spark.horovod_runner import HorovodRunner

__all__ = ["HorovodRunner"]
