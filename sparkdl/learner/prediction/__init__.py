"""Models that only run forward: their sources, what is sent of them, and their outputs.

- ``model_source``, ``saved_model``: where such models come from, and the part of one that a
  prediction needs. ``predictor_archive``: what the driver sends. ``predictor``: what runs.
  ``class_scores``: what the numbers of a classifier's output mean. ``generation``: what writes
  texts on. ``shared_weights``: weights once in an executor's memory. ``ensemble``: the mean of
  several. ``export``: other formats.
"""
