"""Databricks' module path of its functions of SQL: ``keras_image_model``."""
