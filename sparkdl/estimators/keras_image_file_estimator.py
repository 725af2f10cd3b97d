"""Databricks' module path of ``KerasImageFileEstimator``."""

from sparkdl.spark.images.image_file import KerasImageFileEstimator

__all__ = ["KerasImageFileEstimator"]
