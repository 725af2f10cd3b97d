"""Linear models of sparse vectors: a wing, which the core does not need; :mod:`sparkdl.sparse`.

``sparse_rows``: rows in memory. ``spread_weights``: the weights, their steps, and the training of
weights that are spread over the ranks. ``rank_task``: what executors run. ``stages``:
the stages of ``pyspark.ml``.
"""
