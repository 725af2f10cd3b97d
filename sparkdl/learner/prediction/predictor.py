"""A model that only runs forward, in this process, on the Keras backend that is running.

Compiled or not: no loss and no optimizer are needed. Every forward pass has the same number of
rows, so that nothing is traced again, and so that a row's prediction does not depend, in its last
bits, on how many rows came with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from sparkdl.data.columns import aligned_empty, as_aligned
from sparkdl.errors import ModelError, UnknownNameError
from sparkdl.learner.signature import (
    Signature,
    TensorSpec,
    gives_otherwise,
    model_signature,
    traced,
)
from sparkdl.learner.structure import arrange_inputs, map_arrays, name_outputs, pack_batch
from sparkdl.training.learning import Arrays


class KerasPredictor(ABC):
    """A Keras model that runs forward; see :class:`sparkdl.training.learning.Predictor`.

    Args:
        model: A built ``keras.Model``.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model, self.passes = model, 1
        self._preprocessing = model_signature(model).preprocessing

    def predict(self, x: Arrays, batch_size: int) -> Arrays:
        if self._preprocessing is not None:
            x = self._preprocessing.rows(x)
        rows = len(next(iter(x.values())))
        if rows > batch_size:
            return name_outputs(self.model, self._run_several(arrange_inputs(self.model, x)))
        if rows != batch_size:
            x = {name: filled(array, batch_size) for name, array in x.items()}
        outputs = name_outputs(self.model, self._run(arrange_inputs(self.model, x)))
        if rows != batch_size:
            outputs = {name: array[:rows] for name, array in outputs.items()}
        return outputs

    def reload(self) -> None:  # noqa: B027
        """Reads the variables of the model again, where the predictor holds them elsewhere."""

    @abstractmethod
    def _run(self, x: object) -> Any:
        """The model's outputs for inputs in the model's own structure."""

    def _run_several(self, x: object) -> Any:
        """The same for ``passes`` forward passes, one after the other."""
        raise NotImplementedError(f"{type(self).__name__} makes one forward pass at a time")


def make_predictor(model: keras.Model) -> KerasPredictor:
    """A predictor around ``model`` for the Keras backend that is running.

    Raises:
        UnknownNameError: Keras runs on a backend without a predictor here.
    """
    kinds: dict[str, type[KerasPredictor]]
    kinds = {"tensorflow": TensorFlowPredictor, "jax": JaxPredictor, "torch": TorchPredictor}
    backend = keras.backend.backend()
    if backend not in kinds:
        raise UnknownNameError("Keras backend", backend, kinds)
    return kinds[backend](model)


def prediction_signature(model: keras.Model) -> Signature:
    """The signature of a model whose outputs are what its ``predict`` gives.

    A step or call of the user's own is traced with symbols, or predicts for two rows of zeros.

    Raises:
        ModelError: It fails, or does not give a value for each row.
    """
    signature, otherwise = model_signature(model), gives_otherwise(model)
    inputs, unknown = signature.inputs, TensorSpec("output", None, keras.config.floatx())
    if not otherwise and all(spec.shape is not None for spec in signature.outputs.values()):
        return signature
    if any(spec.shape is None for spec in inputs.values()):
        return replace(signature, outputs={"output": unknown})
    try:
        outputs = others = _outputs_of_step(model, inputs, {n: s.dtype for n, s in inputs.items()})
    except ModelError:
        if otherwise:
            raise
        return signature  # rows may do where zeros do not
    with suppress(ModelError):
        if any(spec.takes_whole for spec in inputs.values()):
            others = _outputs_of_step(model, inputs, dict.fromkeys(inputs, "int64"))
    whole = {name: spec.dtype for name, spec in others.items()}
    return replace(signature, outputs=outputs, whole_outputs=whole)


