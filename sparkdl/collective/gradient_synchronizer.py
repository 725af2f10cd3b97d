"""One all-reduce of gradients per step: how ``mode='allreduce'`` trains unless a rule is given.

The weights live on the ranks. They are equal at the start, all ranks apply the same gradients to
them, and so they stay equal to the bit. NumPy and protocols only: the learner and the communicator
come by argument.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.codecs.quantized import to_summable
from sparkdl.collective.arithmetic import reduce_in_order, reduction_factors, require_not_bfloat16
from sparkdl.collective.communicator import Communicator, Pending
from sparkdl.errors import ModelError
from sparkdl.files.run_state import RunState
from sparkdl.training.changes import VariableChanges
from sparkdl.training.finite import FiniteCheck
from sparkdl.training.learning import BatchStack, SharedLearner
from sparkdl.training.parts import FLAGS, PART_BYTES, PORTION_BYTES, parts_of
from sparkdl.training.phases import current_clock
from sparkdl.training.slices import Slices, join_slices, pack, unpack
from sparkdl.training.syncing import StepSynchronizer
from sparkdl.weights import FloatArray, Layout, NotFiniteError

Gather = Callable[[npt.NDArray[np.uint8]], Sequence[npt.NDArray[np.uint8]]]
"""Takes a rank's bytes, and returns those of all ranks; none of a rank without a batch."""
_ALIGNMENT = 64
_BESIDE_SLICES_BYTES = 256 << 10
"""Bytes of the dense gradients of all ranks up to which they travel with the slices: one exchange
in place of two, each of which waits for the other ranks."""


