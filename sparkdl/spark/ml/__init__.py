"""Stages for ``pyspark.ml`` pipelines; users import them from :mod:`sparkdl.ml`.

``estimator``: the stages.
``stage``: what all share, and their Params. ``parts``: what an estimator has beside its
Params. ``training``: Params -> a trained model. ``trained``: what the models share, how training
went, and the prediction columns.
``files``: saving and loading, and whether code in files may run.
"""
