"""Predictions and ``evaluate``: one pass over the rows, in batches, on executors.

``predict``: the outputs that a user asks for, as columns of a DataFrame, or for an RDD.
``function``: the same as a function of SQL. ``forward``: the forward pass of both, on an executor.
``output_columns``: the column that an output becomes. ``evaluate``: metric states, summed on the
driver.
"""
