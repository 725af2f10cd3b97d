"""What a worker trains. One module per Keras backend; importing this package imports none."""

from __future__ import annotations

from typing import Any

from sparkdl.errors import UnknownNameError

BACKENDS = ("tensorflow", "jax", "torch")


def make_learner(model: Any) -> Any:
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
