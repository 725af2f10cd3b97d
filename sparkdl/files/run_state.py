"""``RunState``: what training goes on from, in one format for every place that needs it.

Checkpoints, ranks that rejoin, stages that start again and the results of a fit all hold the same
five things. Nothing in the bytes is executed or unpickled when they are read.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ProtocolError
from sparkdl.weights import FloatArray, Layout

_MAGIC, _VERSION = b"SDRS", 2
_HEADERS = {1: struct.Struct("<4sHxxqQQQ"), _VERSION: struct.Struct("<4sHxxqQQQQ")}
"""Version -> magic, version, epoch, and the sizes of the parts; the first had nothing carried."""


class StoredBytes:
    """Bytes in a temporary file that nobody else sees, and that ends with this object."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  (closed with this object)

    @property
    def nbytes(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def read(self, place: slice) -> npt.NDArray[np.uint8]:
        content = os.pread(self.file.fileno(), place.stop - place.start, place.start)
        return np.frombuffer(content, np.uint8)

    def __bytes__(self) -> bytes:
        return self.read(slice(0, self.nbytes)).tobytes()


Blob = Sequence[bytes | memoryview | npt.NDArray[np.uint8] | StoredBytes]
"""Bytes in several places, one after the other."""


class StatefulOptimizer(Protocol):
    """The optimizer of a learner, as far as its state is concerned."""

    def state(self) -> bytes: ...

    def load_state(self, state: bytes) -> None: ...


class Stateful(Protocol):
    """A learner, as far as its state is concerned."""

    @property
    def layout(self) -> Layout: ...

    def read_weights(self, out: FloatArray) -> None: ...

    def write_weights(self, flat: FloatArray) -> None: ...

    def weights_within(self, place: slice) -> Iterator[tuple[slice, FloatArray]]:
        """Copies of the values in one part of the flat buffer, variable by variable."""

    @property
    def optimizer(self) -> StatefulOptimizer: ...

    def carried_state(self) -> bytes: ...

    def load_carried_state(self, state: bytes) -> None: ...


@dataclass(frozen=True)
class RunState:
    """The state of a run between two epochs (of a rejoin: between two rounds).

    Args:
        epoch: Epochs that are done.
        weights: Flat float32 buffer of the model's layout; empty where a server holds the weights.
        optimizer: The Keras optimizer's variables, as its ``state`` in a learner returns them.
        rule: What an all-reduce rule keeps beside the optimizer (an outer momentum).
        carried: The model's variables that ``weights`` does not hold (integers, seeds, float64), as
            a learner's ``carried_state`` returns them.

    >>> RunState.from_bytes(RunState(3, np.ones(2, np.float32), b'momentum').to_bytes()).epoch
    3
    """

    epoch: int
    weights: FloatArray = field(default_factory=lambda: np.empty(0, np.float32), repr=False)
    optimizer: bytes = field(default=b"", repr=False)
    rule: bytes = field(default=b"", repr=False)
    carried: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, learner: Stateful, epoch: int, rule: bytes = b"") -> RunState:
        """All that ``learner`` has now."""
        weights = np.empty(learner.layout.size, np.float32)
        learner.read_weights(weights)
        return cls(epoch, weights, learner.optimizer.state(), rule, learner.carried_state())

    def load_into(self, learner: Stateful) -> None:
        """Sets the learner's variables and optimizer state, each if this state has it."""
        if self.carried:  # before the weights, which decide where both have a variable
            learner.load_carried_state(self.carried)
        if self.weights.size:
            learner.write_weights(self.weights)
        if self.optimizer:
            learner.optimizer.load_state(self.optimizer)

    def pieces(self, rule: StoredBytes | None = None) -> list[bytes | memoryview | StoredBytes]:
        """Header, weights, optimizer state, rule state, carried state; little-endian.

        Args:
            rule: In the place of the state's own, if it is too large for the memory.
        """
        weights = np.ascontiguousarray(self.weights, np.float32).view(np.uint8)
        rule_bytes = len(self.rule) if rule is None else rule.nbytes
        sizes = weights.size, len(self.optimizer), rule_bytes, len(self.carried)
        header = _HEADERS[_VERSION].pack(_MAGIC, _VERSION, self.epoch, *sizes)
        return [header, weights.data, self.optimizer, rule or self.rule, self.carried]

    def to_bytes(self) -> bytes:
        """All of :meth:`pieces` in one."""
        return b"".join(map(bytes, self.pieces()))

    @classmethod
    def from_bytes(cls, content: bytes | bytearray) -> RunState:
        """The counterpart of :meth:`to_bytes`; the weights are a view of ``content``.

        Raises:
            ProtocolError: The bytes are no run state, of another version, or cut off.
        """
        version = int.from_bytes(content[4:6], "little")
        form = _HEADERS.get(version, _HEADERS[_VERSION])
        try:
            magic, _, epoch, *sizes = form.unpack_from(content)
        except struct.error:
            magic, epoch, sizes = b"", 0, [0]
        whole = form.size + sum(sizes)
        known = magic == _MAGIC and version in _HEADERS
        if not known or len(content) != whole or sizes[0] % 4:
            raise ProtocolError(
                "these bytes are no whole run state",
                expected=f"{_MAGIC!r}, version {_VERSION}, {whole} bytes",
                received=f"{magic!r}, version {version}, {len(content)} bytes",
                hint="the file is truncated, or another version of sparkdl wrote it",
            )
        weights = np.frombuffer(content, np.float32, sizes[0] // 4, form.size)
        edges = list(accumulate(sizes, initial=form.size))[1:]
        view = memoryview(content)
        return cls(epoch, weights, *(bytes(view[a:b]) for a, b in pairwise(edges)))
