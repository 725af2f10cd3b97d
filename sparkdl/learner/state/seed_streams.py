"""The random numbers that the layers of a model draw in training: a stream for each rank.

Keras keeps the state of a ``SeedGenerator`` (one in each ``Dropout``, whatever set its seed) as a
variable ``[seed, draws so far]``, and each draw is a function of the two. Ranks with equal states
would draw equal masks. Here rank ``r`` draws from

    [seed XOR key(r), draws],   key(0) = 0

so that each rank has a stream of its own, the same in every run with these seeds, and one worker
has Keras'. What travels and comes back to the driver is ``[seed, draws]``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import keras

Array = npt.NDArray[Any]
Pairs = list[tuple[Any, Array]]
_MOST_DRAWS = 1024
"""More than a step draws from one generator."""


def stream_key(rank: int) -> int:
    """31 bits that differ for every two ranks; 0 for rank 0.

    >>> stream_key(0), len({stream_key(rank) for rank in range(10_000)})
    (0, 10000)
    """
    key = rank & 0x7FFFFFFF
    for shift, factor in ((16, 0x45D9F3B), (15, 0x2C1B3C6D), (16, 1)):
        key = (key ^ (key >> shift)) * factor & 0x7FFFFFFF
    return key


def seed_states(model: keras.Model) -> list[Any]:
    """The states of all seed generators in a model, each once."""
    layers = model._flatten_layers()
    return list({id(g.state): g.state for one in layers for g in one._seed_generators}.values())


class SeedStreams:
    """The seeds of one model on one rank.

    Args:
        model: Built.
        read: The present values of variables.
        write: Sets variables.
    """

    def __init__(
        self,
        model: keras.Model,
        read: Callable[[Sequence[Any]], list[Array]],
        write: Callable[[Pairs], None],
    ) -> None:
        known = {id(variable) for variable in model.variables}
        self._seeds = [state for state in seed_states(model) if id(state) in known]
        self._read, self._write = read, write
        self._key, self._ranks = 0, 1
        self._marked: list[Array] = []
        self._place: list[int] = []
        self.number: int | None = None
        """A number of the present step, for a generator that is no part of the model."""

    def loaded(self) -> None:
        """The model was loaded: its seeds are those of the driver."""
        self._key = 0

    def take(self, rank: int, num_ranks: int) -> None:
        """From now on draws the stream of ``rank``."""
        key, self._ranks = stream_key(rank), num_ranks
        changed, self._key = self._key ^ key, key
        if changed:
            self._write([(s, _keyed(v, changed)) for s, v in self._values()])

    @property
    def alone(self) -> bool:
        """Whether this is the only rank."""
        return self._ranks == 1

    def begin_step(self) -> None:
        """Makes the step's number of what a rank that enters amid an epoch knows, too."""
        if self._place:
            self._place[-1] += 1
            self.number = zlib.crc32(repr(self._place).encode())

    def travelling(self, variable: keras.Variable, value: Array) -> Array:
        """The value of a variable as it travels: a seed as the driver has it."""
        is_seed = self._key and any(variable is seed for seed in self._seeds)
        return _keyed(value, self._key) if is_seed else value

    def mark(self, seed: int = 0, epoch: int = 0, step: int = 0) -> None:
        """Notes the draws so far: an epoch begins, or is entered after ``step`` steps."""
        values = [value for _, value in self._values()]
        self._place = [self._key, *(int(value[0]) for value in values), seed, epoch, step]
        self._marked = values if self._ranks > 1 else []

    def at(self, variable: keras.Variable, value: Array, steps: int, wanted: int) -> Array:
        """A variable's value as it was, or will be, ``wanted`` steps after :meth:`mark`.

        Args:
            variable: A seed's state counts the draws of these steps; any other is as it is.
            value: Its value now.
            steps: Steps of this rank since then.
            wanted: Steps of all ranks.
        """
        for seed, marked in zip(self._seeds, self._marked, strict=False):
            if seed is variable and steps > 0 and value[0] == marked[0]:
                drawn, rest = divmod(int(value[1]) - int(marked[1]), steps)
                return value if rest else _counted(marked, drawn * wanted)
        return value

    def fill(self, steps: int, steps_of_all: int) -> None:
        """Counts the draws of all ranks' steps, of which this rank has taken fewer.

        So all ranks have as many draws as one process on the global batches, and a run that begins
        again from one rank's state draws what an undisturbed one does.

        Args:
            steps: Steps of this rank since :meth:`mark`.
            steps_of_all: Steps of all ranks since then.
        """
        if self._marked and 0 < steps < steps_of_all:
            self._write([(s, self.at(s, v, steps, steps_of_all)) for s, v in self._values()])

    def skip(self, steps: int) -> None:
        """Leaves out what an earlier attempt may have drawn in ``steps`` steps."""
        self._write([(s, _counted(v, steps * _MOST_DRAWS)) for s, v in self._values()])

    def kept(self) -> Pairs:
        """The seeds, to be set again after an evaluation of a part of the rows.

        Nothing with one worker, whose evaluation draws as Keras' does.
        """
        return self._values() if self._ranks > 1 else []

    def _values(self) -> Pairs:
        return list(zip(self._seeds, map(np.array, self._read(self._seeds)), strict=True))


def _keyed(value: Array, key: int) -> Array:
    result = np.array(value)
    result[0] = np.bitwise_xor(value[0], value.dtype.type(key))
    return result


def _counted(value: Array, draws: int) -> Array:
    result = np.array(value)
    bits = 8 * value.dtype.itemsize
    result[1] = (int(value[1]) + draws) % (1 << (bits - (value.dtype.kind == "i")))
    return result
