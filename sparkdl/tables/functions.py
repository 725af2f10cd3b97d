"""Functions of all rows of a table: numbers about them, and changes of them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, DataError, UnknownNameError
from sparkdl.tables.hashing import Ids
from sparkdl.weights import FloatArray

RowFunction = Callable[[Ids, FloatArray], npt.ArrayLike]
"""A function of the ids of some rows, of shape (n,), and their values, of shape (n, dim)."""


@dataclass(frozen=True)
class Statistics:
    """Numbers about all values of a table; those of several ranks can be joined.

    Args:
        rows: How many rows.
        numbers: How many values.
        absolute: The sum of their sizes.
        smallest: The smallest value; infinity of none.
        largest: The largest value; minus infinity of none.
        nonzero: How many are not zero.
    """

    rows: int = 0
    numbers: int = 0
    total: float = 0.0
    absolute: float = 0.0
    squares: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf
    nonzero: int = 0

    @classmethod
    def of(cls, values: FloatArray) -> Statistics:
        """Those of some rows."""
        if not values.size:
            return cls(len(values))
        return cls(
            len(values), values.size, float(values.sum(dtype=np.float64)),
            float(np.abs(values).sum(dtype=np.float64)),
            float(np.square(values, dtype=np.float64).sum()), float(values.min()),
            float(values.max()), int(np.count_nonzero(values)),
        )  # fmt: skip

    def joined(self, other: Statistics) -> Statistics:
        """Those of both."""
        return Statistics(
            self.rows + other.rows, self.numbers + other.numbers, self.total + other.total,
            self.absolute + other.absolute, self.squares + other.squares,
            min(self.smallest, other.smallest), max(self.largest, other.largest),
            self.nonzero + other.nonzero,
        )  # fmt: skip

    def get(self, name: str) -> float:
        """One number by the name that Angel's users know.

        Raises:
            UnknownNameError: There is no such number.
        """
        known = {
            "nrm2": math.sqrt(self.squares),
            "max": self.largest,
            "min": self.smallest,
            "sum": self.total,
            "asum": self.absolute,
            "amax": max(abs(self.smallest), abs(self.largest)),
            "nnz": float(self.nonzero),
            "size": float(self.rows),
        }
        if name not in known:
            raise UnknownNameError("number about a table", name, known)
        return known[name]


_CHANGES: dict[str, tuple[int, Callable[..., FloatArray]]] = {
    "abs": (0, np.abs),
    "add": (1, np.add),
    "clip": (2, np.clip),
    "divide": (1, np.divide),
    "exp": (0, np.exp),
    "fill": (1, np.full_like),
    "log": (0, np.log),
    "multiply": (1, np.multiply),
    "negative": (0, np.negative),
    "power": (1, np.power),
    "sqrt": (0, np.sqrt),
    "square": (0, np.square),
}
"""Name -> how many numbers the change takes, and the change."""


@dataclass(frozen=True)
class TableFunction:
    """A function of the rows, as its name travels to where they are.

    Args:
        name: ``'multiply'``, or ``'module:function'`` of an installed module.
        numbers: Beside the rows.
    """

    name: str
    numbers: tuple[float, ...] = ()

    @classmethod
    def of(cls, function: str | RowFunction, numbers: Sequence[float] = ()) -> TableFunction:
        """A change by its name, or a function of a module.

        Raises:
            UnknownNameError: No change has that name.
            ConfigError: It takes another number of numbers, or the function is no one that other
                processes can import by its name.
        """
        if isinstance(function, str):
            if function not in _CHANGES:
                raise UnknownNameError("change of a table", function, _CHANGES)
            takes, name = _CHANGES[function][0], function
        else:
            takes, name = 0, _imported(function)
        given = tuple(float(number) for number in numbers)
        if len(given) != takes or not all(math.isfinite(number) for number in given):
            raise ConfigError(
                f"the function {name!r} of a table takes other numbers",
                expected=f"{takes} finite numbers", received=repr(given),
            )  # fmt: skip
        return cls(name, given)

    def change(self, ids: Ids, values: FloatArray) -> FloatArray:
        """The new values of some rows.

        Raises:
            DataError: They have another shape, or one is not finite.
        """
        if ":" in self.name:
            found = np.asarray(self._function()(ids, values), np.float32)
        else:
            with np.errstate(all="ignore"):  # what is not finite is an error below
                numbers = [np.float32(number) for number in self.numbers]
                found = np.asarray(_CHANGES[self.name][1](values, *numbers), np.float32)
        if found.shape != values.shape or not np.isfinite(found).all():
            raise DataError(
                f"the function {self.name!r} makes no rows of a table",
                expected=f"finite numbers of shape {values.shape}",
                received=f"shape {found.shape}, "
                f"{int(np.count_nonzero(~np.isfinite(found)))} numbers that are not finite",
            )
        return found

    def measure(self, ids: Ids, values: FloatArray) -> npt.NDArray[np.float64]:
        """The function's number or numbers about some rows."""
        return np.asarray(self._function()(ids, values), np.float64)

    def _function(self) -> RowFunction:
        module, _, name = self.name.partition(":")
        try:
            found: RowFunction = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the function {self.name!r} cannot be imported where the rows of the table are",
                expected="a module that is installed on all hosts",
                received=f"{type(error).__name__}: {error}",
                hint="spark.sparkContext.addPyFile sends a module to the executors",
            ) from error
        return found


def _imported(function: RowFunction) -> str:
    """The name by which other processes import a function."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found = None
    if module not in (None, "__main__") and name.isidentifier():
        found = getattr(importlib.import_module(str(module)), name, None)
    if found is not function:
        raise ConfigError(
            "this function cannot be called where the rows of a table are",
            expected="a function of a module that is installed on all hosts",
            received=f"{module}.{name}",
            hint="put it into a module: its code is not sent, only its name",
        )
    return f"{module}:{name}"
