"""Databricks' module path of ``registerKerasImageUDF``."""

from sparkdl.spark.images.image_udf import registerKerasImageUDF

__all__ = ["registerKerasImageUDF"]
