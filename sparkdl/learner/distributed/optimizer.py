"""A Keras optimizer whose gradients are joined over all ranks before they are applied."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

from sparkdl.collective.communicator import Communicator
from sparkdl.collective.current import current
from sparkdl.errors import ConfigError, ModelError
from sparkdl.learner.distributed.gradients import GradientReducer, as_dense, make_reducer
from sparkdl.learner.framework import replaced
from sparkdl.learner.state.synchronized_norms import refuse_among_ranks
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require_int


@lists_its_arguments
def DistributedOptimizer(
    optimizer: keras.Optimizer,
    *,
    communicator: Communicator | None = None,
    op: str = "average",
    compression: str = "none",
    backward_passes_per_step: int = 1,
    sparse_as_dense: bool = False,
) -> Any:
    """An optimizer like the one given, but its ``apply`` joins the gradients over all ranks first.

    With ``op='average'`` and equal batches, R ranks of batch b do what one process does with
    batch R·b. It stays an optimizer of its class: schedules, ``iterations``, callbacks and the
    saved model are as with the plain one, and ``model.save`` writes a model that loads anywhere
    (as the plain optimizer; wrap it again to go on training on several ranks).

    Works in ``model.fit`` and in hand-written loops (``optimizer.apply``), on the TensorFlow, JAX
    and PyTorch backends. On TensorFlow compile with ``jit_compile=False``: a graph compiled by XLA
    cannot call the communicator. With ``mixed_float16`` the joined gradients are checked for an
    overflow, so all ranks skip the step alike. All ranks must make the same number of steps.

    Args:
        optimizer: Any ``keras.optimizers.Optimizer``; it is not changed. Its state is taken over.
        communicator: Among all ranks; None: that of the run (outside of a run a world of one).
        op: ``'average'`` or ``'sum'`` of the ranks' gradients.
        compression: ``'none'``, or floats travel as ``'fp16'`` or ``'bf16'``. fp16 overflows above
            65,504.
        backward_passes_per_step: k: gradients of k batches are averaged on each rank, then joined
            and applied; ``iterations`` counts the applied steps. k=2 is the doubled batch.
        sparse_as_dense: Whether gradients of embeddings are made dense, which sums the rows of an
            index that occurs twice in a batch. Else rows and indices of all ranks reach the
            optimizer one by one, as those of one process do (TensorFlow; on the other backends
            gradients are dense in Keras, too).

    Returns:
        A new optimizer of a subclass of ``type(optimizer)``.

    Raises:
        ConfigError: An argument that cannot be used.
        ModelError: The optimizer cannot be made anew from its configuration.

    References:
        Sergeev, Del Balso: Horovod: fast and easy distributed deep learning in TensorFlow (2018).

    >>> import keras
    >>> optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
    >>> isinstance(optimizer, keras.optimizers.SGD)
    True
    """
    _check(optimizer, backward_passes_per_step)
    communicator = current() if communicator is None else communicator
    reducer = make_reducer(communicator, op, compression, sparse_as_dense)
    refuse_among_ranks(lambda: current().size)
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().name == "mixed_float16" and not scaled:
        # Keras would wrap the distributed optimizer in one: each rank would skip steps on its own.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    plain = type(optimizer)
    cls = type(plain.__name__, (_Distributed, plain), {"__class__": property(lambda self: plain)})
    made = _made_anew(optimizer, cls)
    distribution = made._distribution = _Distribution(reducer, backward_passes_per_step)
    if optimizer.built:
        made.build(list(optimizer._trainable_variables))
        with distribution.hidden():
            for variable, value in zip(made.variables, optimizer.variables, strict=True):
                variable.assign(value)
    return made


def is_distributed(optimizer: object) -> bool:
    """Whether :func:`DistributedOptimizer` made it."""
    return isinstance(optimizer, _Distributed)


class _Distribution:
    """The additions to a plain optimizer, in an object that Keras ignores.

    Args:
        reducer: Joins gradients over the ranks.
        passes: Backward passes per applied step.
    """

    def __init__(self, reducer: GradientReducer, passes: int) -> None:
        self.reducer, self.passes = reducer, passes
        self.inside = False
        self.hiding = False
        self.sums: list[Any] = []
        self.count: Any = None

    def joined(self) -> AbstractContextManager[None]:
        """Within, ``apply`` takes gradients that are joined already."""
        return replaced(self, "inside", True)

    def hidden(self) -> AbstractContextManager[None]:
        """Within, ``variables`` are those of the plain optimizer."""
        return replaced(self, "hiding", True)

    def owns(self, variable: keras.Variable) -> bool:
        return any(variable is own for own in (*self.sums, self.count))


class _Distributed:
    """Mixed into an optimizer's class: joins gradients at ``apply``.

    Keras on JAX calls ``stateless_apply`` and on the other backends ``apply``.
    """

    _distribution: _Distribution | None = None
    """None while Keras makes the optimizer, which asks for ``variables`` already."""
    name: str
    built: bool

    @property
    def _made(self) -> _Distribution:
        assert self._distribution is not None
        return self._distribution

    def build(self, variables: Sequence[Any]) -> None:
        outer = sys._getframe(1).f_locals.get("self")
        if isinstance(outer, keras.optimizers.LossScaleOptimizer) and outer is not self:
            raise ModelError(
                "the loss is scaled around the distributed optimizer",
                expected="DistributedOptimizer(LossScaleOptimizer(optimizer))",
                received="LossScaleOptimizer(DistributedOptimizer(optimizer))",
                hint="each rank would skip steps on its own; keras.config.set_dtype_policy("
                "'mixed_float16') before, or compile(auto_scale_loss=False)",
            )
        super().build(variables)  # type: ignore[misc]
        state = self._made
        if state.passes > 1:
            state.sums = [
                self.add_variable_from_reference(v, name="gradient_sum")  # type: ignore[attr-defined]
                for v in variables
            ]
            state.count = self.add_variable(  # type: ignore[attr-defined]
                shape=(), dtype="int32", initializer="zeros", name="passes"
            )

    @property
    def variables(self) -> list[Any]:
        """All variables; when saved and loaded, those of the plain optimizer."""
        found: list[Any] = super().variables  # type: ignore[misc]
        state = self._distribution
        if state is None or not state.hiding:
            return found
        return [v for v in found if not state.owns(v)]

    def save_own_variables(self, store: object) -> None:
        with self._made.hidden():
            super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: object) -> None:
        with self._made.hidden():
            super().load_own_variables(store)  # type: ignore[misc]

    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None
    ) -> None:
        state = self._made
        if state.inside or not len(grads):
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built:
                with keras.name_scope(self.name):
                    self.build(trainable_variables)
        if state.passes == 1:
            with state.joined():
                super().apply(state.reducer(grads), trainable_variables)  # type: ignore[misc]
        elif keras.backend.backend() == "jax":
            self._apply_values(grads, trainable_variables)
        else:
            self._apply_sums(list(grads), trainable_variables)

    def stateless_apply(
        self, optimizer_variables: list[Any], grads: list[Any], trainable_variables: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """:meth:`apply` as a function of values (JAX)."""
        state = self._made
        base: Any = super()
        if state.passes == 1:
            grads = state.reducer(grads)
            with state.joined():
                return base.stateless_apply(  # type: ignore[no-any-return]
                    optimizer_variables, grads, trainable_variables
                )
        values = list(optimizer_variables)
        places = [_place(self.variables, own) for own in (*state.sums, state.count)]
        for place, gradient in zip(places, grads, strict=False):
            if gradient is not None:
                values[place] = values[place] + as_dense(gradient)
        values[places[-1]] = values[places[-1]] + 1

        def update() -> tuple[list[Any], list[Any]]:
            sums = [None if g is None else values[p] / state.passes
                    for g, p in zip(grads, places, strict=False)]  # fmt: skip
            with state.joined():
                trained, mine = base.stateless_apply(
                    values, state.reducer(sums), trainable_variables
                )
            mine = [0 * v if i in places else v for i, v in enumerate(mine)]
            return list(trained), mine

        full = values[places[-1]] >= state.passes
        result: tuple[list[Any], list[Any]] = keras.ops.cond(
            full, update, lambda: (list(trainable_variables), values)
        )
        return result

    def _apply_sums(
        self, grads: list[Any], trainable_variables: Sequence[keras.Variable] | None
    ) -> None:
        """Adds to the sums; joins and applies them when they are full."""
        state = self._made
        base: Any = super()
        sums = [state.sums[i] for i in self._places(trainable_variables)]
        for total, gradient in zip(sums, grads, strict=True):
            if gradient is not None:
                total.assign_add(keras.ops.cast(as_dense(gradient), total.dtype))
        state.count.assign_add(1)

        def update() -> None:
            means = [None if g is None else total / state.passes
                     for total, g in zip(sums, grads, strict=True)]  # fmt: skip
            with state.joined():
                base.apply(state.reducer(means), trainable_variables)
            for total in sums:
                total.assign(keras.ops.zeros_like(total))
            state.count.assign(0)

        keras.ops.cond(state.count >= state.passes, update, lambda: None)

    def _apply_values(
        self, grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None
    ) -> None:
        """JAX outside of a compiled step: by way of values."""
        tracked = self._trainable_variables  # type: ignore[attr-defined]
        by_place: list[Any] = [None] * len(tracked)
        for gradient, i in zip(grads, self._places(trainable_variables), strict=True):
            by_place[i] = gradient
        trained, mine = self.stateless_apply(
            [v.value for v in self.variables], by_place, [v.value for v in tracked]
        )
        for variable, value in zip([*tracked, *self.variables], [*trained, *mine], strict=True):
            variable.assign(value)

    def _places(self, trainable_variables: Sequence[keras.Variable] | None) -> list[int]:
        if trainable_variables is None:
            return list(range(len(self._made.sums)))
        return [self._get_variable_index(v) for v in trainable_variables]  # type: ignore[attr-defined]


def _place(variables: Sequence[Any], wanted: object) -> int:
    return next(i for i, v in enumerate(variables) if v is wanted)


def _check(optimizer: keras.Optimizer, passes: object) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            "DistributedOptimizer cannot wrap this object", expected="a keras.optimizers.Optimizer",
            received=f"{type(optimizer).__name__}: {optimizer!r}"[:200],
            hint="keras.optimizers.get('adam') makes one of a name",
        )  # fmt: skip
    if is_distributed(optimizer) or is_distributed(getattr(optimizer, "inner_optimizer", None)):
        raise ConfigError(
            "the optimizer is distributed already", expected="a plain optimizer",
            received=f"a DistributedOptimizer of {optimizer.name!r}",
            hint="its gradients would be joined twice",
        )  # fmt: skip
    passes = require_int("backward_passes_per_step", passes, 1)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if passes > 1 and inner.gradient_accumulation_steps:
        raise ConfigError(
            "gradients would be accumulated twice",
            expected="backward_passes_per_step or gradient_accumulation_steps",
            received=f"{passes} and {inner.gradient_accumulation_steps}",
            hint="backward_passes_per_step sends gradients only when a step is applied",
        )


def _made_anew(optimizer: keras.Optimizer, cls: Any) -> Any:
    """A new optimizer of ``cls`` with the settings of ``optimizer``, not its state."""
    try:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            inner = optimizer.inner_optimizer
            return cls(
                _made_anew(inner, type(inner)), initial_scale=optimizer.initial_scale,
                dynamic_growth_steps=optimizer.dynamic_growth_steps, name=optimizer.name,
            )  # fmt: skip
        config = optimizer.get_config()
        rate = optimizer._learning_rate
        if not isinstance(rate, keras.Variable):
            config["learning_rate"] = rate  # a schedule or function: no need to serialize it
        made = cls.from_config(config)
    except Exception as error:
        raise ModelError(
            f"the optimizer {optimizer.name!r} cannot be made anew",
            expected="from_config(get_config()) to give an equal optimizer",
            received=f"{type(error).__name__}: {error}",
            hint="give the optimizer's class a get_config with all of its arguments",
        ) from error
    for name, value in vars(optimizer).items():
        if name.startswith("_exclude_from_weight_decay"):
            setattr(made, name, value)
    return made
