"""Databricks' module path of ``KerasImageFileTransformer``."""

from sparkdl.spark.images.image_file import KerasImageFileTransformer

__all__ = ["KerasImageFileTransformer"]
