"""A model that only runs forward, in this process, on the Keras backend that is running.

Compiled or not: no loss and no optimizer are needed. Every forward pass has the same number of
rows, so that nothing is traced again, and so that a row's prediction does not depend, in its last
bits, on how many rows came with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from sparkdl.errors import UnknownNameError
from sparkdl.learner import BACKENDS
from sparkdl.learner.structure import arrange_inputs, map_arrays, name_outputs
from sparkdl.protocols import Arrays


class KerasPredictor(ABC):
    """A Keras model that runs forward; see :class:`sparkdl.protocols.Predictor`.

    Args:
        model: A built ``keras.Model``.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def predict(self, x: Arrays, batch_size: int) -> Arrays:
        rows = len(next(iter(x.values())))
        if rows != batch_size:
            x = {name: filled(array, batch_size) for name, array in x.items()}
        outputs = name_outputs(self.model, self._run(arrange_inputs(self.model, x)))
        if rows != batch_size:
            outputs = {name: array[:rows] for name, array in outputs.items()}
        return outputs

    def reload(self) -> None:  # noqa: B027
        """Reads the variables of the model again, where the predictor holds them elsewhere."""

    @abstractmethod
    def _run(self, x: Any) -> Any:
        """The model's outputs for inputs in the model's own structure."""


def make_predictor(model: Any) -> KerasPredictor:
    """A predictor around ``model`` for the Keras backend that is running.

    Raises:
        UnknownNameError: Keras runs on a backend without a predictor here.
    """
    import keras

    backend = keras.backend.backend()
    if backend == "tensorflow":
        return TensorFlowPredictor(model)
    if backend == "jax":
        return JaxPredictor(model)
    if backend == "torch":
        return TorchPredictor(model)
    raise UnknownNameError("Keras backend", backend, BACKENDS)


def filled(array: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
    """``array`` with its last row repeated up to ``rows`` along the first axis.

    A row of the data, and not zeros: what a layer does with zeros (divide by a norm) may fail.
    """
    result = np.empty((rows, *array.shape[1:]), array.dtype)
    result[: len(array)] = array
    result[len(array) :] = array[-1]
    return result


class TensorFlowPredictor(KerasPredictor):
    """One compiled graph of the model's ``predict_step``."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        import tensorflow as tf

        self._tensor = tf.convert_to_tensor
        # XLA pays on accelerators; on CPUs the plain graph is as fast and compiles 3x sooner.
        jit = bool(model.jit_compile) and bool(tf.config.list_physical_devices("GPU"))
        self._call = tf.function(
            model.predict_step, autograph=False, reduce_retracing=True, jit_compile=jit
        )

    def _run(self, x: Any) -> Any:
        return self._call((map_arrays(self._tensor, x),))


class JaxPredictor(KerasPredictor):
    """The model's ``predict_step`` as a compiled pure function of its variables."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        import jax

        compiles = not model.run_eagerly and model.jit_compile
        self._call = jax.jit(model.predict_step) if compiles else model.predict_step
        self._state: Any = None
        self.reload()

    def reload(self) -> None:
        self._state = (
            [v.value for v in self.model.trainable_variables],
            [v.value for v in self.model.non_trainable_variables],
        )

    def _run(self, x: Any) -> Any:
        outputs, drawn = self._call(self._state, (x,))
        self._state = (self._state[0], drawn)  # has the seeds of layers that draw at inference
        return outputs


class TorchPredictor(KerasPredictor):
    """The model's ``predict_step`` without gradients."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        import torch

        from sparkdl.learner.torch import tensor_of

        self._torch, self._tensor_of = torch, tensor_of
        compiles = model._should_torch_compile()
        self._call = torch.compile(model.predict_step) if compiles else model.predict_step
        variables = model.variables
        self._device = variables[0].value.device if variables else torch.device("cpu")
        # For plain PyTorch layers inside the model; Keras' own method of that name differs.
        torch.nn.Module.train(model, False)

    def _run(self, x: Any) -> Any:
        with self._torch.no_grad():
            return self._call((map_arrays(lambda a: self._tensor_of(a, self._device), x),))
