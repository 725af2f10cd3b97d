"""``VariableChanges``: values that the driver's callbacks have given to variables of the model.

They travel as bytes from the driver through the coordinator to every worker. Nothing in the bytes
is executed or unpickled when they are read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ProtocolError
from sparkdl.weights import FloatArray

_HEADER = struct.Struct("<4sI")
_MAGIC = b"SDVC"
Values = Mapping[int, npt.NDArray[Any]]


@dataclass(frozen=True)
class VariableChanges:
    """New values of some variables.

    Args:
        model: Number of a variable in the model's ``variables`` -> its value.
        optimizer: The same for the optimizer's ``variables``.
        offsets: Number of a variable of the model that the workers exchange -> where it begins in
            the flat buffer of the weights.

    >>> changes = VariableChanges({3: np.ones(2, np.int32)}, {0: np.array(5)})
    >>> VariableChanges.from_bytes(changes.to_bytes()).model[3].tolist()
    [1, 1]
    """

    model: Values = field(default_factory=dict)
    optimizer: Values = field(default_factory=dict)
    offsets: Mapping[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.model or self.optimizer)

    @property
    def keys(self) -> frozenset[tuple[str, int]]:
        return frozenset(
            [("model", i) for i in self.model] + [("optimizer", i) for i in self.optimizer]
        )

    @property
    def weights(self) -> dict[int, FloatArray]:
        """Place in the flat buffer -> the values there."""
        pairs = self.offsets.items()
        return {offset: np.asarray(self.model[i], np.float32).ravel() for i, offset in pairs}

    def write_into(self, flat: FloatArray) -> None:
        """Sets those that lie in the flat buffer of the weights."""
        for offset, values in self.weights.items():
            flat[offset : offset + values.size] = values

    def followed_by(self, later: VariableChanges) -> VariableChanges:
        """These, and then ``later``."""
        return VariableChanges(
            {**self.model, **later.model}, {**self.optimizer, **later.optimizer},
            {**self.offsets, **later.offsets},
        )  # fmt: skip

    def to_bytes(self) -> bytes:
        """A header that says what follows, then the values; little-endian."""
        told: list[list[Any]] = []
        parts: list[bytes] = []
        for owner, values in (("model", self.model), ("optimizer", self.optimizer)):
            for number, value in values.items():
                # NumPy has no name for the dtypes of others (bfloat16), which widen without loss.
                plain = value.astype(np.float32) if value.dtype.kind == "V" else value
                offset = self.offsets.get(number, -1) if owner == "model" else -1
                plain = np.ascontiguousarray(plain).astype(plain.dtype.newbyteorder("<"))
                told.append([owner, number, plain.dtype.str, list(value.shape), offset])
                parts.append(plain.tobytes())
        head = json.dumps(told).encode()
        return b"".join((_HEADER.pack(_MAGIC, len(head)), head, *parts))

    @classmethod
    def from_bytes(cls, content: bytes) -> VariableChanges:
        """The counterpart of :meth:`to_bytes`.

        Raises:
            ProtocolError: The bytes are something else, or cut off.
        """
        try:
            magic, size = _HEADER.unpack_from(content)
            if magic != _MAGIC:
                raise ValueError(f"they begin with {magic!r}")
            place = _HEADER.size + size
            told = json.loads(content[_HEADER.size : place])
            found: dict[str, dict[int, npt.NDArray[Any]]] = {"model": {}, "optimizer": {}}
            offsets: dict[int, int] = {}
            for owner, number, name, shape, offset in told:
                kind = np.dtype(str(name))
                if kind.hasobject:
                    raise ValueError(f"dtype {name}")
                value = np.frombuffer(content, kind, math.prod(shape), place).reshape(shape)
                place += value.nbytes
                found[owner][int(number)] = value
                if offset >= 0:
                    offsets[int(number)] = int(offset)
            if place != len(content):
                raise ValueError(f"{len(content) - place} bytes are left")
        except (ValueError, TypeError, KeyError, struct.error) as error:
            raise ProtocolError(
                "these bytes are no changes of variables",
                expected="a header, and the values that it names",
                received=f"{type(error).__name__}: {error}"[:200],
            ) from error
        return cls(found["model"], found["optimizer"], offsets)
