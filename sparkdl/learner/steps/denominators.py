"""The denominators of the terms of a loss: on one worker, and on all workers together.

A loss is a sum of terms: one for each output, and what layers add. On the rows of all workers ``k``
a term is ``Σ N_k / Σ D_k``, where worker ``k`` alone computes ``N_k / D_k``. Gradients of workers
are joined by a mean weighted by their rows ``r_k``. That mean is the gradient of one process if
each worker multiplies each of its terms, before the backward pass, by ::

    f_k = D_k / Σ D  ·  Σ r / r_k

- a mean over rows, or over rows and positions: ``D_k`` is proportional to ``r_k``, so ``f_k = 1``;
- a mean over what a mask leaves, or divided by the sum of the sample weights: ``D_k`` is counted
  in each step, and the workers tell each other;
- a sum over rows: it is divided by nothing, so ``f_k = Σ r / r_k``; where code of the user's own
  divides it by the rows, ``f_k = 1`` (:mod:`sparkdl.learner.steps.repeated_rows` finds that out);
- what regularizes weights is the same on all workers: ``f_k = 1``;
- terms whose divisor Keras does not show (``add_loss``, a user's loss function that returns one
  number, a ``compute_loss`` or ``train_step`` of the user's own): taken as means over rows,
  ``f_k = 1``.

Keras computes the terms with a known denominator in one function, whose calls are followed here
while a step is traced. As a loss tracker is told the terms with their factors, the means over rows
that it keeps are those of one process, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras.src.losses import loss as keras_losses
from keras.src.trainers import compile_utils

from sparkdl.errors import ModelError
from sparkdl.learner.framework import replaced
from sparkdl.learner.signature import has_own
from sparkdl.learner.steps.captured_gradients import captured_gradients
from sparkdl.weights import FloatArray

Numbers = npt.NDArray[np.float64]


def factors(counted: Sequence[bool], mine: Numbers, of_all: Numbers) -> FloatArray:
    """The factor of this worker for each term of its loss.

    Args:
        counted: For each term whether it has a denominator; otherwise it is a sum over rows.
        mine: This worker's rows, then the denominator of each term.
        of_all: The sums of all workers' numbers.

    >>> factors([True, False], np.array([8.0, 10.0, 0.0]), np.array([16.0, 40.0, 0.0]))
    array([0.5, 2. ], dtype=float32)
    """
    more_rows = of_all[0] / mine[0]
    known = of_all[1:] != 0
    shares = np.divide(mine[1:], of_all[1:], out=np.zeros(len(counted)), where=known)
    found: FloatArray = np.where(counted, shares * more_rows, more_rows).astype(np.float32)
    return found


class Terms:
    """The terms that a step computes and that are no means over rows, in their order.

    Args:
        factor: Gives the factor of a term: called with its number and its denominator, which is
            None for a sum over rows. None: all factors are 1.
        sums: Whether sums are sums in the whole loss, too: not divided by code of the user's own
            (:func:`sparkdl.learner.steps.repeated_rows.sums_stay`). Otherwise their factor is 1.

    Attributes:
        counted: For each term whether it has a denominator.
        denominators: The denominator of each term: a tensor, or None.
    """

    def __init__(
        self, factor: Callable[[int, Any], Any] | None = None, *, sums: bool = True
    ) -> None:
        self._factor, self._sums = factor, sums
        self.counted: list[bool] = []
        self.denominators: list[Any] = []
        self.within_compiled = False
        self._repeated: int | None = None

    def weigh(self, loss: Any, denominator: Any, *, keeps_value: bool = False) -> Any:
        """A term with its factor.

        Args:
            loss: The term as this worker computes it.
            denominator: None for a sum over rows.
            keeps_value: Whether only the gradient gets the factor.
        """
        if denominator is None and not self._sums:
            return loss
        number = len(self.counted) if self._repeated is None else self._repeated
        if self._repeated is not None:
            self._repeated += 1
        else:
            self.counted.append(denominator is not None)
            self.denominators.append(denominator)
        if self._factor is None:
            return loss
        factor = keras.ops.cast(self._factor(number, denominator), loss.dtype)
        if keeps_value:
            return factor * loss + keras.ops.stop_gradient((1 - factor) * loss)
        return factor * loss

    def repeating(self, first: int) -> AbstractContextManager[None]:
        """Within, the terms from number ``first`` on are computed once more."""
        return replaced(self, "_repeated", first)

    def stacked(self) -> Any:
        """The denominators as one vector, with 0 for a sum over rows."""
        ops = keras.ops
        found = [ops.zeros(()) if d is None else ops.cast(d, "float32") for d in self.denominators]
        return ops.stack(found)


class _Active(threading.local):
    terms: Terms | None = None


_active = _Active()


def active_terms() -> Terms | None:
    """The terms that the calls of this thread are told to, within :func:`followed`."""
    return _active.terms


_lock = threading.Lock()
_users = 0


@contextlib.contextmanager
def followed(terms: Terms, model: keras.Model) -> Iterator[None]:
    """Within, the losses that this thread computes are told to ``terms``.

    Args:
        terms: Gives each its factor.
        model: Whose losses they are.

    Raises:
        ModelError: This version of Keras computes losses in another way.
    """
    with _patched(), _sums_of_activities(model, terms), replaced(_active, "terms", terms):
        yield


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """Within, Keras' two functions tell the terms; threads may be within at the same time."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _require_known()
            keras_losses.reduce_weighted_values = _reduce
            compile_utils.CompileLoss.call = _call
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                keras_losses.reduce_weighted_values = _keras_reduce
                compile_utils.CompileLoss.call = _keras_call


