"""The parts of a store of rounds: payloads and their mean, sums, slices, copies that one sends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparkdl.codecs import Compression
from sparkdl.coordinator.blobs import Assembly, chunk_reply
from sparkdl.coordinator.group import Group, WaitReason, Worker
from sparkdl.errors import ProtocolError
from sparkdl.ps.kinds import WITHOUT_GRADIENT, StoreKind
from sparkdl.training.slices import Slices, pack, unpack
from sparkdl.transport.frames import ByteArray, Flag, Kind, Message
from sparkdl.weights import FloatArray, Layout

BLOCK = 1 << 16
"""Elements reduced at a time: two blocks fit the second-level cache."""
MOST_NUMBERS = 1 << 16


@dataclass
class Payload:
    """One rank's part in a round; ``values`` is the buffer it arrived in.

    Where gradients of some variables are ``slices``, ``values`` are those of the others. The loss
    may not depend on some variables: these are ``without_gradient``, and no optimizer moves them.
    """

    connection: int
    values: FloatArray
    message: Message
    slices: Sequence[Slices] = ()
    without_gradient: Sequence[int] = ()


def numbers_without_gradient(message: Message, num_trained: int) -> list[int]:
    """The variables of which the sender of a commit has no gradient.

    Raises:
        ProtocolError: These are no numbers of trained variables.
    """
    numbers = message.meta.get(WITHOUT_GRADIENT, [])
    if not isinstance(numbers, list) or any(
        type(n) is not int or not 0 <= n < num_trained for n in numbers
    ):
        raise ProtocolError(
            f"rank {message.rank} names variables without gradient that are none",
            expected=f"a list of whole numbers from 0 to {num_trained - 1}",
            received=repr(numbers)[:100],
        )
    return numbers


class Round:
    """The payloads of one round, left in the buffers they arrived in."""

    def __init__(self) -> None:
        self.payloads: dict[int, Payload] = {}

    @property
    def rows(self) -> int:
        return sum(p.message.rows for p in self.payloads.values())

    @property
    def reply_meta(self) -> dict[str, list[int]]:
        """Tells of which variables no rank with rows has a gradient, where there are any."""
        told = [set(p.without_gradient) for p in self.contributions]
        without = sorted(set.intersection(*told)) if told else []
        return {WITHOUT_GRADIENT: without} if without else {}

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


class Sums:
    """Answers each rank when all have told their numbers.

    A rank without rows tells none: its commit, which waits for the round, stands for them. What a
    round has added up is kept until the next one, for a rank whose reply was lost and for the next
    attempt at a rank's work.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._clock = -1
        self._known: dict[int, list[float]] = {}

    def take(self, connection: int, message: Message) -> None:
        """Answers or defers a rank's numbers; ``message.offset`` says which sums they are for."""
        numbers = message.meta.get("numbers")
        if (
            not isinstance(numbers, list)
            or len(numbers) > MOST_NUMBERS
            or any(not isinstance(n, (int, float)) for n in numbers)
        ):
            raise ProtocolError(
                f"an {message.kind.name} frame without numbers",
                expected=f"a list of at most {MOST_NUMBERS} numbers",
                received=type(numbers).__name__,
            )
        if self._clock != self._group.clock:
            self._clock = self._group.clock
            self._known.clear()
        if message.offset in self._known:
            self._answer(connection, message)
        else:
            self._group.defer(connection, "sums", message)

    def settle(self, ranks: Collection[int], committed: Collection[int]) -> None:
        """Answers those who wait, if nobody is missing.

        Args:
            ranks: The ranks that take part in the round.
            committed: The ranks among them whose commit waits for it.
        """
        waits = self._group.waiting("sums")
        if not waits or set(ranks) - {w.message.rank for _, w in waits} - set(committed):
            return
        number = min(w.message.offset for _, w in waits)
        here = [(c, w.message) for c, w in waits if w.message.offset == number]
        columns = zip(*(message.meta["numbers"] for _, message in here), strict=True)
        self._known[number] = [float(sum(column)) for column in columns]
        for connection, message in here:
            self._answer(connection, message)

    def _answer(self, connection: int, message: Message) -> None:
        reply = Message(Kind.OK, meta={"sums": self._known[message.offset]})
        self._group.answer(connection, reply, self._group.workers[message.rank])


