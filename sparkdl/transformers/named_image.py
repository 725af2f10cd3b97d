"""Databricks' module path of the transformers with models by name."""

from sparkdl.spark.images.deep_image import DeepImageFeaturizer, DeepImagePredictor

__all__ = ["DeepImageFeaturizer", "DeepImagePredictor"]
