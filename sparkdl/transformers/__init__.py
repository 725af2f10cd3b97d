"""Databricks' module paths of its image transformers: ``named_image``, ``keras_image``."""
