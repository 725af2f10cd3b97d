"""Linear models of sparse vectors: a wing, which the core does not need; :mod:`sparkdl.sparse`.

``sparse_rows``: rows in memory. ``rank_task``: what executors run: the training of weights that are
spread over the ranks, and scores. ``stages``: the stages of ``pyspark.ml``.
"""
