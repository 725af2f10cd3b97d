"""A Keras model in training on one of three backends; importing this imports none of them.

- ``steps``: compiled training steps, a learner for each backend; see
  :class:`sparkdl.training.learning.Learner`. ``make_learner`` chooses, ``cache`` keeps compiled
  ones.
- ``state``: a model's variables as buffers. ``archives``: a model as bytes.
- ``prediction``: models that only run forward. ``checks``: what a fit asks of a model.
- ``callback_sink``: Keras callbacks on the driver, and what they write to the model.
  ``distributed``: for users' own training functions on several ranks.
- ``signature``, ``structure``: a model's inputs and outputs, and how named arrays go into them.
  ``preprocessing``: what a model with a preprocessor makes of rows, such as texts.
  ``custom_objects``: the user's own classes in it. ``description``: a model in words.
- ``framework``: which backend runs in this process, and its start on the task's devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.errors import UnknownNameError

if TYPE_CHECKING:
    from sparkdl.learner.steps.keras_learner import KerasLearner

BACKENDS = ("tensorflow", "jax", "torch")


def make_learner(model: object) -> KerasLearner:
    """A learner around ``model`` for the Keras backend that is running.

    Raises:
        UnknownNameError: Keras runs on a backend without a learner here.
    """
    import keras

    backend = keras.backend.backend()
    if backend == "tensorflow":
        from sparkdl.learner.steps.tensorflow import TensorFlowLearner

        return TensorFlowLearner(model)
    if backend == "jax":
        from sparkdl.learner.steps.jax import JaxLearner

        return JaxLearner(model)
    if backend == "torch":
        from sparkdl.learner.steps.torch import TorchLearner

        return TorchLearner(model)
    raise UnknownNameError("Keras backend", backend, BACKENDS)
