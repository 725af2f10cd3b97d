"""``predict`` and ``evaluate``: one pass over the rows, in batches, on executors.

``model_task``: what both tasks share. ``predict``: rows with prediction columns.
``evaluate``: metric states, summed on the driver.
"""
