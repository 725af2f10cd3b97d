"""Fits, runs and predictions on Spark; beside the wings the only package that imports pyspark.

``spark_model``, ``run``, ``predict``, ``generate``, ``inferring``, ``mllib``: what users call.
``model_inference``: what a SparkModel holds, and does beside ``fit``.
``shared_data``: the rows that trials of a search share.
``streaming``: ``fit`` on streams. ``ml``: stages.
``session``, ``tfrecord``: what the others stand on.
``fit``: one call of ``fit`` on the driver. ``runs``: ranks as the tasks of a stage. ``executor``:
what runs on executors. ``forms``: forms of data, and their columns as the model's inputs.
``inference``: predict and evaluate. ``files``: the file systems that Spark reaches, for all files
of :mod:`sparkdl.files`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.files import storage

if TYPE_CHECKING:
    from sparkdl.files.file_system import FileSystem


def _find_file_system(path: str, scheme: str | None) -> FileSystem | None:
    from sparkdl.spark.files import find_file_system

    return find_file_system(path, scheme)


storage.plug_in(_find_file_system)