def _outputs_of_step(
    model: keras.Model, inputs: Mapping[str, TensorSpec], given: Mapping[str, str]
) -> dict[str, TensorSpec]:
    """The outputs of ``predict`` by name, for inputs of the dtypes ``given``."""
    dtypes = {name: spec.dtype_for(given[name]) for name, spec in inputs.items()}
    shapes = {name: spec.shape or () for name, spec in inputs.items()}
    symbols = {n: keras.KerasTensor((None, *shape), dtypes[n]) for n, shape in shapes.items()}
    made = traced(lambda x: _step(model, x), arrange_inputs(model, symbols))
    fixed = symbolic = all(isinstance(t, keras.KerasTensor) for t in keras.tree.flatten([made]))
    if not symbolic:
        if gives_otherwise(model) and keras.backend.backend() != "torch" and model.run_eagerly:
            raise _odd_step(model, "code that needs values, which workers compile")
        fixed = not any(None in shape for shape in shapes.values())
        try:
            zeros = {n: np.zeros((2, *(d or 1 for d in s)), dtypes[n]) for n, s in shapes.items()}
            made = model.predict(arrange_inputs(model, zeros), batch_size=2, verbose=0)
        except Exception as error:
            raise _odd_step(model, f"{type(error).__name__}: {str(error)[:600]}") from error
    found = {}
    for name, tensor in name_outputs(model, made, lambda tensor: tensor).items():
        shape = None if isinstance(tensor, (list, tuple, dict)) else tuple(np.shape(tensor))
        if not shape or shape[0] not in (None, 2):
            raise _odd_step(model, f"{name}: {'a structure' if shape is None else shape}")
        text = isinstance(tensor, np.ndarray) and tensor.dtype.kind in "OSU"
        dtype = "string" if text else keras.backend.standardize_dtype(tensor.dtype)
        sizes = shape[1:] if fixed else (None,) * len(shape[1:])
        found[name] = TensorSpec(name, sizes, dtype)
    return found


def _step(model: keras.Model, x: object) -> Any:
    if keras.backend.backend() != "jax":
        return model.predict_step(pack_batch(x))
    trained, other = model.trainable_variables, model.non_trainable_variables
    state = [v.value for v in trained], [v.value for v in other]
    return model.predict_step(state, pack_batch(x))[0]


def symbolic_outputs(model: keras.Model, symbols: Mapping[str, Any]) -> Any:
    """The outputs of ``predict`` for symbols by input; in the order of the outputs, or by name."""
    given = arrange_inputs(model, dict(symbols))
    if not gives_otherwise(model):
        return model.compute_output_spec(given)
    made = keras.src.backend.compute_output_spec(lambda x: _step(model, x), given)
    return name_outputs(model, made, lambda tensor: tensor)


def _odd_step(model: keras.Model, received: str) -> ModelError:
    return ModelError(
        f"predict_step or call of model {model.name!r} gives what cannot become columns",
        expected="an array whose first axis is the rows; or a list, tuple or dict of such arrays",
        received=received,
    )


