"""Stages for ``pyspark.ml`` pipelines; users import them from :mod:`sparkdl.ml`.

``classifier``, ``regressor``, ``estimator``: the stages; ``ftrl``: those of :mod:`sparkdl.sparse`.
``stage``: what all share. ``params``: their Params. ``parts``: what an estimator has beside its
Params. ``training``: Params -> a trained model. ``trained``: what the models share, how training
went, and the prediction columns. ``checks``: labels and columns that a stage cannot take.
``files``, ``chunks``: saving and loading, and whether code in files may run.
"""
