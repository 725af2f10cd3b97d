"""``RowStart``: the values that a row starts from, as a function of seed, table and id."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping

import numpy as np

from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.tables.hashing import GOLDEN, Hashes, Ids, mix64
from sparkdl.weights import FloatArray

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


def _zeros(seeds: Hashes, dim: int) -> FloatArray:
    return np.zeros((len(seeds), dim), np.float32)


_KINDS: dict[str, Callable[..., FloatArray]] = {
    "uniform": _between, "normal": _normal, "constant": _constant, "zeros": _zeros,
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
        text = f"{seed}/{table}".encode()
        key = hashlib.blake2b(text, digest_size=8).digest()
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