def filled(array: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
    """``array`` with its last row repeated up to ``rows`` along the first axis.

    A row of the data, and not zeros: what a layer does with zeros (divide by a norm) may fail.
    """
    result = aligned_empty((rows, *array.shape[1:]), array.dtype)
    result[: len(array)] = array
    result[len(array) :] = array[-1]
    return result


_PASSES = 8
_PASSES_ALONE = 16


class TensorFlowPredictor(KerasPredictor):
    """One compiled graph of the model's ``predict_step``.

    On CPUs a call of a graph costs as much as a small network's forward pass. So after 16 passes a
    second graph makes 8 passes in a loop, each with as many rows as before: the bits are the same.
    A model whose outputs have another shape in each pass stays with the first graph.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        import tensorflow as tf

        from sparkdl.learner.steps.tensorflow_calls import RankedFunctions, compiled_apart

        self._tf, self._compiled_apart = tf, compiled_apart
        has_gpu = bool(tf.config.list_physical_devices("GPU"))
        # XLA pays on accelerators; on CPUs the plain graph is as fast and compiles 3x sooner.
        self._calls = RankedFunctions(
            model.predict_step, reduce_retracing=True,
            jit_compile=bool(model.jit_compile) and has_gpu,
        )  # fmt: skip
        self._passes_left = 0 if has_gpu or model.run_eagerly else _PASSES_ALONE
        self._on_cpu = not has_gpu
        self._shapes: Any = None
        self._outputs: Any = None
        self._looped: Any = None

    def _tensor(self, array: np.ndarray[Any, Any]) -> Any:
        """The memory of an array as a tensor; ``convert_to_tensor`` alone would copy it twice."""
        if not self._on_cpu or array.dtype.kind not in "fiu" or not array.size:
            return self._tf.convert_to_tensor(array)
        return self._tf.experimental.dlpack.from_dlpack(as_aligned(array).__dlpack__())

    def _run(self, x: object) -> Any:
        tensors = map_arrays(self._tensor, x)
        outputs = self._call(tensors)
        if self._passes_left:
            self._count_pass(tensors, outputs)
        return outputs

    def _call(self, x: object) -> Any:
        return self._calls.of(x)(pack_batch(x))

    def _count_pass(self, x: object, outputs: object) -> None:
        """After ``_ALONE`` passes with rows of one shape, prepares the loop over several."""
        tree = self._tf.nest
        shapes = [tensor.shape for tensor in tree.flatten(x)]
        if shapes != self._shapes:
            self._shapes, self._passes_left = shapes, _PASSES_ALONE
        self._passes_left -= 1
        if self._passes_left:
            return
        call = self._calls.of(x).get_concrete_function(pack_batch(self._specs(x)))
        if all(spec.shape.is_fully_defined() for spec in tree.flatten(call.structured_outputs)):
            self._outputs = self._specs(outputs)
            self._looped = self._compiled_apart(self._loop)
            self.passes = _PASSES

    def _specs(self, tensors: object) -> Any:
        tf = self._tf
        return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), tensors)

    def _run_several(self, x: object) -> Any:
        tensors = map_arrays(self._tensor, x)
        if [self._one_pass(t) for t in self._tf.nest.flatten(tensors)] == self._shapes:
            return self._looped(tensors)
        parts = [
            self._call(self._tf.nest.map_structure(lambda t, i=i: t[i], self._apart(tensors)))
            for i in range(_PASSES)
        ]
        return self._tf.nest.map_structure(lambda *ts: self._tf.concat(ts, 0), *parts)

    def _one_pass(self, tensor: Any) -> Any:
        return self._tf.TensorShape([tensor.shape[0] // _PASSES, *tensor.shape[1:]])

    def _apart(self, tensors: object) -> Any:
        tf = self._tf
        return tf.nest.map_structure(
            lambda t: tf.reshape(t, [_PASSES, *self._one_pass(t)]), tensors
        )

    def _loop(self, tensors: object) -> Any:
        tf = self._tf
        outputs = tf.map_fn(
            lambda x: self.model.predict_step(pack_batch(x)), self._apart(tensors),
            fn_output_signature=self._outputs, parallel_iterations=1,
        )  # fmt: skip
        return tf.nest.map_structure(lambda t: tf.reshape(t, [-1, *t.shape[2:]]), outputs)


class JaxPredictor(KerasPredictor):
    """The model's ``predict_step`` as a compiled pure function of its variables."""

    def __init__(self, model: keras.Model) -> None:
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

    def _run(self, x: object) -> Any:
        outputs, drawn = self._call(self._state, pack_batch(x))
        self._state = (self._state[0], drawn)  # has the seeds of layers that draw at inference
        return outputs


class TorchPredictor(KerasPredictor):
    """The model's ``predict_step`` without gradients."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        import torch

        from sparkdl.learner.steps.torch import tensor_of

        self._torch, self._tensor_of = torch, tensor_of
        compiles = model._should_torch_compile()
        self._call = torch.compile(model.predict_step) if compiles else model.predict_step
        variables = model.variables
        self._device = variables[0].value.device if variables else torch.device("cpu")
        # For plain PyTorch layers inside the model; Keras' own method of that name differs.
        torch.nn.Module.train(model, False)

    def _run(self, x: object) -> Any:
        with self._torch.no_grad():
            tensors = map_arrays(lambda a: self._tensor_of(a, self._device), x)
            return self._call(pack_batch(tensors))
