"""Stages for ``pyspark.ml`` pipelines; users import them from :mod:`sparkdl.ml`.

``stage``: what all share. ``params``: their Params. ``parts``: what an estimator has beside its
Params. ``training``: Params -> a trained model. ``head``: the model's output -> Spark's prediction
columns. ``classifier``, ``regressor``, ``estimator``, ``transformer``: the stages. ``files``:
saving and loading. ``trust``: whether code in files may run. ``summary``: how training went.
"""
