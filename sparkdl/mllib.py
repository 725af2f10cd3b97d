"""RDDs and ``pyspark.mllib``: NumPy arrays as RDDs and back, and a model for LabeledPoints.

::

    from sparkdl.mllib import SparkMLlibModel, to_labeled_point

    points = to_labeled_point(spark, x, y)
    model = SparkMLlibModel(keras_model)
    model.fit(points, epochs=5)
"""

from sparkdl.spark.mllib import (
    SparkMLlibModel,
    from_labeled_point,
    from_matrix,
    from_vector,
    to_labeled_point,
    to_matrix,
    to_simple_rdd,
    to_vector,
)

__all__ = [
    "SparkMLlibModel",
    "from_labeled_point",
    "from_matrix",
    "from_vector",
    "to_labeled_point",
    "to_matrix",
    "to_simple_rdd",
    "to_vector",
]
