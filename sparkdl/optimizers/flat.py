"""Optimizers on flat float32 vectors: SGD, Adagrad, RMSprop, Adam and AdamW, without Keras.

Each takes the same steps as the Keras optimizer of its name with the same options. A parameter
server runs them on its center, and a rank of a sliced all-reduce on its slice of the weights.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import numpy as np

from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.optimizers.blocks import add_scaled, each_block, run_compiled
from sparkdl.settings.values import (
    POSITIVE_OR_NONE,
    Options,
    option,
    require,
    require_fraction,
    require_not_negative,
    require_positive,
)
from sparkdl.weights import FloatArray

State = dict[str, Any]


@dataclass(frozen=True)
class FlatOptimizer(Options, abc.ABC):
    """Base of the optimizers: frozen options; what changes lives in the state of :meth:`init`.

    They treat elements one by one. So a step on a slice of the weights, with its slice of the
    state, gives what a step on the whole would give there.

    Args:
        learning_rate: Step size; None: the caller's at each step.
    """

    learning_rate: float | None = option(None, POSITIVE_OR_NONE)

    keras_class: ClassVar[str] = ""
    """Name of the Keras optimizer that takes the same steps."""

    def init(self, weights: FloatArray) -> State:
        """The state before the first step: a flat dict of float32 arrays, ints or floats."""
        return {name: np.zeros_like(weights) for name in self.keras_slots()}

    @abc.abstractmethod
    def step(
        self, weights: FloatArray, gradient: FloatArray, state: State, rate: float, out: FloatArray
    ) -> None:
        """One step along ``-gradient`` into ``out``, which may be ``weights``.

        Changes ``state``; ``gradient`` stays as it is. ``rate`` is the learning rate.
        """

    def keras_slots(self) -> dict[str, tuple[str, float]]:
        """The attributes of the Keras optimizer of the same steps that have the same state.

        Returns:
            Each array of the state -> the attribute with Keras' variables, and a factor: Keras'
            value is this one times the factor.
        """
        return {}

    def keras_config(self) -> dict[str, Any]:
        return {"class_name": self.keras_class, "config": dict(vars(self))}


def take_nesterov_step(
    weights: FloatArray,
    change: FloatArray,
    decayed: FloatArray,
    factor: float,
    momentum: float,
    out: FloatArray,
    *,
    total: FloatArray | None = None,
) -> None:
    """``m = momentum · m + factor · total;  out = weights + factor · change + momentum · m``.

    Of an optimizer ``change`` is a gradient and ``factor`` the negative learning rate; of a rule
    it is what workers have trained.

    Args:
        change: Change of the same length; stays as it is.
        decayed: ``momentum · m``, which takes one pass less than ``m`` itself; changed in place.
        momentum: In (0, 1).
        total: What the momentum takes in, where that is not ``change``.
    """
    decay, scale = np.float32(momentum), np.float32(factor)
    alone = total is None
    if alone and run_compiled(_nesterov, weights, out, (change, decayed), (decay, scale)):
        return

    def body(part: slice, step: FloatArray, *summed: FloatArray) -> None:
        m = decayed[part]
        np.multiply(change[part], scale, out=step)
        if total is None:
            np.add(m, step, out=m)
        else:
            np.multiply(total[part], scale, out=summed[0])
            np.add(m, summed[0], out=m)
        np.multiply(m, decay, out=m)
        np.add(step, m, out=step)
        np.add(weights[part], step, out=out[part])

    each_block(weights.size, body, 1 if alone else 2)


def _nesterov(
    weights: FloatArray, change: FloatArray, decayed: FloatArray, decay: float, scale: float
) -> None:
    for i in range(weights.size):
        step = change[i] * scale
        decayed[i] = (decayed[i] + step) * decay
        weights[i] = weights[i] + (step + decayed[i])


def take_adagrad_step(
    weights: FloatArray,
    sent: FloatArray,
    totals: FloatArray,
    factor: float,
    out: FloatArray,
    *,
    gradient_per_sent: float = 1.0,
    within_root: float = 0.0,
    beside_root: float = 0.0,
) -> None:
    """``a += g²;  out = weights + factor · g / (√(a + within_root) + beside_root)``.

    Args:
        sent: The gradient ``g`` times a constant; stays as it is.
        totals: ``a``, the sums of squared gradients; changed in place.
        factor: The negative learning rate.
        gradient_per_sent: ``g`` is ``sent`` times this.
        within_root: An epsilon where Keras adds it.
        beside_root: An epsilon where the papers add it.
    """
    scale, rate = np.float32(gradient_per_sent), np.float32(factor)
    within, beside = np.float32(within_root), np.float32(beside_root)
    if run_compiled(_adagrad, weights, out, (sent, totals), (scale, rate, within, beside)):
        return

    def body(part: slice, step: FloatArray, *scaled: FloatArray) -> None:
        total = totals[part]
        g = np.multiply(sent[part], scale, out=scaled[0]) if scaled else sent[part]
        np.multiply(g, g, out=step)
        np.add(total, step, out=total)
        if within_root:
            np.add(total, within, out=step)
            np.sqrt(step, out=step)
        else:
            np.sqrt(total, out=step)
        if beside_root:
            np.add(step, beside, out=step)
        np.divide(g, step, out=step)
        np.multiply(step, rate, out=step)
        np.add(weights[part], step, out=out[part])

    each_block(weights.size, body, 1 if gradient_per_sent == 1.0 else 2)


def _adagrad(
    weights: FloatArray,
    sent: FloatArray,
    totals: FloatArray,
    scale: float,
    rate: float,
    within: float,
    beside: float,
) -> None:
    for i in range(weights.size):
        g = sent[i] * scale
        totals[i] = totals[i] + g * g
        weights[i] = weights[i] + g / (np.sqrt(totals[i] + within) + beside) * rate


@dataclass(frozen=True)
class FlatSGD(FlatOptimizer):
    """Gradient descent, with momentum or Nesterov momentum if asked.

    ::

        v = momentum · v - rate · g
        weights += v                          (momentum)
        weights += momentum · v - rate · g    (Nesterov)

    Args:
        momentum: In [0, 1); 0 is plain gradient descent.

    Reference: Sutskever, Martens, Dahl and Hinton, 2013, "On the importance of initialization and
    momentum in deep learning" (ICML).
    """

    momentum: float = option(0.0, require_fraction)
    nesterov: bool = False

    name: ClassVar[str] = "sgd"
    keras_class: ClassVar[str] = "SGD"

    def keras_slots(self) -> dict[str, tuple[str, float]]:
        if not self.momentum:
            return {}
        return {"velocity": ("momentums", 1.0 / self.momentum if self.nesterov else 1.0)}

    def step(
        self, weights: FloatArray, gradient: FloatArray, state: State, rate: float, out: FloatArray
    ) -> None:
        if not self.momentum:
            add_scaled(weights, gradient, -rate, out)
            return
        velocities: FloatArray = state["velocity"]
        if self.nesterov:
            take_nesterov_step(weights, gradient, velocities, -rate, self.momentum, out)
            return
        step_per_gradient, momentum = np.float32(-rate), np.float32(self.momentum)

        def body(part: slice, step: FloatArray) -> None:
            velocity = velocities[part]
            np.multiply(gradient[part], step_per_gradient, out=step)
            np.multiply(velocity, momentum, out=velocity)
            np.add(velocity, step, out=velocity)
            np.add(weights[part], velocity, out=out[part])

        each_block(weights.size, body, 1)


@dataclass(frozen=True)
class FlatAdagrad(FlatOptimizer):
    """Adagrad: ``a += g²; weights -= rate · g / √(a + epsilon)``.

    Args:
        initial_accumulator_value: Where ``a`` starts.

    Reference: Duchi, Hazan and Singer, 2011, "Adaptive Subgradient Methods" (JMLR 12).
    """

    initial_accumulator_value: float = option(0.1, require_not_negative)
    epsilon: float = option(1e-7, require_positive)

    name: ClassVar[str] = "adagrad"
    keras_class: ClassVar[str] = "Adagrad"

    def init(self, weights: FloatArray) -> State:
        return {"accumulator": np.full_like(weights, self.initial_accumulator_value)}

    def keras_slots(self) -> dict[str, tuple[str, float]]:
        return {"accumulator": ("_accumulators", 1.0)}

    def step(
        self, weights: FloatArray, gradient: FloatArray, state: State, rate: float, out: FloatArray
    ) -> None:
        totals: FloatArray = state["accumulator"]
        take_adagrad_step(weights, gradient, totals, -rate, out, within_root=self.epsilon)


@dataclass(frozen=True)
class FlatRMSprop(FlatOptimizer):
    """RMSprop.

    ::

        v = rho · v + (1 - rho) · g²
        a = rho · a + (1 - rho) · g                                (centered only)
        s = rate · g / √(v - a² + epsilon)                         (a = 0 unless centered)
        m = momentum · m + s;   weights -= m                        (m = s without momentum)

    Args:
        rho: Decay of the means, in [0, 1).
        centered: Whether the gradients' variance takes the place of their mean square.

    Reference: Tieleman and Hinton, 2012, "Lecture 6.5: RMSprop" (Coursera).
    """

    rho: float = option(0.9, require_fraction)
    momentum: float = option(0.0, require_fraction)
    epsilon: float = option(1e-7, require_positive)
    centered: bool = False

    name: ClassVar[str] = "rmsprop"
    keras_class: ClassVar[str] = "RMSprop"

    def keras_slots(self) -> dict[str, tuple[str, float]]:
        slots = {"mean_square": ("_velocities", 1.0)}
        if self.centered:
            slots["mean"] = ("_average_gradients", 1.0)
        if self.momentum:
            slots["momentum"] = ("_momentums", -1.0)  # Keras subtracts it
        return slots

    def step(
        self, weights: FloatArray, gradient: FloatArray, state: State, rate: float, out: FloatArray
    ) -> None:
        factor, epsilon = np.float32(-rate), np.float32(self.epsilon)
        rho, rest = np.float32(self.rho), np.float32(1.0 - self.rho)
        momentum = np.float32(self.momentum)
        means: FloatArray | None = state.get("mean")
        velocities: FloatArray | None = state.get("momentum")
        squares: FloatArray = state["mean_square"]
        plain, scalars = means is None and velocities is None, (rho, rest, epsilon, factor)
        if plain and run_compiled(_rmsprop, weights, out, (gradient, squares), scalars):
            return

        def body(part: slice, step: FloatArray, square: FloatArray) -> None:
            g, mean_square = gradient[part], squares[part]
            np.multiply(mean_square, rho, out=mean_square)
            np.multiply(g, rest, out=step)
            np.multiply(step, g, out=square)
            np.add(mean_square, square, out=mean_square)
            if means is None:
                np.add(mean_square, epsilon, out=square)
            else:
                mean = means[part]
                np.multiply(mean, rho, out=mean)
                np.add(mean, step, out=mean)
                np.multiply(mean, mean, out=square)
                np.subtract(mean_square, square, out=square)
                np.add(square, epsilon, out=square)
            np.sqrt(square, out=square)
            np.divide(g, square, out=step)
            np.multiply(step, factor, out=step)
            if velocities is not None:
                velocity = velocities[part]
                np.multiply(velocity, momentum, out=velocity)
                np.add(velocity, step, out=velocity)
                step = velocity
            np.add(weights[part], step, out=out[part])

        each_block(weights.size, body, 2)


def _rmsprop(
    weights: FloatArray,
    gradient: FloatArray,
    squares: FloatArray,
    rho: float,
    rest: float,
    epsilon: float,
    factor: float,
) -> None:
    for i in range(weights.size):
        squares[i] = squares[i] * rho + gradient[i] * rest * gradient[i]
        weights[i] = weights[i] + gradient[i] / np.sqrt(squares[i] + epsilon) * factor


@dataclass(frozen=True)
class FlatAdam(FlatOptimizer):
    """Adam, in the efficient order of section 2 of the paper, as Keras has it.

    ::

        m = beta_1 · m + (1 - beta_1) · g
        v = beta_2 · v + (1 - beta_2) · g²
        weights -= rate · √(1 - beta_2^t) / (1 - beta_1^t) · m / (√v + epsilon)

    With ``amsgrad`` the largest ``v`` so far takes the place of ``v`` in the last line.

    Args:
        beta_1: Decay of the mean, in [0, 1).
        beta_2: Decay of the mean square, in [0, 1).
        amsgrad: Whether the step of a coordinate never grows because its ``v`` has shrunk.

    References: Kingma and Ba, 2015, "Adam: A Method for Stochastic Optimization", arXiv:1412.6980;
    Reddi, Kale and Kumar, 2018, "On the Convergence of Adam and Beyond" (ICLR).
    """

    beta_1: float = option(0.9, require_fraction)
    beta_2: float = option(0.999, require_fraction)
    epsilon: float = option(1e-7, require_positive)
    amsgrad: bool = False

    name: ClassVar[str] = "adam"
    keras_class: ClassVar[str] = "Adam"

    def init(self, weights: FloatArray) -> State:
        """Both moments, divided by ``1 - beta`` (which saves two operations), and the step."""
        return {**super().init(weights), "steps": 0}

    def keras_slots(self) -> dict[str, tuple[str, float]]:
        slots = {
            "scaled_mean": ("_momentums", 1.0 - self.beta_1),
            "scaled_mean_square": ("_velocities", 1.0 - self.beta_2),
        }
        if self.amsgrad:
            slots["scaled_peak"] = ("_velocity_hats", 1.0 - self.beta_2)
        return slots

    def step(
        self, weights: FloatArray, gradient: FloatArray, state: State, rate: float, out: FloatArray
    ) -> None:
        shrink = self.weight_decay if isinstance(self, FlatAdamW) else 0.0
        state["steps"] += 1
        steps = state["steps"]
        means: FloatArray = state["scaled_mean"]
        squares: FloatArray = state["scaled_mean_square"]
        # With m = (1 - beta_1) M and v = (1 - beta_2) V the step is alpha · M / (√V + eps).
        root = np.sqrt(1.0 - self.beta_2)
        corrected = rate * np.sqrt(1.0 - self.beta_2**steps) / (1.0 - self.beta_1**steps)
        alpha = np.float32(-corrected * (1.0 - self.beta_1) / root)
        epsilon = np.float32(self.epsilon / root)
        beta_1, beta_2 = np.float32(self.beta_1), np.float32(self.beta_2)
        keep = np.float32(1.0 - rate * shrink)
        scalars = (beta_1, beta_2, epsilon, alpha, keep)
        peaks: FloatArray | None = state.get("scaled_peak")
        if peaks is None and run_compiled(_loop, weights, out, (gradient, means, squares), scalars):
            return

        def body(part: slice, step: FloatArray) -> None:
            g, mean, square = gradient[part], means[part], squares[part]
            np.multiply(g, g, out=step)
            np.multiply(square, beta_2, out=square)
            np.add(square, step, out=square)
            if peaks is not None:
                square = np.maximum(peaks[part], square, out=peaks[part])
            np.sqrt(square, out=step)
            np.add(step, epsilon, out=step)
            np.multiply(mean, beta_1, out=mean)
            np.add(mean, g, out=mean)
            np.divide(mean, step, out=step)
            np.multiply(step, alpha, out=step)
            if shrink:
                np.multiply(weights[part], keep, out=out[part])
                np.add(out[part], step, out=out[part])
            else:
                np.add(weights[part], step, out=out[part])

        each_block(weights.size, body, 1)


def _loop(
    weights: FloatArray,
    gradient: FloatArray,
    means: FloatArray,
    squares: FloatArray,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    alpha: float,
    keep: float,
) -> None:
    for i in range(weights.size):
        squares[i] = squares[i] * beta_2 + gradient[i] * gradient[i]
        means[i] = means[i] * beta_1 + gradient[i]
        step = means[i] / (np.sqrt(squares[i]) + epsilon) * alpha
        weights[i] = weights[i] * keep + step


@dataclass(frozen=True)
class FlatAdamW(FlatAdam):
    """Adam with decoupled weight decay: ``weights *= 1 - rate · weight_decay``, then Adam's step.

    Decay acts on every trained coordinate; flat weights know no variable names to leave out.

    Reference: Loshchilov and Hutter, 2019, "Decoupled Weight Decay Regularization",
    arXiv:1711.05101.
    """

    weight_decay: float = option(0.004, require_not_negative)

    name: ClassVar[str] = "adamw"
    keras_class: ClassVar[str] = "AdamW"

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = self.learning_rate or 0.0
        require(
            rate * self.weight_decay < 1, self.name, "weight_decay",
            "learning_rate · weight_decay below 1", self.weight_decay,
        )  # fmt: skip


Made = TypeVar("Made", bound=FlatOptimizer)

FLAT_CLASSES = (FlatSGD, FlatAdagrad, FlatRMSprop, FlatAdam, FlatAdamW)
"""Every optimizer on flat vectors."""
# Entries of a config that do not change the step.
_HARMLESS = frozenset(
    {"name", "ema_momentum", "is_legacy_optimizer", "jit_compile", "is_scheduled"}
)
_SWITCHED_OFF = (None, False)


def optimizer_from_config(
    config: Mapping[str, Any],
    classes: Iterable[type[Made]],
    *,
    where: str,
    hint: str,
    beside: Collection[str] = (),
) -> Made:
    """The counterpart of a serialized Keras optimizer among ``classes``.

    Args:
        config: ``{'class_name': 'Adam', 'config': {...}}``, as ``keras.optimizers.serialize`` and
            ``{'class_name': type(o).__name__, 'config': o.get_config()}`` give it. A learning rate
            schedule becomes None: the caller's current learning rate.
        classes: Classes to choose from, by the Keras class whose steps each takes. Keras' Adam
            with weight decay becomes AdamW.
        beside: Options that the caller sees to.

    Raises:
        UnknownNameError: No such optimizer in ``classes``.
        ConfigError: An option that cannot be honoured is switched on.

    Example:
        >>> config = {'class_name': 'SGD', 'config': {'learning_rate': 0.5}}
        >>> optimizer_from_config(config, FLAT_CLASSES, where='here', hint='')
        FlatSGD(learning_rate=0.5, momentum=0.0, nesterov=False)
    """
    class_name = str(config.get("class_name", "")).rpartition(">")[2]
    known_classes = {cls.keras_class: cls for cls in classes}
    if class_name not in known_classes:
        raise UnknownNameError(f"optimizer {where}", class_name, known_classes)
    options = dict(config.get("config", {}))
    chosen = class_name
    if (
        class_name == "Adam"
        and options.get("weight_decay") is not None
        and "AdamW" in known_classes
    ):
        chosen = "AdamW"
    make = known_classes[chosen]
    known = {field.name for field in fields(make)}
    taken: dict[str, Any] = {}
    for name, value in options.items():
        if name == "learning_rate" and isinstance(value, Mapping):
            taken[name] = None
        elif name in known:
            taken[name] = value
        elif name not in _HARMLESS and name not in beside and value not in _SWITCHED_OFF:
            raise ConfigError(
                f"optimizer {class_name!r} {where}: option {name!r} is not supported",
                expected="options " + ", ".join(sorted(known)), received=f"{name}={value!r}",
                hint=hint.format(option=name),
            )  # fmt: skip
    return make(**taken)


def without_scaling(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the optimizer inside a ``LossScaleOptimizer``; of another one its own."""
    if str(optimizer.get("class_name", "")).rpartition(">")[2] != "LossScaleOptimizer":
        return optimizer
    inner: Mapping[str, Any] = optimizer["config"]["inner_optimizer"]
    return inner
