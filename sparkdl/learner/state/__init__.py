"""The variables of a model, and the streams of its random numbers, as values that travel.

- ``model_weights``: the weights as one flat buffer. ``optimizer_state``, ``metric_state``: the
  optimizer's and the metrics' variables. ``carried_state``: what no float32 buffer holds.
- ``served_rows``: the layers whose rows lie in tables outside of the model, and the ids of a batch.
- ``seed_streams``: the random numbers that layers draw.
- ``synchronized_norms``: the layers that normalise by the rows of all workers.
"""
