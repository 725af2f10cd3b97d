"""Predictions and ``evaluate``: one pass over the rows, in batches, on executors.

``predict``: a DataFrame with columns of predictions, made by a ``predict_task`` in an
``arrow_function``, as functions of SQL by a ``udf_task``; ``predict_rdd``: an RDD of predictions.
All of these tasks are kinds of a ``predictor_task``; ``forward`` makes Arrow arrays of predictions,
and ``output_columns`` says which column is which output. ``choice``: the columns that a user asks
for. ``evaluate``: metric states, summed on the driver.
"""
