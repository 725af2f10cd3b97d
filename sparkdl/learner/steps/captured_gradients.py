"""Gradients on their way between a model's ``train_step`` and its optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sparkdl.errors import ModelError
from sparkdl.learner.state.optimizer_state import innermost_optimizer, optimizers_within


@contextlib.contextmanager
def captured_gradients(optimizer: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Within, ``optimizer`` takes no step: ``(gradient, variable)`` pairs are listed instead.

    Keras calls ``stateless_apply`` on JAX and ``apply`` on the other backends.
    """
    captured: list[tuple[Any, Any]] = []

    def apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
        variables = trainable_variables
        if variables is None:
            variables = optimizer._trainable_variables
        captured.extend(zip(grads, variables, strict=True))

    def stateless_apply(
        optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
    ) -> tuple[Any, Any]:
        apply(grads)
        return trainable_variables, optimizer_variables

    # Not setattr: Keras' own would look at the functions as if they were variables.
    object.__setattr__(optimizer, "apply", apply)
    object.__setattr__(optimizer, "stateless_apply", stateless_apply)
    try:
        yield captured
    finally:
        object.__delattr__(optimizer, "apply")
        object.__delattr__(optimizer, "stateless_apply")


def match_gradients(
    model: Any, captured: Iterable[tuple[Any, Any]], trained: Iterable[Any]
) -> list[Any]:
    """The gradient of each variable of ``trained``, None where it has none.

    Args:
        model: The model, for the message.
        captured: ``(gradient, variable)`` pairs that ``train_step`` gave to the optimizer.
        trained: The variables, in the layout's order.

    Raises:
        ModelError: ``train_step`` did not step the model's optimizer exactly once.
    """
    found: dict[int, Any] = {}
    steps = 0
    for gradient, variable in captured:
        steps = max(steps, 2 if id(variable) in found else 1)
        found[id(variable)] = gradient
    if steps != 1:
        raise ModelError(
            f"the train_step of model {model.name!r} has no gradient to exchange",
            expected="one step of model.optimizer per batch",
            received="none" if steps == 0 else "several",
            hint="a custom train_step like this trains in the modes that exchange weights: "
            "mode='asynchronous', or a frequency above one batch",
        )
    return [found.get(id(variable)) for variable in trained]


def gradients_to_apply(
    model: Any, gradients: Iterable[Any], trained: Iterable[Any], has_gradient: Iterable[bool]
) -> tuple[list[Any], list[Any]]:
    """Gradients and variables for ``model.optimizer.apply``.

    An optimizer leaves out variables without a gradient, with a warning. A ``MultiOptimizer``
    wants all of them, with None for these.

    Args:
        model: Whose optimizer it is.
        gradients: The gradient of each variable; without a meaning where it has none.
        trained: The variables.
        has_gradient: Whether a variable has one.
    """
    wants_all = bool(optimizers_within(innermost_optimizer(model)))
    pairs = [
        (gradient if has else None, variable)
        for gradient, variable, has in zip(gradients, trained, has_gradient, strict=True)
        if has or wants_all
    ]
    return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
