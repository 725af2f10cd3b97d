"""Stages for ``pyspark.ml`` pipelines; users import them from :mod:`sparkdl.ml`.

``estimator``: the stages.
``stage``: what all share, and their Params. ``training``: what an estimator has beside its Params;
all of it -> a trained model. ``trained``: what the models share, how training went, and columns.
``files``: saving and loading, and whether code in files may run.
"""
