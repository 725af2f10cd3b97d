"""Stages of ``pyspark.ml`` for images, and functions of SQL, under Databricks' names.

``pixels``: on executors, an image struct -> pixels of the model's size. ``deep_image``:
Spark's image column -> features or classes. ``saved_stage``: their files.
``image_file``: paths of files -> outputs, and training on them. ``image_udf``: SQL.
"""
