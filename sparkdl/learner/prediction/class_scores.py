"""The meaning of the numbers of a classifier's output: probabilities or logits, and the classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.learner.signature import TensorSpec, loss_by_output, loss_name

Array = npt.NDArray[Any]
_ONE_CLASS = ("sparsecategoricalcrossentropy", "categoricalcrossentropy",
              "categoricalfocalcrossentropy")  # fmt: skip
_EACH_CLASS = ("binarycrossentropy", "binaryfocalcrossentropy")
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class ClassScores:
    """How an output of shape ``(rows, ..., units)`` says which class a row is.

    Args:
        exclusive: A row is of exactly one class, and each class has a unit (softmax). False: each
            unit has a probability of its own (sigmoid); a single unit is that of class 1 of two.
        logits: The numbers are logits, before softmax or sigmoid.
        units: Numbers along the last axis; None if unknown.
    """

    exclusive: bool
    logits: bool
    units: int | None

    @property
    def binary(self) -> bool:
        """Whether one number stands for two classes."""
        return not self.exclusive and self.units == 1

    @property
    def num_classes(self) -> int | None:
        """Classes among which a row is of one; None if unknown, or if it may be of several."""
        if self.binary:
            return 2
        return self.units if self.exclusive else None

    def probability(self, values: Array) -> Array:
        """Probabilities of shape ``(rows, ..., classes)``; a single unit p becomes ``1 - p, p``.

        Args:
            values: The output, ``(rows, ..., units)``, floating point.
        """
        if self.binary:
            p = _sigmoid(values) if self.logits else values
            return np.concatenate([1 - p, p], axis=-1)
        if not self.logits:
            return values
        return _softmax(values) if self.exclusive else _sigmoid(values)

    def raw(self, values: Array) -> Array:
        """Numbers that grow with the probability of their class, float64.

        They are its logarithm where a row is of exactly one class, ``log(p)``; a single unit
        becomes ``-z, z`` with its logit z, and a unit of its own gives z or ``log(p)``.
        """
        values = values.astype(np.float64, copy=False)
        if self.binary:
            z = values
            if not self.logits:
                p = np.clip(values, _TINY, None)
                z = np.log(p) - np.log(np.clip(1 - values, _TINY, None))
            return np.asarray(np.concatenate([-z, z], axis=-1))
        if not self.logits:
            return np.asarray(np.log(np.clip(values, _TINY, None)))
        return _log_softmax(values) if self.exclusive else values

    def classes(self, values: Array, thresholds: tuple[float, ...] = ()) -> Array:
        """The class of the greatest probability, int32 of shape ``(rows, ...)``.

        Args:
            thresholds: One per class: the class of the greatest probability divided by its
                threshold, as Spark's ``thresholds``. A class with threshold 0 wins if its
                probability is not 0.
        """
        if not thresholds:
            scores = self.probability(values) if self.binary else values  # logits grow with p
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                scores = self.probability(values) / np.asarray(thresholds, values.dtype)
            scores = np.where(np.isnan(scores), -np.inf, scores)
        numbers: Array = np.argmax(scores, axis=-1).astype(np.int32)
        return numbers


def class_scores(
    model: Any, outputs: Mapping[str, TensorSpec], loss: Any = None
) -> dict[str, ClassScores]:
    """Which outputs are a classifier's, as the loss says it, or else the last layer's activation.

    Args:
        model: A built ``keras.Model``.
        outputs: Name -> spec, in the model's order.
        loss: What the model was compiled with; by default ``model.loss``.

    Returns:
        Output name -> its meaning, for the outputs where it is known.
    """
    losses = loss_by_output(model.loss if loss is None else loss, list(outputs))
    activations = _activations(model, list(outputs))
    found = {}
    for name, spec in outputs.items():
        units = spec.shape[-1] if spec.shape else (1 if spec.shape == () else None)
        plain, logits = loss_name(losses.get(name))
        if plain in _ONE_CLASS:
            found[name] = ClassScores(True, logits, units)
        elif plain in _EACH_CLASS:
            found[name] = ClassScores(False, logits, units)
        elif activations.get(name) in ("softmax", "sigmoid"):
            found[name] = ClassScores(activations[name] == "softmax", False, units)
    return found


def _activations(model: object, outputs: list[str]) -> dict[str, str]:
    """Output name -> the name of the activation that makes it, where the model's graph says so."""
    tensors = getattr(model, "outputs", None) or []
    found = {}
    if len(tensors) == len(outputs):
        for name, tensor in zip(outputs, tensors, strict=True):
            history = getattr(tensor, "_keras_history", None)
            layer = None if history is None else history.operation
            activation = getattr(layer, "activation", None)
            if type(layer).__name__ == "Softmax":
                found[name] = "softmax"
            elif activation is not None:
                found[name] = str(getattr(activation, "__name__", ""))
    return found


def _sigmoid(values: Array) -> Array:
    e = np.exp(-np.abs(values))
    result: Array = np.where(values >= 0, 1 / (1 + e), e / (1 + e))
    return result


def _log_softmax(values: Array) -> Array:
    """``log(softmax(z))``; the greatest entry is exact also where its probability rounds to 1."""
    top = np.argmax(values, axis=-1)[..., None]
    shifted = values - np.take_along_axis(values, top, axis=-1)
    others = np.exp(shifted)
    np.put_along_axis(others, top, 0.0, axis=-1)
    result: Array = shifted - np.log1p(others.sum(axis=-1, keepdims=True))
    return result


def _softmax(values: Array) -> Array:
    e = np.exp(values - values.max(axis=-1, keepdims=True))
    result: Array = e / e.sum(axis=-1, keepdims=True)
    return result
