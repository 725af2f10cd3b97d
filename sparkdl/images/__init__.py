"""Stages of ``pyspark.ml`` for images, and functions of SQL, under Databricks' names.

``deep_image``: Spark's image column -> features or classes; pixels; the files of image stages.
``image_file``: paths of files -> outputs, training on them, and SQL.
"""
