"""The center, and the two ways a rule changes it: one commit, or the mean of a round."""

from __future__ import annotations

import numpy as np

from sparkdl.codecs import Compression, Sections
from sparkdl.coordinator.group import Worker
from sparkdl.errors import ProtocolError
from sparkdl.ps.store.rounds import Round
from sparkdl.rules.rule import Commit, Rule, State
from sparkdl.training.slices import Slices, join_slices, pack
from sparkdl.transport.frames import ByteArray, Flag, Message
from sparkdl.weights import FloatArray, Layout


class Center:
    """The flat weights on the server and the rule that changes them.

    The rule sees the trained section; the averaged section is averaged here, never summed.
    For a blocking rule on gradients the workers hold the weights: ``weights`` is then their
    last snapshot, and ``result`` the mean gradient of the last round (``encoded``: as a codec's
    payload, where there is one; ``sliced``: as it is sent where gradients of some variables are
    slices).

    Args:
        layout: What is where in the buffer.
        weights: The initial center; taken as it is, not copied, and written to.
        rule: How commits change it.
        compression: The run's compression, applied to a round's mean gradient once for all ranks,
            so that they stay in step, however each of them is connected.
    """

    def __init__(
        self,
        layout: Layout,
        weights: FloatArray,
        rule: Rule,
        compression: Compression | None = None,
    ) -> None:
        layout.check(weights)
        self._layout = layout
        self._trained = slice(0, layout.trained_size)
        self._averaged = slice(layout.trained_size, layout.size)
        self.weights = weights
        self.rule = rule
        self.on_workers = rule.blocking and rule.payload == "gradient"
        self.result = np.zeros_like(weights) if self.on_workers else weights
        self._state: State = rule.init(weights[self._trained])
        self._sections: Sections | None = None
        self.encoded: ByteArray = np.empty(0, np.uint8)
        self.sliced: ByteArray | None = None
        if compression is not None and self.on_workers:
            self._sections = compression.replies
            self._compressor = self._sections.codec.compressor(layout.trained_size, seed=0)

    def require_on_workers(self) -> None:
        """Refuses a snapshot where this server itself holds the weights."""
        if not self.on_workers:
            raise ProtocolError(
                "SNAPSHOT is for rules that wait and take gradients",
                expected="a rule whose workers hold the weights",
                received=f"rule {self.rule.name!r}",
                hint="with other rules the server itself holds the weights",
            )

    def apply(self, values: FloatArray, commit: Commit) -> None:
        """One asynchronous commit. The caller holds the lock, unless the rule needs none."""
        weights = self.weights[self._trained]
        self.rule.update(weights, values[self._trained], self._state, commit, weights)
        if self._averaged.start == self._averaged.stop:
            return
        share = np.float32(1.0 / commit.num_workers)
        statistics, sent = self.weights[self._averaged], values[self._averaged]
        if self.rule.payload == "delta":
            statistics += sent * share
        else:
            statistics += (sent - statistics) * share

    def pulled(self, rank: int) -> None:
        """Tells the rule that ``rank`` gets the center as it is now."""
        self.rule.pulled(self.weights[self._trained], self._state, rank)

    def apply_round(self, round_: Round, clock: int) -> None:
        """The row-weighted mean of a round; leaves ``result`` as what all ranks get back."""
        rows = round_.rows
        if rows == 0:
            return
        payloads = sorted(round_.payloads.items())
        messages: list[Message] = [payload.message for _, payload in payloads]
        contributions = round_.contributions
        if contributions[0].slices:
            parts = [(p.message.rows, p.slices) for p in contributions]
            self._apply_slices(round_, join_slices(parts))
            return
        self.sliced = None
        if self.on_workers and self.rule.replies_mean:
            round_.mean(self.result)
            self._encode_result()
            return
        mean = payloads[0][1].values  # reduced in place: nobody needs this payload afterwards
        round_.mean(mean)
        commit = Commit(
            worker=payloads[0][0], num_workers=len(payloads), clock=clock, pulled_clock=clock,
            batches=max(m.batches for m in messages), rows=rows,
            learning_rate=_number(max(m.learning_rate for m in messages)),
        )  # fmt: skip
        result = self.result[self._trained]
        self.rule.update(result, mean[self._trained], self._state, commit, result)
        if self.on_workers:
            self.result[self._averaged] = mean[self._averaged]
            self._encode_result()
        else:
            self.weights[self._averaged] += mean[self._averaged]

    def _apply_slices(self, round_: Round, joined: list[Slices]) -> None:
        """A round in which the gradients of some variables are slices; the reply is the mean."""
        mean = round_.contributions[0].values  # reduced in place: nobody needs it afterwards
        round_.mean(mean)
        if self._sections is not None:
            places = [s.place for s in joined]
            self._layout.copy_without(places, self.result, mean, back=True)
            self._encode_result()
            self._layout.copy_without(places, self.result, mean)
            self.encoded = pack(self.encoded, joined)
        self.sliced = pack(mean.view(np.uint8), joined)

    def slices_for(self, request: Message) -> ByteArray:
        """``sliced`` as the rank asks for it, encoded or not; empty where it is None."""
        if self.sliced is None:
            return np.empty(0, np.uint8)
        return self.encoded if request.flags & Flag.ENCODED else self.sliced

    def _encode_result(self) -> None:
        if self._sections is None:
            return
        gradient = self.result[self._trained]
        payload = self._compressor.encode(gradient)
        self._sections.codec.decode(payload, gradient)
        self.encoded = self._sections.join(self.result[self._averaged], payload)

    def commit_of(self, worker: Worker, message: Message, clock: int, num_workers: int) -> Commit:
        """The facts of ``message`` for the rule."""
        return Commit(
            worker=worker.rank, num_workers=num_workers, clock=clock,
            pulled_clock=worker.pulled_clock, batches=message.batches, rows=message.rows,
            learning_rate=_number(message.learning_rate),
        )  # fmt: skip


def _number(value: float) -> float:
    return value if value == value else 0.0  # NaN stands for none
