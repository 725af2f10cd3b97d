"""Predictions and ``evaluate``: one pass over the rows, in batches, on executors.

``predict``: a DataFrame with columns of predictions; ``predict_rdd``: an RDD of them. Both run a
``predictor_task``; ``forward`` makes Arrow arrays of predictions, and ``output_columns`` says which
column is which output. ``choice``: the columns that a user asks for. ``evaluate``: metric states,
summed on the driver.
"""
