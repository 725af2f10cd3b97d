"""How workers keep in step without a server: one all-reduce of gradients per step.

NumPy and protocols only: the learner and the communicator come by argument. The weights live on
the workers; they start equal, get equal gradients, and so stay equal to the bit.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sparkdl.collective.arithmetic import half_dtype
from sparkdl.collective.communicator import Communicator, Handle
from sparkdl.errors import ConfigError
from sparkdl.weights import FloatArray, Layout

PART_BYTES = 16 << 20
"""Gradients travel in parts of about this size, each as soon as the backward pass has made it."""
_FLAGS = 2
_ALIGNMENT = 64


class GradientLearner(Protocol):
    """A learner that takes a step in two halves.

    ``gradients`` writes the batch's mean gradient into the trained segment of ``out`` and its
    running statistics, after the batch, into the averaged segment. ``apply_gradients`` does the
    optimizer step with the trained segment and takes the statistics from the averaged one.
    ``train_reducing`` does both for each batch of a window, with a reducer in between.
    """

    def read_weights(self, out: FloatArray) -> None: ...

    def write_weights(self, flat: FloatArray) -> None: ...

    def optimizer_state(self) -> bytes: ...

    def load_optimizer_state(self, state: bytes) -> None: ...

    def gradients(self, window: Any, out: FloatArray) -> None: ...

    def apply_gradients(self, flat: FloatArray) -> None: ...

    def train_reducing(self, window: Any, reducer: Any) -> None: ...

    def skip_reducing(self, reducer: Any) -> None: ...


class AllReduceGradientSynchronizer:
    """Each step: the row-weighted mean of all ranks' gradients, then one optimizer step on each.

    With ``n_i`` rows on rank ``i``, ``g = Σ n_i g_i / Σ n_i``: what one process computes on the
    global batch. BatchNorm statistics, in the same buffer, are averaged alike. A rank that has run
    out of batches contributes nothing, blocks nobody, and takes every step with the others.

    It is the *reducer* that a learner calls between gradient and step: ``begin`` for each of
    ``parts`` in their order (last layers first, as the backward pass makes them), then
    ``finish``. Large models have several parts, which travel while the next is computed.

    Args:
        communicator: Connected; used by this synchronizer alone while it trains.
        layout: Of the flat buffer ``[gradient | statistics]``.
        wire: ``'float16'`` or ``'bfloat16'``: what gradients travel as (statistics do not); None
            for float32, which alone is exact.
        part_bytes: See :data:`PART_BYTES`.

    Raises:
        ConfigError: The communicator cannot reduce ``wire``.
    """

    def __init__(
        self,
        communicator: Communicator,
        layout: Layout,
        *,
        wire: str | None = None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        in_graph = bool(getattr(communicator, "in_graph", False))
        if in_graph and wire == "bfloat16":
            raise ConfigError(
                "Horovod cannot reduce bfloat16",
                expected="compression=None or 'fp16' with Horovod",
                received="compression='bf16'",
                hint="communicator='builtin' can",
            )
        self.communicator = communicator
        self.layout = layout
        self.wire = wire
        # the last elements: 1 where there is a batch, and 1 where a rank was told to stop; their
        # means tell all ranks at the same step
        self._whole = _aligned_zeros(layout.size + _FLAGS)
        self.buffer: FloatArray = self._whole[:-_FLAGS]
        apart = wire is not None or layout.size_bytes > part_bytes
        self.parts = parts_of(layout, part_bytes, apart=apart)
        self.in_graph = self if in_graph else None
        self.rows = 0
        self.scale = 1.0
        self.stop_wanted = False
        self.stop_agreed = False
        self._has_gradient: list[bool] | None = None
        self._handles: list[tuple[slice, npt.NDArray[Any], Handle]] = []

    def start(
        self, learner: GradientLearner, root: int = 0, scale: float = 1.0, steps: int = 0
    ) -> None:
        """Gives every rank the root's weights and optimizer state.

        Args:
            learner: This rank's.
            root: The rank whose state all take.
            scale: Most rows per batch of any rank, where the exchange is inside the step.
            steps: Steps of an epoch; of no use here.
        """
        self.scale = scale
        take_root_state(self.communicator, learner, self.buffer, root)

    def end_epoch(self, learner: GradientLearner) -> None:
        """Nothing to do: the ranks are equal after every step."""

    def save_state(self, learner: GradientLearner) -> bytes:
        """Nothing beyond the learner's own state."""
        return b""

    def end_run(self, learner: GradientLearner) -> None:
        """Nothing to do: the last step was an exchange."""

    def close(self) -> None:
        """Nothing to free."""

    # -- whole windows -------------------------------------------------------------------------

    def train(self, learner: GradientLearner, window: Any) -> None:
        """Trains every batch of ``window``, each a step of all ranks.

        Raises:
            WaitTimeoutError: Some ranks did not come in time; they are named.
            TransportError: A rank is gone.
        """
        with self._explained():
            learner.train_reducing(window, self)

    def skip(self, learner: GradientLearner) -> None:
        """Takes part in one step of the others without a batch."""
        with self._explained():
            learner.skip_reducing(self)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            cause = self.communicator.explain(error)
            if cause is error:
                raise
            raise cause from error

    # -- the reducer ---------------------------------------------------------------------------

    def begin(self, part: int, values: FloatArray) -> None:
        """Hands over part ``part`` of this rank's gradient; it may travel in the background.

        Args:
            part: Index in ``parts``; each step hands over all of them in order.
            values: Read until :meth:`finish`; may lie in ``buffer`` itself.
        """
        place = self.parts[part]
        target = self._whole[place]
        sent: npt.NDArray[Any] = values
        if part == 0:
            self._whole[-2], self._whole[-1] = float(self.rows > 0), float(self.stop_wanted)
            if not np.may_share_memory(values, target):
                target[: values.size] = values
            sent = target
        if len(self.parts) == 1 and self.wire is None:
            self.communicator.all_reduce(target, "weighted", weight=self.rows, out=target)
            return
        if self.wire is not None and place.start < self.layout.trained_size:
            sent = target = sent.astype(half_dtype(self.wire))
        handle = self.communicator.all_reduce_async(sent, "weighted", weight=self.rows, out=target)
        self._handles.append((place, target, handle))

    def finish(self) -> bool:
        """Waits for all parts: ``buffer`` then holds the mean over all ranks.

        Returns:
            Whether any rank had rows; if none had, there is nothing to apply.
        """
        for place, joined, handle in self._handles:
            handle.wait()
            if joined.dtype != np.float32:
                self._whole[place] = joined
        self._handles.clear()
        self.agree_on_stop(float(self._whole[-1]))
        return bool(self._whole[-2] > 0)

    def agree_on_stop(self, value: float) -> None:
        """Takes the joined stop flag of an exchange inside the compiled step."""
        self.stop_agreed = self.stop_agreed or value > 0

    def agree_on_gradients(self, mine: list[bool]) -> list[bool]:
        """Which trained variables have a gradient; see :class:`sparkdl.protocols.Reducer`."""
        if self._has_gradient is None:
            told = self.communicator.all_gather(np.array(mine, np.uint8))
            known = [values for values in told if values.size]
            self._has_gradient = np.any(known, axis=0).tolist() if known else []
        return self._has_gradient

    def step(self, learner: GradientLearner, batch: Any | None, rows: int) -> bool:
        """One step of all ranks together, half by half.

        Args:
            learner: Gives gradients, takes their mean.
            batch: What ``learner.gradients`` takes; None if this rank has no more rows.
            rows: Rows in ``batch``, 0 without one.

        Returns:
            Whether any rank had rows; if none had, nothing is applied.

        Raises:
            ConfigError: Rows without a batch, or a batch without rows.
        """
        if (batch is None) != (rows == 0):
            raise ConfigError(
                "a step without rows is one without a batch",
                expected="batch=None exactly if rows == 0",
                received=f"rows={rows}, batch is None: {batch is None}",
            )
        if batch is not None:
            learner.gradients(batch, self.buffer)
        self.rows = rows
        for part, place in enumerate(self.parts):
            self.begin(part, self._whole[place])
        if not self.finish():
            return False
        learner.apply_gradients(self.buffer)
        return True


