"""One round of a rule that waits for all: the payloads of its ranks, and their mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparkdl.slices import Slices
from sparkdl.transport.frames import Message
from sparkdl.weights import FloatArray

BLOCK = 1 << 16
"""Elements reduced at a time: two blocks fit the second-level cache."""


@dataclass
class Payload:
    """One rank's part in a round; ``values`` is the buffer it arrived in.

    Where gradients of some variables are ``slices``, ``values`` are those of the others.
    """

    connection: int
    values: FloatArray
    message: Message
    slices: Sequence[Slices] = ()


class Round:
    """The payloads of one round, left in the buffers they arrived in."""

    def __init__(self) -> None:
        self.payloads: dict[int, Payload] = {}

    @property
    def rows(self) -> int:
        return sum(p.message.rows for p in self.payloads.values())

    @property
    def contributions(self) -> list[Payload]:
        """Those of ranks with rows, in the order of the ranks."""
        return [p for _, p in sorted(self.payloads.items()) if p.message.rows]

    def mean(self, out: FloatArray) -> None:
        """Writes the row-weighted mean into ``out``: ranks in order, so bit for bit repeatable.

        Ranks with 0 rows contribute nothing. ``out`` may be one of the payloads: a block is
        written only after it was read from all. Only two blocks are allocated.
        """
        parts = [(p.values, p.message.rows) for p in self.contributions]
        total = float(sum(rows for _, rows in parts))
        if len(parts) == 1:
            if parts[0][0] is not out:
                np.copyto(out, parts[0][0])
            return
        weights = [np.float32(rows / total) for _, rows in parts]
        scratch = np.empty((2, min(BLOCK, out.size)), np.float32)
        apart = not any(np.may_share_memory(values, out) for values, _ in parts[1:])
        for start in range(0, out.size, BLOCK):
            block = slice(start, min(start + BLOCK, out.size))
            total_block, part = scratch[:, : block.stop - block.start]
            if apart:
                total_block = out[block]
            np.multiply(parts[0][0][block], weights[0], out=total_block)
            for (values, _), weight in zip(parts[1:], weights[1:], strict=True):
                np.multiply(values[block], weight, out=part)
                total_block += part
            if not apart:
                out[block] = total_block