_keras_reduce: Any = vars(keras_losses).get("reduce_weighted_values")
_keras_call: Any = vars(compile_utils.CompileLoss).get("call")


def _require_known() -> None:
    if _keras_reduce is None or _keras_call is None or "apply_mask" not in vars(keras_losses):
        raise ModelError(
            "cannot find out what the terms of the loss are divided by",
            expected="Keras 3.10 to 3.15",
            received=f"Keras {keras.__version__}, which reduces losses in another way",
            hint="install one of these versions, or train with mode='asynchronous'",
        )


def _call(self: object, *arguments: object, **named: object) -> Any:
    """Keras' ``CompileLoss.call``."""
    terms = _active.terms
    if terms is None:
        return _keras_call(self, *arguments, **named)
    with replaced(terms, "within_compiled", True):
        return _keras_call(self, *arguments, **named)


def _reduce(
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: Any = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """Keras' ``reduce_weighted_values``."""
    loss = _keras_reduce(
        values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype
    )
    terms = _active.terms
    if terms is None or tuple(values.shape) in ((), (0,)):  # one number of the user's own function
        return loss
    if reduction == "sum":
        return terms.weigh(loss, None)
    if reduction in (None, "none"):
        # Keras takes the gradient of the sum of these numbers, and shows their mean.
        return terms.weigh(loss, None, keeps_value=True) if terms.within_compiled else loss
    denominator = _denominator(values, sample_weight, mask, reduction, loss.dtype)
    return loss if denominator is None else terms.weigh(loss, denominator)


def _denominator(
    values: object, sample_weight: object, mask: object, reduction: str, dtype: object
) -> Any:
    """The denominator of a mean; None if that is proportional to the rows."""
    ops = keras.ops
    if reduction == "mean_with_sample_weight":
        if sample_weight is None and mask is None:
            return None
        if sample_weight is not None:
            # A copy: with PyTorch, Keras multiplies what it is given.
            sample_weight = ops.copy(ops.convert_to_tensor(sample_weight, dtype=dtype))
        merged = keras_losses.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)
        return ops.stop_gradient(ops.sum(ops.cast(merged, dtype)))
    if mask is None:
        return None
    left, size = ops.sum(ops.cast(mask, dtype)), ops.cast(ops.size(values), dtype)
    return ops.stop_gradient(left * size / ops.cast(ops.size(mask), dtype))


@contextlib.contextmanager
def _sums_of_activities(model: keras.Model, terms: Terms) -> Iterator[None]:
    """Within, Keras' own activity regularizers tell their sums over rows.

    Since Keras 3.14 a layer divides them by the rows.
    """
    if _version() >= (3, 14):
        yield
        return
    kinds = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)

    def told(regularizer: keras.Regularizer) -> Callable[[Any], Any]:
        return lambda output: terms.weigh(regularizer(output), None)

    with contextlib.ExitStack() as stack:
        for layer in (model, *model._flatten_layers(include_self=False)):
            regularizer = layer.activity_regularizer
            if isinstance(regularizer, kinds):
                object.__setattr__(layer, "activity_regularizer", told(regularizer))
                stack.callback(object.__setattr__, layer, "activity_regularizer", regularizer)
        yield


def _version() -> tuple[int, int]:
    major, minor = keras.__version__.split(".")[:2]
    return int(major), int(minor)


def forward_terms(
    model: keras.Model,
    data: object,
    values: Sequence[tuple[Any, Any]] | None = None,
    state: object = None,
    *,
    sums: bool = True,
) -> Terms:
    """The terms of a batch, for their denominators alone: no variable changes.

    In a compiled function all is left out that no denominator needs.

    Args:
        data: A batch, as ``train_step`` takes it.
        values: ``(variable, value)`` pairs, where the variables do not have their values.
        state: What ``train_step`` takes beside the batch, if anything.
        sums: See :class:`Terms`.
    """
    terms = Terms(sums=sums)
    if values is None:  # regularizers ask the scope for them
        values = [(v, v.value) for v in model.trainable_variables]
    with followed(terms, model), keras.StatelessScope(state_mapping=values):
        if has_own(model, "train_step"):
            with captured_gradients(model):
                _ = model.train_step(data) if state is None else model.train_step(state, data)
            return terms
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        training = {"training": True} if model._call_has_training_arg else {}
        y_pred = model(x, **training)
        model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    return terms