def take_root_state(
    communicator: Communicator, learner: GradientLearner, buffer: FloatArray, root: int
) -> None:
    """Gives every rank the root's weights and optimizer state; ``buffer`` is scratch memory."""
    learner.read_weights(buffer)
    communicator.broadcast(buffer, root, out=buffer)
    mine = communicator.rank == root
    learner.write_weights(buffer)
    state = np.frombuffer(learner.optimizer_state() if mine else b"", np.uint8)
    given = communicator.all_gather(state)[root]
    if not mine:
        learner.load_optimizer_state(given.tobytes())


def parts_of(layout: Layout, part_bytes: int, *, apart: bool = False) -> list[slice]:
    """Slices of ``[gradient | statistics | flags]`` in the order in which they are reduced.

    Each holds whole variables; the first one has the end of the buffer, with statistics and flags
    (alone if ``apart``: they are few, and come before any gradient).

    >>> layout = Layout.of([('a', (4,), 'float32'), ('b', (4,), 'float32')], [])
    >>> parts_of(layout, 16)
    [slice(4, 10, None), slice(0, 4, None)]
    """
    stop = layout.size + _FLAGS
    edges = [stop]
    if apart and layout.trained_size:
        edges.append(layout.trained_size)
    for slot in reversed([s for s in layout.slots if s.offset < layout.trained_size]):
        if (edges[-1] - slot.offset) * 4 >= part_bytes and slot.offset:
            edges.append(slot.offset)
    edges.append(0)
    return [slice(a, b) for b, a in itertools.pairwise(edges)]


def _aligned_zeros(size: int) -> FloatArray:
    """Zeros at an address that TensorFlow takes as it is, without a copy."""
    room = np.zeros(size + _ALIGNMENT // 4, np.float32)
    first = -room.ctypes.data % _ALIGNMENT // 4
    return room[first : first + size]
