"""The only package that imports pyspark.

``spark_model``, ``run``: what users call. ``setting``: read-only attributes of a SparkModel.
``loading``: a SparkModel from a file.
``driver``: what runs on the driver. ``executor``: what runs on executors.
``columns``: from columns to the model's inputs. ``inference``: predict and evaluate.
"""
