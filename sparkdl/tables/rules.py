"""``RowStart``: the values that a row starts from; ``RowRule``: how a gradient changes it."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.tables.hashing import GOLDEN, Hashes, Ids, mix64
from sparkdl.weights import FloatArray

_BLOCK_BYTES = 1 << 18
"""Bytes of rows that are stepped in one go, so that what NumPy notes of each stays in the cache."""


@dataclass(frozen=True)
class RowRule(ABC):
    """The step of a row: its values w, its state, the gradient g, the learning rate lr."""

    name: ClassVar[str]

    @abstractmethod
    def width(self, dim: int) -> int:
        """Numbers of state that a row of ``dim`` values has."""

    def start_state(self, rows: int, dim: int) -> FloatArray:
        """The state of rows that had no step, of shape (rows, width)."""
        return np.zeros((rows, self.width(dim)), np.float32)

    def step(
        self,
        values: FloatArray,
        state: FloatArray,
        gradients: FloatArray,
        learning_rate: float,
        index: npt.NDArray[np.int64],
    ) -> None:
        """One step of the rows at ``index``, in place.

        Args:
            values: All rows, of shape (rows, dim).
            state: Their state, of shape (rows, width).
            gradients: One for each of ``index``, of shape (index, dim).
            index: Each row once.
        """
        rate = np.float32(learning_rate)
        block = max(1, _BLOCK_BYTES // (4 * max(1, values.shape[1])))
        for start in range(0, len(index), block):
            rows = index[start : start + block]
            w, s = values.take(rows, axis=0), state.take(rows, axis=0)
            self._step(w, s, gradients[start : start + block], rate)
            values[rows] = w
            if s.shape[1]:
                state[rows] = s

    @abstractmethod
    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, rate: np.float32) -> None:
        """Changes ``w`` and ``s``, copies of the rows of a block."""

    @property
    def settings(self) -> dict[str, object]:
        """Name and constants, as JSON has them; see :func:`make_row_rule`."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class SgdRows(RowRule):
    """``w -= lr g``."""

    name: ClassVar[str] = "sgd"

    def width(self, dim: int) -> int:
        return 0

    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, rate: np.float32) -> None:
        w -= rate * g


@dataclass(frozen=True)
class MomentumRows(RowRule):
    """Keras' SGD with momentum, and weight decay if wanted: ``w -= lr d w; m = momentum m - lr g;
    w += m``, with Nesterov's ``w += momentum m - lr g``. A row that a step does not touch stands
    still, its momentum too.
    """

    name: ClassVar[str] = "momentum"
    momentum: float = 0.9
    nesterov: float = 0.0
    weight_decay: float = 0.0

    def width(self, dim: int) -> int:
        return dim

    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, rate: np.float32) -> None:
        if self.weight_decay:
            w -= w * (np.float32(self.weight_decay) * rate)
        change = rate * g
        s *= np.float32(self.momentum)
        s -= change
        w += np.float32(self.momentum) * s - change if self.nesterov else s


@dataclass(frozen=True)
class AdagradRows(RowRule):
    """``a += g²; w -= lr g / sqrt(a + epsilon)``: Keras' Adagrad, exactly."""

    name: ClassVar[str] = "adagrad"
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    def width(self, dim: int) -> int:
        return dim

    def start_state(self, rows: int, dim: int) -> FloatArray:
        return np.full((rows, self.width(dim)), self.initial_accumulator_value, np.float32)

    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, rate: np.float32) -> None:
        change = g * g
        s += change
        np.add(s, np.float32(self.epsilon), out=change)
        np.sqrt(change, out=change)
        np.divide(g, change, out=change)
        change *= rate
        w -= change


@dataclass(frozen=True)
class RowwiseAdagradRows(AdagradRows):
    """``a += mean(g²); w -= lr g / sqrt(a + epsilon)``: one number of state for a row."""

    name: ClassVar[str] = "rowwise_adagrad"

    def width(self, dim: int) -> int:
        return 1

    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, rate: np.float32) -> None:
        s += np.mean(g * g, axis=1, keepdims=True)
        w -= g * (rate / np.sqrt(s + np.float32(self.epsilon)))


@dataclass(frozen=True)
class AdamRows(RowRule):
    """Keras' Adam with the steps of the row itself (lazy Adam): a row that has no gradient in a
    step is not changed by it, and dense Adam would go on moving it.

    State of a row: m, v, its number of steps.
    """

    name: ClassVar[str] = "adam"
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    def width(self, dim: int) -> int:
        return 2 * dim + 1

    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, rate: np.float32) -> None:
        dim = w.shape[1]
        m, v, steps = s[:, :dim], s[:, dim : 2 * dim], s[:, 2 * dim :]
        steps += 1
        m += (g - m) * np.float32(1 - self.beta_1)
        v += (g * g - v) * np.float32(1 - self.beta_2)
        t = steps.astype(np.float64)
        ratio = np.sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t)
        w -= m * (rate * ratio.astype(np.float32)) / (np.sqrt(v) + np.float32(self.epsilon))