class Snapshot:
    """The values of a position (epoch, batch) come from one worker; all others wait until then.

    Weights are equal on all workers, so the first that asks sends them, and the next one if that
    one dies; but seeds and counters are those of a worker that has taken every step of the epoch.
    Only if no such worker is there another one sends. No worker goes on from a position before its
    values are here, so no death loses them.

    Args:
        reason: What requests that wait for these values wait for.
        what: The values, in an error.
        together: Whether nobody sends before all have asked: so all have the values of one position
            before those of the next one take their place.
    """

    def __init__(
        self, group: Group, reason: WaitReason, what: str, *, together: bool = False
    ) -> None:
        self._group, self._reason, self._what = group, reason, what
        self._together = together
        self._sender: int | None = None
        self.position = (0, 0)

    def take(self, message: Message) -> bool:
        """Whether the values that come with ``message`` are newer than those that are here."""
        position = (message.epoch, message.batch)
        if position <= self.position:
            return False  # sent again, or by a worker that was silent while the others went on
        self.position, self._sender = position, None
        return True

    def go_back(self, position: tuple[int, int]) -> None:
        """The run trains again from an earlier position on."""
        self.position, self._sender = position, None

    def settle(self) -> None:
        """Answers those who ask whether to send the values: one is told to."""
        asked = self._asked()
        for connection, wait in self._group.waiting(self._reason):
            message, reply = wait.message, Message(Kind.OK, total=self.total)
            if self._is_new(message):
                if self._sender is None and not asked[message.rank] and self._to_come(asked):
                    continue
                if self._sender not in (None, message.rank) or self._yet_to_ask(asked):
                    continue
                self._sender, reply = message.rank, Message(Kind.OK, flags=Flag.UPLOAD)
            self._group.answer(connection, reply, self._group.workers[message.rank])

    @property
    def total(self) -> int:
        """Told to those who are not to send: the bytes of the values, where they can be read."""
        return 0

    def _is_new(self, message: Message) -> bool:
        return (message.epoch, message.batch) > self.position

    def _asked(self) -> dict[int, bool]:
        """Rank that waits for newer values -> whether it has taken every step of the epoch."""
        messages = [wait.message for _, wait in self._group.waiting(self._reason)]
        return {m.rank: bool(m.batches) for m in messages if self._is_new(m)}

    def _to_come(self, asked: dict[int, bool]) -> list[int]:
        """Ranks that may have taken every step of the epoch, and send the values."""
        present = [w.rank for w in self._group.workers.values() if w.alive and not w.finished]
        return [rank for rank in present if asked.get(rank, True)]

    def _yet_to_ask(self, asked: dict[int, bool]) -> list[int]:
        """Ranks whose question an answer waits for."""
        if not self._together or self._sender is not None:
            return []
        return [w.rank for w in self._group.members() if not w.finished and w.rank not in asked]

    def expire(self) -> None:
        """Ends the waits for a worker that lives and does not send."""
        group, limit_s = self._group, self._group.settings.round_timeout_s
        asked = self._asked()
        missing = [self._sender] if self._sender is not None else self._yet_to_ask(asked)
        missing = missing or self._to_come(asked)
        for connection, wait in group.waiting(self._reason):
            if group.now - wait.since > limit_s and missing:
                group.time_out(connection, self._what, missing, limit_s, "raise round_timeout_s?")

    def leave(self, rank: int) -> None:
        """``rank`` is dead or done: it sends nothing any more."""
        if self._sender == rank:
            self._sender = None


