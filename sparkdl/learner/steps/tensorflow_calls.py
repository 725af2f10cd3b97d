"""``ShapedCalls``: a compiled TensorFlow function, found by the shapes of a stack of batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import tensorflow as tf

from sparkdl.training.learning import Arrays, BatchStack


def compiled_apart(function: Callable[..., Any], **options: object) -> Any:
    """``tf.function`` of a function that is compiled anew for each model.

    TensorFlow counts how often functions are traced by where their code stands, and warns of
    "retracing" when the fifth model of a process comes, though each has a function of its own. What
    has no code, as a ``partial``, is counted by itself.

    Args:
        options: For ``tf.function``.
    """
    return tf.function(partial(function), autograph=False, **options)


class RankedFunctions:
    """One ``tf.function`` for each combination of the arguments' ranks and dtypes.

    A single one would be traced for labels of shape ``(n,)``, and then for ``(n, 1)`` with labels
    of unknown rank, which no loss takes: TensorFlow relaxes what differs between two calls.
    """

    def __init__(self, function: Callable[..., Any], **options: object) -> None:
        self._function, self._options = function, options
        self._compiled: dict[Hashable, Any] = {}

    def of(self, *arguments: object) -> Any:
        """The ``tf.function`` for such arguments: tensors, or structures of tensors."""
        ranks = tuple((t.shape.rank, t.dtype) for t in tf.nest.flatten(arguments) if t is not None)
        if ranks not in self._compiled:
            self._compiled[ranks] = compiled_apart(self._function, **self._options)
        return self._compiled[ranks]


class ShapedCalls:
    """Calls a compiled function; what is compiled for a stack's shapes is looked up once.

    TensorFlow looks that up at every call, from all properties of all tensors. That takes 0.14 ms,
    a third of a small network's step on one batch.

    Args:
        function: What to compile: returns tensors, and what was found while it was traced. Both
            follow from shapes and dtypes alone.
        unknown: Tells the axes of which the graph is not to know the size: of batches, of rows.
        options: For ``tf.function``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        unknown: Callable[[], tuple[int, ...]],
        **options: object,
    ) -> None:
        self._function, self._last = function, None
        self._functions = RankedFunctions(self._trace, **options)
        self._unknown = unknown
        self._compiled: dict[Hashable, tuple[Any, Any]] = {}
        self._found: dict[Any, Any] = {}

    def __call__(self, stack: BatchStack, *arguments: object) -> tuple[Any, Any]:
        """The function's tensors, and what was found when it was traced for such shapes.

        Args:
            stack: Where the arguments come from.
            arguments: Tensors, or structures of tensors, whose shapes are those of the stack; the
                last one may be None.
        """
        compiled, found = self.compiled(stack, *arguments)
        return compiled(*arguments), found

    def compiled(self, stack: BatchStack, *arguments: object) -> tuple[Any, Any]:
        """The function for these shapes, and what was found; compiles it, but does not run it."""
        unknown = self._unknown()
        arrays = (stack.x, stack.y, stack.sample_weight or {})
        shapes = (unknown, arguments[-1] is None, *(_shapes(group, unknown) for group in arrays))
        compiled = self._compiled.get(shapes)
        if compiled is None:
            specs = tf.nest.map_structure(lambda t: _spec(t, unknown), arguments)
            traced = self._functions.of(*arguments).get_concrete_function(*specs)
            found = self._found.setdefault(traced, self._last)  # traced now, or for other shapes
            compiled = self._compiled[shapes] = traced, found
        return compiled

    def _trace(self, *arguments: object) -> Any:
        tensors, self._last = self._function(*arguments)
        return tensors


def _spec(tensor: Any, unknown: tuple[int, ...]) -> Any:
    if tensor is None or not tensor.shape.rank:
        return tensor
    return tf.TensorSpec(_sizes(tensor.shape, unknown), tensor.dtype)


def _sizes(shape: Iterable[int], unknown: tuple[int, ...]) -> tuple[int | None, ...]:
    return tuple(None if axis in unknown else size for axis, size in enumerate(shape))


def _shapes(arrays: Arrays, unknown: tuple[int, ...]) -> Hashable:
    # Without names: those of single arrays differ between equal models, and others never do.
    return tuple((_sizes(array.shape, unknown), array.dtype) for array in arrays.values())


def in_main_thread() -> bool:
    """Whether an exchange may wait inside a compiled call.

    Ranks that are threads of one process share TensorFlow's threads, and could take all of them.
    """
    return threading.current_thread() is threading.main_thread()
