"""Commits to a round whose gradients are slices in part: taken apart, checked, put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from sparkdl.codecs import Compression
from sparkdl.coordinator.blobs import Assembly
from sparkdl.errors import ProtocolError
from sparkdl.ps.store.rounds import Payload
from sparkdl.training.slices import Slices, pack, unpack
from sparkdl.transport.frames import ByteArray, Flag, Message
from sparkdl.weights import FloatArray, Layout

MAX_BYTES = 1 << 30
"""Bound of one rank's commit with slices."""


class SlicedCommits:
    """The slices of the ranks, from :func:`sparkdl.training.slices.pack`.

    A commit that is larger than a connection's buffer comes in chunks before the request that
    commits it, which has no body then.

    Args:
        beside: The dense values go elsewhere (to shards): commits have slices alone.
    """

    def __init__(
        self, layout: Layout, compression: Compression | None, *, beside: bool = False
    ) -> None:
        self._layout, self._compression, self._beside = layout, compression, beside
        trained = [s for s in layout.slots if s.offset < layout.trained_size]
        self._widths = {place: slot.width for place, slot in enumerate(trained)}
        self._assemblies: dict[int, Assembly] = {}
        self._large: dict[int, ByteArray] = {}

    def put(self, message: Message, *, wanted: bool) -> None:
        """Takes one chunk of a large commit.

        Args:
            wanted: Whether the run's rule takes slices.

        Raises:
            ProtocolError: It does not, or the commit is too large, or a chunk is out of order.
        """
        if not wanted:
            raise _refused("slices of gradients", "a rule that answers with the mean", "another")
        assembly = self._assemblies.setdefault(message.rank, Assembly("a gradient", MAX_BYTES))
        whole = assembly.put(message)
        if whole is not None:
            self._large[message.rank] = whole

    def forget(self, rank: int) -> None:
        """Frees what ``rank`` has sent."""
        self._assemblies.pop(rank, None)
        self._large.pop(rank, None)

    def decoded(self, message: Message, scratch: FloatArray) -> Message:
        """A commit with slices whose dense part is float32 without the sliced variables.

        Args:
            scratch: A buffer of the whole layout, which may be where the message's body lies.
        """
        body = self._large.get(message.rank) if message.total else message.body
        if body is None or (message.total and body.size != message.total):
            raise _refused("a commit with slices", f"a body of {message.total} bytes", "another")
        message = replace(message, body=body, total=0)
        if not message.flags & Flag.ENCODED:
            return message
        if self._compression is None:
            raise _refused("an encoded commit", "float32 values: the run has no codec", "a payload")
        head, slices = unpack(body.copy())
        self._compression.commits.decode(head, scratch)
        places = [s.place for s in slices]
        dense = np.empty(self._layout.without(places).size, np.float32)
        self._layout.copy_without(places, scratch, dense)
        return replace(message, body=pack(dense.view(np.uint8), slices))

    def values(
        self, message: Message, others: Iterable[Payload]
    ) -> tuple[FloatArray, list[Slices]]:
        """The dense values of a commit, and its slices.

        Raises:
            ProtocolError: They do not fit the model, or what another rank has sent.
        """
        head, slices = unpack(np.empty(0, np.uint8) if message.body is None else message.body)
        places = [s.place for s in slices]
        expected = next((tuple(s.place for s in p.slices) for p in others), tuple(places))
        fits = all(self._widths.get(s.place) == s.rows.shape[1] for s in slices)
        if not places or not fits or len(set(places)) < len(places):
            raise _refused(f"the slices of rank {message.rank}", "those of the model", f"{places}")
        if message.rows and tuple(places) != expected:
            raise _refused(f"the slices of rank {message.rank}", f"of {expected}", f"of {places}")
        size = 0 if self._beside else 4 * self._layout.without(places).size
        if head.size != size:
            raise _refused("the dense part of a gradient", f"{size} bytes", f"{head.size} bytes")
        return head.view(np.float32), slices

    def check_dense(self, message: Message, others: Iterable[Payload]) -> None:
        """Refuses a gradient without slices where another rank's has some."""
        places = next(([s.place for s in p.slices] for p in others if p.slices), None)
        if places and message.rows:
            raise _refused(f"the gradient of rank {message.rank}", f"slices of {places}", "none")


def _refused(what: str, expected: str, received: str) -> ProtocolError:
    return ProtocolError(
        f"{what} cannot be taken",
        expected=expected,
        received=received,
        hint="does the model compute otherwise on some batches, or on some executors?",
    )