@dataclass(frozen=True)
class FtrlRows(RowRule):
    """Keras' Ftrl (McMahan et al., 2013), which computes all rows anew at every step: equal to it
    where rows start from zeros, the learning rate stays and there is no shrinkage.

    ::

        n' = n + g²;  z += g + 2 shrinkage w - (n'^-p - n^-p) / lr w
        w = (clip(z, -l1, l1) - z) / (n'^-p / lr + 2 l2 + beta / lr)

    State of a row: n, z.
    """

    name: ClassVar[str] = "ftrl"
    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    l2_shrinkage_regularization_strength: float = 0.0
    beta: float = 0.0

    def width(self, dim: int) -> int:
        return 2 * dim

    def start_state(self, rows: int, dim: int) -> FloatArray:
        state = np.zeros((rows, 2 * dim), np.float32)
        state[:, :dim] = self.initial_accumulator_value
        return state

    def _step(self, w: FloatArray, s: FloatArray, g: FloatArray, rate: np.float32) -> None:
        dim = w.shape[1]
        n, z = s[:, :dim], s[:, dim:]
        shrinkage = np.float32(2 * self.l2_shrinkage_regularization_strength)
        more = n + g * g
        power = self._power(more)
        z += g + shrinkage * w - (power - self._power(n)) / rate * w
        n[:] = more
        l1 = np.float32(self.l1_regularization_strength)
        twice_l2 = 2 * (self.l2_regularization_strength + self.beta / (2 * float(rate)))
        w[:] = (np.clip(z, -l1, l1) - z) / (power / rate + np.float32(twice_l2))

    def _power(self, n: FloatArray) -> FloatArray:
        if self.learning_rate_power == -0.5:
            return np.sqrt(n)
        return np.power(n, np.float32(-self.learning_rate_power))


ROW_RULES: dict[str, type[RowRule]] = {
    rule.name: rule
    for rule in (SgdRows, MomentumRows, AdagradRows, RowwiseAdagradRows, AdamRows, FtrlRows)
}
"""Every row rule by its name."""


def make_row_rule(rule: str | Mapping[str, object] | RowRule) -> RowRule:
    """The rule of a name, or of settings: ``{'name': 'adagrad', 'epsilon': 1e-10}``.

    Raises:
        UnknownNameError: There is no such rule, or it has no such constant.
        ConfigError: A constant is no number.
    """
    if isinstance(rule, RowRule):
        return rule
    constants = {"name": rule} if isinstance(rule, str) else dict(rule)
    name = str(constants.pop("name", "")).lower()
    if name not in ROW_RULES:
        raise UnknownNameError("row rule", name, ROW_RULES)
    known = {field.name for field in fields(ROW_RULES[name])}
    for constant, value in constants.items():
        if constant not in known:
            raise UnknownNameError(f"constant of the row rule {name!r}", constant, sorted(known))
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(
                f"the constant {constant!r} of the row rule {name!r} is no number",
                expected="a number", received=repr(value),
            )  # fmt: skip
    return ROW_RULES[name](**{c: float(str(v)) for c, v in constants.items()})


_KERAS = {"SGD": "sgd", "Adagrad": "adagrad", "Adam": "adam", "Ftrl": "ftrl"}
_HARMLESS = frozenset(
    {"name", "learning_rate", "ema_momentum", "jit_compile", "is_legacy_optimizer", "is_scheduled"}
)
_WHY = {
    "weight_decay": "it would change all rows at every step, and a step touches a few",
    "momentum": "it would move rows that a step does not touch",
    "nesterov": "it would move rows that a step does not touch",
    "use_ema": "it averages all rows at every step, and a step touches a few",
    "global_clipnorm": "it needs the norm over all tables and ranks before any row is changed",
    "clipnorm": "it needs the norm of the whole table's gradient before any row is changed",
    "clipvalue": "it acts on the gradient of each variable, and a table is none",
    "amsgrad": "rows keep no largest second moment",
    "gradient_accumulation_steps": "a row has one step for each step of the model",
    "loss_scale_factor": "rows take gradients that are not scaled",
}


def row_rule_of(
    name: str, constants: Mapping[str, float | bool | None], *, all_rows: bool = False
) -> RowRule:
    """The row rule that takes the steps of a Keras optimizer.

    Args:
        name: The optimizer's class: ``'Adagrad'``.
        constants: Its config; its learning rate is left to the caller.
        all_rows: Whether each step touches all rows that it is to change, as that of a softmax
            does: SGD may have momentum and weight decay then.

    Raises:
        UnknownNameError: TableRows have no such rule.
        ConfigError: It has an option switched on that rows of a table cannot have.
    """
    if name not in _KERAS:
        raise UnknownNameError("optimizer of a table", name, _KERAS)
    rule = _KERAS[name]
    if all_rows and name == "SGD" and (constants.get("momentum") or constants.get("weight_decay")):
        rule = MomentumRows.name
    known = {field.name for field in fields(ROW_RULES[rule])}
    taken: dict[str, object] = {}
    for option, value in constants.items():
        if option in known:
            taken[option] = float(value or 0) if rule == MomentumRows.name else value
        elif option not in _HARMLESS and value not in (None, False):
            raise ConfigError(
                f"a table cannot be trained by {name} with {option}={value!r}: "
                + _WHY.get(option, "rows of a table have no such option"),
                expected=f"{name} without {option}; " + ", ".join(_KERAS),
                received=f"{option}={value!r}",
                hint=f"give the table an optimizer of its own, such as optimizer={rule!r}",
            )
    return make_row_rule({"name": rule, **taken})


