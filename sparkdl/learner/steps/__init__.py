"""Compiled training steps: a learner for each Keras backend, and the half that they share.

- ``keras_learner``: the shared half, and its step whose gradient is joined with those of all
  workers. ``tensorflow``, ``jax``, ``torch``: one backend each.
- ``tensorflow_calls``: compiled TensorFlow functions, found by shape. ``tensorflow_exchange``:
  gradients that are joined inside a compiled step.
- ``denominators``, ``repeated_rows``: by what a loss divides. ``captured_gradients``: those of a
  ``train_step`` of the user's own.
"""