class CarriedValues(Snapshot):
    """Gives workers with fewer batches the values that no step exchanges of one that had them all.

    A layer's counter of batches is such a value. One process counts every batch; so does the worker
    with the most batches, and it sends what it has counted. Where all workers have as many batches,
    nothing is sent.
    """

    def __init__(self, group: Group, max_bytes: int) -> None:
        super().__init__(group, "carried", "the counters and seeds after an epoch", together=True)
        self._assembly = Assembly("the counters and seeds of a worker", max_bytes)
        self._blob: ByteArray | None = None

    @property
    def total(self) -> int:
        return 0 if self._blob is None else self._blob.size

    def receive(self, connection: int, message: Message, worker: Worker) -> None:
        """Answers or defers a request."""
        if message.kind is StoreKind.CARRIED:
            if len({w.said.batches_per_epoch for w in self._group.workers.values()}) > 1:
                self._group.defer(connection, "carried", message)
                return
            reply = Message(Kind.OK)
        elif message.kind is StoreKind.CARRIED_PUT:
            whole = self._assembly.put(message)
            if whole is not None and self.take(message):
                self._blob = whole
            reply = Message(Kind.OK)
        else:
            if self._blob is None:
                raise ProtocolError(
                    "no counters and seeds are stored", expected="CARRIED_PUT of a rank first",
                    received="CARRIED_GET",
                )  # fmt: skip
            reply = chunk_reply(self._blob, message.offset, self._group.limits.chunk_bytes)
        self._group.answer(connection, reply, worker)


class StateTransfer:
    """One member uploads its state in chunks; joiners read it; it is freed after the last reader.

    Args:
        max_bytes: Bound of the whole state.
    """

    def __init__(self, max_bytes: int) -> None:
        self._assembly = Assembly("the state for a joiner", max_bytes)
        self._blob: ByteArray | None = None
        self._fresh = False
        self.uploader: int | None = None
        self.position = (0, 0)
        self.readers: set[int] = set()

    @property
    def fresh(self) -> bool:
        """Whether a whole state is here that no round has made old since it came."""
        return self._fresh and self._blob is not None

    @fresh.setter
    def fresh(self, value: bool) -> None:
        self._fresh = value
        self._free()

    def _free(self) -> None:
        if not self.readers and self.uploader is None:
            self._blob = None

    def leave(self, rank: int) -> None:
        """``rank`` is gone: it neither reads nor uploads any more."""
        if rank in self.readers:
            self._end_reading(rank)
        if self.uploader == rank:
            self.uploader = None

    def _end_reading(self, rank: int) -> None:
        self.readers.discard(rank)
        self._free()

    def receive(self, group: Group, connection: int, message: Message) -> None:
        """Answers a chunk that a member uploads, or a joiner that asks for one."""
        worker = group.identify(connection, message)
        if message.kind is StoreKind.STATE_PUT:
            if worker.member and self.uploader == worker.rank:
                whole = self._assembly.put(message)
                if whole is not None:  # the store lets the joiners in
                    self._blob, self._fresh = whole, True
                    self.uploader, self.position = None, (message.epoch, message.batch)
            group.answer(connection, Message(Kind.OK), worker)
            return
        if self._blob is None:
            raise ProtocolError(
                "no state is stored for a joiner", expected="STATE_PUT of a member first",
                received="STATE_GET",
            )  # fmt: skip
        reply = chunk_reply(self._blob, message.offset, group.limits.chunk_bytes)
        if reply.offset + reply.body_bytes == reply.total:
            self._end_reading(worker.rank)
        group.answer(connection, reply, worker)


MAX_BYTES = 1 << 30
"""Most bytes of one rank's commit with slices."""


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
        head, slices = unpack(message.content)
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
        f"{what} cannot be taken", expected=expected, received=received,
        hint="does the model compute otherwise on some batches, or on some executors?",
    )  # fmt: skip
