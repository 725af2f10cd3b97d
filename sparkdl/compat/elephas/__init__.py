"""Elephas by its own names and module paths: change ``elephas`` to ``sparkdl.compat.elephas``.

``spark_model``: SparkModel (both generations of its signature), AsynchronousSparkModel,
SparkMLlibModel, load_spark_model. ``ml_model``: ElephasEstimator, ElephasTransformer,
load_ml_estimator, load_ml_transformer. ``ml.adapter``, ``mllib.adapter``, ``utils.rdd_utils``,
``utils.model_utils``, ``enums``.

A call without a mode is one of the newer generation: synchronous. Three defaults are sparkdl's:
``frequency='auto'`` (measured to learn as well as plain Keras), ``parameter_server_mode='auto'``
(the fastest way), ``port=0`` (any free one).
"""
