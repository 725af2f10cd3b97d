"""What a worker trains: a Keras model on one of three backends; importing this imports none.

- ``keras_learner``, ``tensorflow``, ``jax``, ``torch``: a model that takes training steps, see
  :class:`sparkdl.protocols.Learner`. ``make_learner`` chooses, ``cache`` keeps compiled ones;
  ``tensorflow_calls``, ``tensorflow_exchange``, ``jax_steps`` and ``captured_gradients`` are parts
  of theirs.
- ``model_weights``, ``optimizer_state``, ``metric_state``: a model's variables as buffers.
- ``signature``, ``structure``: a model's inputs and outputs, and how named arrays go into them.
- ``archive``, ``fingerprint``: a model as bytes, and which models share compiled steps.
- ``compile_mistakes``, ``compile_parts``: what is wrong with a model's loss, metrics or optimizer.
- ``metric_check``, ``local_optimizer``, ``ensemble``: what a fit asks of a model, or makes of it.
- ``framework``: which backend runs in this process, and its start on the task's devices.
- ``callback_sink``: Keras callbacks that run on the driver.
- ``distributed_optimizer``, ``distributed_gradients``, ``distributed_callbacks``: for users' own
  training functions on several ranks.
"""

from __future__ import annotations

from typing import Any

from sparkdl.errors import UnknownNameError
from sparkdl.protocols import Learner

BACKENDS = ("tensorflow", "jax", "torch")


def make_learner(model: Any) -> Learner:
    """A learner around ``model`` for the Keras backend that is running.

    Raises:
        UnknownNameError: Keras runs on a backend without a learner here.
    """
    import keras

    backend = keras.backend.backend()
    if backend == "tensorflow":
        from sparkdl.learner.tensorflow import TensorFlowLearner

        return TensorFlowLearner(model)
    if backend == "jax":
        from sparkdl.learner.jax import JaxLearner

        return JaxLearner(model)
    if backend == "torch":
        from sparkdl.learner.torch import TorchLearner

        return TorchLearner(model)
    raise UnknownNameError("Keras backend", backend, BACKENDS)