_BLOCK_NUMBERS = 1 << 15
"""Numbers that are made in one go, so that what NumPy notes of each stays in the cache."""

Settings = Mapping[str, object]
"""A name and constants, as JSON has them."""


def _uniform(seeds: Hashes, first: int, columns: int) -> FloatArray:
    """Numbers of 24 bits, evenly spread in [0, 1), for each seed and column from ``first`` on."""
    pairs = -(-columns // 2)
    steps = np.arange(first // 2 + 1, first // 2 + pairs + 1, dtype=np.uint64) * GOLDEN
    halves = mix64(seeds[:, None] + steps).astype("<u8", copy=False).view("<u4")[:, :columns]
    return (halves >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def _between(seeds: Hashes, dim: int, low: float = -0.05, high: float = 0.05) -> FloatArray:
    """Between ``low`` and ``high``, as Keras' ``uniform``."""
    return _uniform(seeds, 0, dim) * np.float32(high - low) + np.float32(low)


def _normal(seeds: Hashes, dim: int, mean: float = 0.0, stddev: float = 0.05) -> FloatArray:
    """Gaussian, as Keras' ``random_normal`` (Box and Muller, 1958)."""
    half = 2 * -(-dim // 4)
    radius = np.sqrt(-2 * np.log1p(-_uniform(seeds, 0, half).astype(np.float64)))
    angle = 2 * np.pi * _uniform(seeds, half, half).astype(np.float64)
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)[:, :dim]
    return (both * stddev + mean).astype(np.float32)


def _constant(seeds: Hashes, dim: int, value: float = 0.0) -> FloatArray:
    return np.full((len(seeds), dim), value, np.float32)


_KINDS: dict[str, Callable[..., FloatArray]] = {
    "uniform": _between, "normal": _normal, "constant": _constant,
    "zeros": lambda seeds, dim: np.zeros((len(seeds), dim), np.float32),
}  # fmt: skip
"""A start's name -> what makes one row for each seed, of shape (seeds, dim), of its constants."""


class RowStart:
    """The start values of one table: equal on every rank, in every order and at every retry.

    Args:
        table: The table's name.
        dim: Numbers of a row.
        settings: A name, or a dict with a name and constants: ``uniform`` (low, high), ``normal``
            (mean, stddev), ``constant`` (value), ``zeros``.
        seed: Another seed gives other values.

    Raises:
        ConfigError: There is no such start, or it has no such constants.
    """

    def __init__(
        self, table: str, dim: int, settings: str | Settings = "uniform", seed: int = 0
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(
                f"table {table!r}: the seed of its start values is a number", expected="an integer",
                received=repr(seed),
            )  # fmt: skip
        self.table, self.dim, self.seed = table, dim, seed
        options = {"name": settings} if isinstance(settings, str) else dict(settings)
        name = str(options.pop("name", ""))
        if name not in _KINDS:
            raise UnknownNameError("start of a table's rows", name, _KINDS)
        known = list(inspect.signature(_KINDS[name]).parameters.values())[2:]
        try:
            constants = {option: float(str(value)) for option, value in options.items()}
            if not constants.keys() <= {one.name for one in known}:
                raise ValueError("a constant that it does not have")
        except ValueError as error:
            raise ConfigError(
                f"table {table!r}: the start {name!r} does not have these constants",
                expected="numbers for " + (", ".join(one.name for one in known) or "nothing"),
                received=repr(options),
            ) from error
        self._name = name
        self._constants = {one.name: constants.get(one.name, one.default) for one in known}
        key = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
        self._key = np.uint64(int.from_bytes(key, "little"))

    @property
    def settings(self) -> dict[str, object]:
        """Name and constants, as JSON has them."""
        return {"name": self._name, **self._constants}

    def rows(self, ids: Ids) -> FloatArray:
        """The start values of ``ids``, of shape (ids, dim)."""
        seeds, found = mix64(mix64(ids) ^ self._key), np.empty((len(ids), self.dim), np.float32)
        make, block = _KINDS[self._name], max(1, _BLOCK_NUMBERS // self.dim)
        for start in range(0, len(ids), block):
            part = slice(start, start + block)
            found[part] = make(seeds[part], self.dim, **self._constants)
        return found
