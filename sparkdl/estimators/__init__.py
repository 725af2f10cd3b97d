"""Databricks' module path of its estimator: ``keras_image_file_estimator``."""