class AllReduceGradientSynchronizer(StepSynchronizer):
    """Each step: the row-weighted mean of all ranks' gradients, then one optimizer step on each.

    With ``n_i`` rows on rank ``i`` the gradient is ``g = Σ n_i g_i / Σ n_i``: what one process
    computes on the batches of all ranks together. BatchNorm statistics, in the same buffer, are
    averaged with the same weights. A rank that has no batch left takes part in every step with
    weight 0.

    This object is the :class:`~sparkdl.training.learning.Reducer` that a learner calls between
    gradient and optimizer step: ``begin`` for each of ``parts`` in their order (the last layers
    first, as the backward pass computes them), then ``finish``. The gradient of a large model has
    several parts, that of a large variable, too; each is sent while the next is computed. They are
    sent in this order on all ranks: a step ends with its last part, so no other order ends it
    sooner. A part that fails ends the step on all ranks before anything is applied. Gradients of
    embeddings that travel as slices are gathered beside it, in float32 and in the order of the
    ranks; a small dense rest travels with them.

    Args:
        communicator: Connected; used by this synchronizer alone while it trains.
        layout: Layout of the flat buffer ``[gradient | statistics]``.
        wire: ``'float16'`` or ``'bfloat16'``: the type in which gradients are sent (statistics are
            not converted); None for float32, the only exact one.
        part_bytes: Bytes of its largest part; None: see :data:`sparkdl.training.parts.PART_BYTES`.
        check: Looks at the gradients before they are sent, except inside the compiled step; None:
            nobody does.

    Raises:
        ConfigError: The communicator cannot reduce ``wire``.
    """

    def __init__(
        self,
        communicator: Communicator,
        layout: Layout,
        *,
        wire: str | None = None,
        part_bytes: int | None = None,
        check: FiniteCheck | None = None,
    ) -> None:
        if communicator.in_graph:
            require_not_bfloat16(wire)
        self.communicator = communicator
        self.layout = layout
        self.wire = wire
        usual = max(PART_BYTES, PORTION_BYTES * communicator.size)
        self._part_bytes = usual if part_bytes is None else part_bytes
        self._sliced: tuple[int, ...] = ()
        self.slices: Sequence[Slices] = ()
        self._lay_out(layout)
        self.in_graph = self if communicator.in_graph else None
        self._check = check or FiniteCheck("ignore", layout.trained_size)
        self.skips, self.refused = self._check.skips, False
        self._clock = current_clock()
        self.checks_gradients = self._check.looks
        self._not_finite: NotFiniteError | None = None
        self._scaled = False
        self._statistics = np.zeros(layout.size - layout.trained_size, np.float32)
        self._sent_rows = 0
        self._step = -1  # of the present stack
        self._gather: Gather | None = None
        self.rows = 0
        self.scale = 1.0
        self.stop_wanted = False
        self.stop_agreed = False
        self._kinds: list[int] | None = None
        self._two_forms: ModelError | None = None
        self._num_terms: int | None = None
        self._handles: list[tuple[slice, npt.NDArray[Any], Pending[npt.NDArray[Any]]]] = []

    def _lay_out(self, dense: Layout) -> None:
        # Two flags end the buffer: 1 if this rank has a batch, and 1 if it was told to stop. Their
        # means tell all ranks at the same step whether any rank has set them.
        self._dense = dense
        self._whole = _aligned_zeros(dense.size + FLAGS)
        self.buffer: FloatArray = self._whole[:-FLAGS]
        apart = self.wire is not None or dense.size_bytes > self._part_bytes
        # Horovod's operations inside a compiled step take whole tensors.
        cuts = not self.communicator.in_graph
        self.parts = parts_of(dense, self._part_bytes, apart=apart, cuts=cuts)

    def start(
        self, learner: SharedLearner, root: int = 0, scale: float = 1.0, steps: int = 0
    ) -> None:
        self.scale = scale
        take_root_state(self.communicator, learner, self.buffer, root)
        self._statistics[...] = self.buffer[self.layout.trained_size :]

    def take_changes(self, learner: SharedLearner, changes: VariableChanges) -> None:
        """Takes the learner's statistics again."""
        if changes.offsets:
            weights = np.empty(self.layout.size, np.float32)
            learner.read_weights(weights)
            self._statistics[...] = weights[self.layout.trained_size :]

    def train(
        self, learner: SharedLearner, stack: BatchStack, gather: Gather | None = None
    ) -> None:
        """Trains every batch of ``stack``, each a step of all ranks.

        Args:
            gather: Another exchange of each step, with which what is small travels; not within
                Horovod's operations.

        Raises:
            WaitTimeoutError: Some ranks did not come in time; they are named.
            TransportError: A rank is gone.
            NotFiniteError: A gradient was not finite, with ``on_nan='raise'``.
        """
        self._scaled, self._step, self._not_finite = learner.optimizer.scales_loss, -1, None
        if self.in_graph is not None:
            self.checks_gradients = self._check.looks and not self._scaled
        self._gather = gather
        with explained(self._explain):
            learner.train_reducing(stack, self)
        self._check.settle()
        if self._not_finite is not None:
            raise self._not_finite

    def skip(self, learner: SharedLearner, gather: Gather | None = None) -> None:
        self._gather = gather
        with explained(self._explain):
            learner.skip_reducing(self)

    def _explain(self, error: Exception) -> BaseException:
        return self._two_forms or self.communicator.explain(error)

    @property
    def takes_slices(self) -> bool:
        """Not where Horovod's operations join dense gradients inside the compiled step."""
        return self.in_graph is None

    def send_as_slices(self, places: Sequence[int]) -> None:
        if tuple(places) == self._sliced:
            return
        self._sliced = tuple(places)
        self._lay_out(self.layout.without(self._sliced))

    def begin(self, part: int) -> None:
        """Hands over part ``part`` of the gradient in ``buffer``; it may be sent in the background.

        Args:
            part: Index in ``parts``; each step hands over all of them in order.
        """
        place = self.parts[part]
        values, target = self.buffer[place], self._whole[place]  # without the flags, and with them
        if part == 0:
            self._sent_rows, self.refused = self.rows, False
            self._step += 1
        # What may be left out is looked at as a whole, before a part of it has gone out.
        looked, first = (self.buffer, 0) if self.skips else (values, place.start)
        if self._sent_rows and (part == 0 or not self.skips):
            first += self.layout.trained_size - self._dense.trained_size
            slices = self.slices if self.skips else ()
            self.refused = not self._check.notes(looked, first, self._scaled, self._step, slices)
            if self.refused:
                self._sent_rows = 0
                looked[...] = 0
        if part == 0:
            self._whole[-2], self._whole[-1] = float(self._sent_rows > 0), float(self.stop_wanted)
        if self._beside_slices:
            return
        if len(self.parts) == 1 and self.wire is None:
            with self._clock.within("exchange", any_thread=True):
                self.communicator.all_reduce(target, "weighted", weight=self._sent_rows, out=target)
            return
        sent: npt.NDArray[Any] = target
        if self.wire is not None and place.start < self._dense.trained_size:
            sent = to_summable(target, self.wire)
        handle = self.communicator.all_reduce_async(
            sent, "weighted", weight=self._sent_rows, out=sent
        )
        self._handles.append((place, sent, handle))

    @property
    def _beside_slices(self) -> bool:
        """Whether what is dense travels in :meth:`finish`, with the slices or another exchange."""
        small = self._whole.nbytes * self.communicator.size <= _BESIDE_SLICES_BYTES
        beside = bool(self._sliced) or self._gather is not None
        return beside and small and len(self.parts) == 1 and self.wire is None

    def finish(self) -> bool:
        """Waits for all parts: ``buffer`` then holds the mean over all ranks."""
        handles, self._handles = self._handles, []
        for place, joined, handle in handles:
            with self._clock.within("exchange", any_thread=True):
                handle.wait()
            if joined.dtype != np.float32:
                self._whole[place] = joined
        if self._sliced or self._gather is not None:
            self._gather_slices()
        self.agree_on_stop(float(self._whole[-1]))
        trained = bool(self._whole[-2] > 0)
        if trained:
            self._statistics[...] = self.buffer[self._dense.trained_size :]
        else:  # a step without a batch, or whose batches were all refused
            self.buffer[self._dense.trained_size :] = self._statistics
        return trained

    def _gather_slices(self) -> None:
        if self._sliced and self._sent_rows and not self.skips:
            none = self.buffer[:0]
            if not self._check.notes(none, 0, self._scaled, self._step, self.slices):
                self._sent_rows = 0
        if not self._sent_rows:
            self.slices = [Slices.none(i, self.layout.slots[i].width) for i in self._sliced]
        rows = np.array([self._sent_rows], np.float64).view(np.uint8)
        dense = self._whole.view(np.uint8) if self._beside_slices else rows[:0]
        mine = pack(np.concatenate([rows, dense]), self.slices)
        gather = self._gather or self.communicator.all_gather
        with self._clock.within("exchange", any_thread=True):
            found = gather(mine)
        no_head = np.zeros(rows.size + dense.size, np.uint8)
        gathered = [unpack(data) if data.size else (no_head, []) for data in found]
        weights = [float(head[: rows.size].view(np.float64)[0]) for head, _ in gathered]
        if dense.size:
            each = [head[rows.size :].view(np.float32) for head, _ in gathered]
            reduce_in_order(each, reduction_factors("weighted", weights), np.add, self._whole)
        parts = [(weight, slices) for weight, (_, slices) in zip(weights, gathered, strict=True)]
        self.slices = join_slices(parts) or self.slices

    def agree_on_stop(self, value: float) -> None:
        """Takes the joined stop flag of an exchange inside the compiled step."""
        self.stop_agreed = self.stop_agreed or value > 0

    def tell_not_finite(self, batch: int, own: bool) -> None:
        """Keeps it until the compiled call has returned; see
        :class:`sparkdl.training.learning.InGraph`."""
        self._not_finite = NotFiniteError(batch, joined=not own)

    def agree_on_gradients(self, mine: list[int]) -> list[int]:
        """Which trained variables have a gradient; see :class:`sparkdl.training.learning.Reducer`.

        Raises:
            ModelError: A gradient is dense on one rank, and travels as slices on another.
        """
        if self._kinds is None:
            gathered = self.communicator.all_gather(np.array(mine, np.uint8))
            known = [values for values in gathered if values.size]
            self._kinds = np.max(known, axis=0).tolist() if known else []
            for place, kinds in enumerate(zip(*known, strict=True)):
                if {1, 2} <= {int(kind) for kind in kinds}:
                    self._two_forms = ModelError(
                        f"the gradient of {self.layout.slots[place].name!r} has two forms",
                        expected="a dense one on all workers, or rows with indices on all",
                        received=f"{[('none', 'dense', 'rows')[int(k)] for k in kinds]} by worker",
                        hint="does the model compute otherwise on some batches?",
                    )
                    raise self._two_forms
        return self._kinds

    @property
    def num_workers(self) -> int:
        return self.communicator.size

    def agree_on_terms(self, mine: int) -> int:
        """How many terms have denominators; see :class:`sparkdl.training.learning.Reducer`."""
        if self._num_terms is None:
            known = self.communicator.all_gather(np.array([mine], np.int64))
            self._num_terms = 0 if len(known) == 1 else max(0, *(int(n[0]) for n in known))
        return self._num_terms

    def add_up(self, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sums over all ranks; see :class:`sparkdl.training.learning.Reducer`."""
        with self._clock.within("exchange", any_thread=True):
            return self.communicator.all_reduce(numbers)

    def is_sound(self) -> bool:
        """Whether the gradient in ``buffer`` would be taken."""
        first = self.layout.trained_size - self._dense.trained_size
        return self._check.is_sound(self.buffer, first, self._scaled, self.slices)


@contextlib.contextmanager
def explained(explain: Callable[[Exception], BaseException]) -> Iterator[None]:
    """Replaces an error by its cause: what our code raises inside a compiled call comes out of it
    as an error of the framework."""
    try:
        yield
    except Exception as error:
        cause = explain(error)
        if cause is error:
            raise
        raise cause from error


def take_root_state(
    communicator: Communicator, learner: SharedLearner, buffer: FloatArray, root: int
) -> None:
    """Gives every rank the root's variables and optimizer state; ``buffer`` is scratch memory."""
    learner.read_weights(buffer)
    communicator.broadcast(buffer, root, out=buffer)
    mine = communicator.rank == root
    state = RunState(0, optimizer=learner.optimizer.state(), carried=learner.carried_state())
    given = communicator.all_gather(np.frombuffer(state.to_bytes() if mine else b"", np.uint8))
    if not mine:
        RunState.from_bytes(given[root].tobytes()).load_into(learner)
    learner.write_weights(buffer)


def _aligned_zeros(size: int) -> FloatArray:
    """Zeros at an address that TensorFlow can use without a copy."""
    room = np.zeros(size + _ALIGNMENT // 4, np.float32)
    first = -room.ctypes.data % _ALIGNMENT // 4
    return room[first : first + size]
