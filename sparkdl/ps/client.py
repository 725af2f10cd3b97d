"""A worker's end of the parameter server's store: pushes and pulls over a session.

::

    client = connect(endpoint, rank=0, attempt=0, layout=layout)
    client.join(batches_per_epoch=100)
    client.pull()                       # client.buffer holds the center
    client.buffer[...] = delta
    client.push_pull(Progress(epoch=0, batch=8, batches=8, rows=512))

Every commit carries a sequence number; after a broken connection it is sent again under the same
number, so it counts exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sparkdl.codecs import Compression
from sparkdl.coordinator.blobs import read_blob
from sparkdl.coordinator.driver_client import DriverClient
from sparkdl.coordinator.session import Session, Welcome, open_session
from sparkdl.errors import ProtocolError
from sparkdl.process.closing import Closing
from sparkdl.ps.kinds import WITHOUT_GRADIENT, StoreKind, limits_of
from sparkdl.training.slices import Slices, head_offset, pack, pack_around, packed_bytes, unpack
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import Timeouts
from sparkdl.transport.frames import ByteArray, Flag, Message
from sparkdl.weights import FloatArray, Layout


class Coder:
    """The codec's memory on one worker: its error feedback, and the center as it has it.

    A commit is encoded once, whatever happens to the connection: what is sent again are the same
    bytes, so that the error feedback stays what it is. It ends with the task's attempt: what was
    not sent yet is then lost, as are the steps since the last commit.

    Args:
        rank, attempt: Seed the draws of random codecs.
        shard: The shard whose values it holds; 0 where there are no others.
    """

    def __init__(self, compression: Compression, rank: int, attempt: int, shard: int = 0) -> None:
        drawn = (rank, attempt, shard) if shard else (rank, attempt)
        seed = int(np.random.SeedSequence(drawn).generate_state(1)[0])
        self._compression = compression
        self._compressor = compression.compressor(seed)
        self._trained = slice(0, compression.layout.trained_size)
        self._averaged = slice(compression.layout.trained_size, compression.layout.size)
        self._held: FloatArray | None = None
        self.version = -1

    def encode(self, flat: FloatArray, rows: int) -> ByteArray:
        """The payload of a commit; one without rows stands for nothing, and changes nothing."""
        if rows:
            payload = self._compressor.encode(flat[self._trained])
        else:
            payload = self._compression.codec.encode(np.zeros_like(flat[self._trained]))
        return self._compression.commits.join(flat[self._averaged], payload)

    def decode(self, reply: Message, flat: FloatArray) -> None:
        """Makes ``flat``, where the reply's body lies, the weights or gradient that it stands for.

        Raises:
            ProtocolError: The body cannot come from the server of this run.
        """
        replies = self._compression.replies
        if not reply.flags & Flag.ENCODED:
            self._held, self.version = flat.copy(), 0
            return
        body = reply.content.copy()
        if not reply.flags & Flag.CHANGE:
            if reply.rows:
                replies.decode(body, flat)
            return
        if self._held is None:
            raise ProtocolError(
                "a change of the center for a worker that holds none",
                expected="the whole center first", received="a change of it",
            )  # fmt: skip
        replies.decode(body, flat)
        self._held[self._trained] += flat[self._trained]
        self._held[self._averaged] = flat[self._averaged]
        np.copyto(flat, self._held)
        self.version += 1


@dataclass(frozen=True)
class Progress:
    """The facts of a commit beside its payload.

    Args:
        epoch: Epoch the worker is in, from 0.
        batch: Batches of that epoch done, those of this commit included.
        batches: Batches in this commit.
        rows: Rows in this commit: its weight where rows are averaged; 0 contributes nothing.
        learning_rate: The worker's now, for rules that ask for it.
    """

    epoch: int
    batch: int
    batches: int
    rows: int
    learning_rate: float = math.nan


def commit_message(
    kind: StoreKind, progress: Progress, sequence: int, flags: Flag = Flag.NONE
) -> Message:
    """The header of a commit."""
    return Message(
        kind, flags=flags, sequence=sequence, epoch=progress.epoch, batch=progress.batch,
        batches=progress.batches, rows=progress.rows, learning_rate=progress.learning_rate,
    )  # fmt: skip


class Client(Closing):
    """One worker's access to the store. Thread-safe, one request at a time.

    ``buffer`` is the layout's size: a push sends what it holds, a pull replaces what it holds.
    With shm it is the mailbox itself; it changes identity after a reconnect, so ask for it each
    time instead of keeping it.

    Where the workers hold the weights, ``give_state`` returns the state of this one as it is before
    the round to which it pushes: a push hands it to the server when another rank waits for it.

    Args:
        session: The worker's session; closed with the client.
        compression: The run's compression; None sends float32. Over shm, which crosses no network,
            bodies travel as they are, unless the codec does more than save bytes.
    """

    def __init__(self, session: Session, compression: Compression | None = None) -> None:
        self.session = session
        self.round_rows = 0
        self.without_gradient: Sequence[int] = ()
        self.round_without_gradient: Sequence[int] = ()
        self.give_state: Callable[[], bytes] | None = None
        self.round_slices: Sequence[Slices] = ()
        self._coder: Coder | None = None
        if compression is not None and (
            session.transport != "shm" or compression.codec.shapes_training
        ):
            self._coder = Coder(compression, session.rank, session.attempt)

    @property
    def buffer(self) -> FloatArray:
        """The float32 buffer that pushes send and pulls fill."""
        return self.session.limits.dense(self.session.raw)

    def sliced_buffer(self, size: int, places: int) -> FloatArray:
        """The float32 buffer of a round in which the gradients of some variables are slices."""
        start = head_offset(places)
        return self.session.raw[start : start + 4 * size].view(np.float32)

    @property
    def encodes(self) -> bool:
        return self._coder is not None

    @property
    def transport(self) -> str:
        """The transport that weights travel by, ``'none'`` while there is no connection."""
        return self.session.transport

    @property
    def source(self) -> str:
        """The source of the weights to start from; see :class:`Welcome`."""
        return "" if self.session.welcome is None else self.session.welcome.source

    @property
    def num_workers(self) -> int:
        """Workers of the run; 1 before it was joined."""
        return 1 if self.session.welcome is None else self.session.welcome.num_workers

    def join(self, *, rows: int = 0, batches_per_epoch: int = 0) -> Welcome:
        """Joins the run; see :meth:`Session.join`."""
        return self.session.join(
            rows=rows, batches_per_epoch=batches_per_epoch,
            weights_bytes=self.session.limits.dense_bytes,
        )  # fmt: skip

    def finish(self) -> None:
        """Says that this rank's work is done."""
        self.session.finish()

    def close(self) -> None:
        self.session.close()

    def pull(self, *, last: bool = False) -> FloatArray:
        """Fills ``buffer`` with the center, and returns it.

        Args:
            last: Wait until every member has made all of its commits and pulls so, or is gone.
        """
        message = Message(StoreKind.PULL, flags=Flag.WAIT if last else Flag.NONE)
        self._ask_encoded(message)
        self._decode(self.session.request(message, deferred=last))
        return self.buffer

    def push(self, progress: Progress) -> None:
        """Commits what ``buffer`` holds; its content is undefined afterwards."""
        self._answered(self._commit(progress, self._sent(progress), kind=StoreKind.PUSH))

    def push_pull(self, progress: Progress) -> FloatArray:
        """Commits what ``buffer`` holds, and fills it with what the server answers.

        That is the center, or, for a rule that waits and takes gradients, the mean gradient of the
        round; ``round_rows`` are then the rows of all ranks (0: nothing to apply). Where gradients
        of some variables are slices on other ranks, it is undefined: see
        :meth:`push_pull_slices`.
        """
        self._answered(self._commit(progress, self._sent(progress)))
        return self.buffer

    def _sent(self, progress: Progress) -> int | ByteArray:
        """The body of a commit: what ``buffer`` holds, or its payload."""
        if self._coder is None:
            return self.session.limits.dense_bytes
        return self._coder.encode(self.buffer, progress.rows)

    def add_up(
        self, numbers: npt.NDArray[np.float64], number: int, progress: Progress
    ) -> npt.NDArray[np.float64]:
        """The sums of a few numbers over all ranks that have rows in the present round.

        Args:
            number: Which sums of this round they are: all ranks number them alike.
            progress: The progress of the commit to come.
        """
        message = Message(StoreKind.ADD_UP, offset=number, meta={"numbers": numbers.tolist()})
        return np.array(self._waited(message, 0, progress).meta["sums"], np.float64)

    def push_pull_slices(self, progress: Progress, size: int, slices: Sequence[Slices]) -> None:
        """:meth:`push_pull` of a gradient that is slices in part.

        The mean of the dense rest is then where it was sent from, and ``round_slices`` are the
        slices of all ranks.

        Args:
            size: Elements in :meth:`sliced_buffer`, which is sent; where this client encodes,
                ``buffer`` is sent whole.
            slices: Sent beside it.
        """
        head = 4 * size
        payload = None
        if self._coder is not None:
            payload = self._coder.encode(self.buffer, progress.rows)
            head = payload.size
        size_bytes = packed_bytes(head, slices)
        if payload is None and size_bytes <= self.session.limits.buffer_bytes:
            pack_around(self.session.raw, head, slices)
            self._answered(self._commit(progress, size_bytes, Flag.SLICED))
            return
        if payload is None:
            payload = self.sliced_buffer(size, len(slices)).view(np.uint8)
        self._answered(self._commit_slices(progress, pack(payload, slices)))

    def _commit_slices(self, progress: Progress, whole: ByteArray) -> Message:
        """Commits slices; those that no buffer has room for go in chunks before."""
        if whole.size <= self.session.limits.buffer_bytes:
            return self._commit(progress, whole, Flag.SLICED)
        self.session.send_blob(StoreKind.SLICES_PUT, [whole], progress.epoch, progress.batch)
        return self._commit(progress, 0, Flag.SLICED, total=whole.size)

    def _slices_of(self, reply: Message) -> ByteArray | None:
        """The slices that a reply to a commit brings, or says to be large; None: it has none."""
        if reply.total:
            return np.frombuffer(self._all_chunks(StoreKind.SLICES_GET, reply.flags), np.uint8)
        return reply.content if reply.flags & Flag.SLICED else None

    def _answered(self, reply: Message) -> None:
        """Takes the reply to a commit; its slices become ``round_slices``."""
        self.round_slices = ()  # those of the round before need not stay while others come
        whole = self._slices_of(reply)
        if whole is None:
            self._decode(reply)
            return
        head, slices = unpack(whole)
        if reply.flags & Flag.ENCODED:
            slices = [replace(s, indices=s.indices.copy(), rows=s.rows.copy()) for s in slices]
            reply.body = head
            self._decode(reply)
        elif reply.total:
            np.copyto(self.sliced_buffer(head.size // 4, len(slices)), head.view(np.float32))
        self.round_slices = slices

    def snapshot_wanted(self, epoch: int, batch: int = 0, *, every_step: bool = True) -> bool:
        """Whether this rank is to send the weights of a position, by :meth:`snapshot`.

        Args:
            every_step: Whether this rank had a batch in every step of the epoch.

        Waits while another rank is sending them: False says that the server has them.
        """
        message = Message(
            StoreKind.SNAPSHOT, flags=Flag.WAIT, epoch=epoch, batch=batch, batches=int(every_step)
        )
        return bool(self.session.request(message, deferred=True).flags & Flag.UPLOAD)

    def snapshot(self, epoch: int, batch: int = 0) -> None:
        """Stores ``buffer`` (weights) as the center; for rules that wait and take gradients."""
        message = Message(StoreKind.SNAPSHOT, epoch=epoch, batch=batch)
        self.session.request(message, self.session.limits.dense_bytes)

    def carried_wanted(self, epoch: int, batch: int, *, every_step: bool) -> tuple[bool, bool]:
        """Whether this rank is to send its counters and seeds, and whether there are any to take.

        Args:
            every_step: Whether this rank had a batch in every step of the epoch.

        Waits while another rank is sending them.
        """
        message = Message(StoreKind.CARRIED, epoch=epoch, batch=batch, batches=int(every_step))
        reply = self.session.request(message, deferred=True)
        return bool(reply.flags & Flag.UPLOAD), reply.total > 0

    def put_carried(self, carried: bytes, epoch: int, batch: int) -> None:
        """Sends counters and seeds to the other ranks. Overwrites ``buffer``."""
        self.session.send_blob(StoreKind.CARRIED_PUT, [carried], epoch, batch)

    def carried(self) -> bytes:
        """The bytes that another rank sent by :meth:`put_carried`. Overwrites ``buffer``."""
        return bytes(self._all_chunks(StoreKind.CARRIED_GET))

    def get_state(self) -> bytes:
        """The state that a member uploaded for this joiner. Overwrites ``buffer``."""
        return bytes(self._all_chunks(StoreKind.STATE_GET))

    def kept(self) -> bytearray:
        """The state that a worker left last for the driver; empty if none has."""
        return self.session.kept()

    def _all_chunks(self, kind: StoreKind, flags: Flag = Flag.NONE) -> bytearray:
        """The bytes that the server keeps for this rank, in as many requests as it takes."""
        return read_blob(
            lambda offset: self.session.request(
                Message(kind, flags=flags & Flag.ENCODED, offset=offset)
            )
        )

    def _commit(
        self,
        progress: Progress,
        body: int | ByteArray,
        flags: Flag = Flag.NONE,
        kind: StoreKind = StoreKind.PUSH_PULL,
        total: int = 0,
    ) -> Message:
        self.session.sequence += 1
        message = commit_message(kind, progress, self.session.sequence, flags)
        message.total = total
        if self.without_gradient:
            message.meta = {WITHOUT_GRADIENT: list(self.without_gradient)}
        self._ask_encoded(message)
        reply = self._waited(message, body, progress)
        self.round_rows = reply.rows
        self.round_without_gradient = reply.meta.get(WITHOUT_GRADIENT, ())
        return reply

    def _waited(self, message: Message, body: int | ByteArray, progress: Progress) -> Message:
        """The reply to a request that waits for other ranks, one of which may need the state."""
        while True:
            reply = self.session.request(message, body, deferred=True)
            if not reply.flags & Flag.UPLOAD:
                return reply
            self._upload(progress)

    def _upload(self, progress: Progress) -> None:
        """Hands over this worker's state of before the round; what it pushes stays as it is."""
        if self.give_state is None:
            raise ProtocolError(
                "the server asks a worker for a state that it does not have",
                expected="workers that hold the weights",
                received="a worker that takes them from the server",
                hint="install the same sparkdl on the driver and on all executors",
            )
        pushed = self.session.raw.copy()
        state = [self.give_state()]
        self.session.send_blob(StoreKind.STATE_PUT, state, progress.epoch, progress.batch - 1)
        np.copyto(self.session.raw, pushed)

    def _ask_encoded(self, message: Message) -> None:
        """Marks a request as one whose reply may be encoded, from what this worker holds."""
        if self._coder is not None:
            message.flags |= Flag.ENCODED
            message.meta["held"] = self._coder.version

    def _decode(self, reply: Message) -> None:
        if self._coder is not None and reply.kind is StoreKind.WEIGHTS:
            self._coder.decode(reply, self.buffer)


def connect(
    endpoint: Endpoint,
    mode: str = "auto",
    *,
    rank: int,
    attempt: int = 0,
    layout: Layout,
    timeouts: Timeouts | None = None,
    compression: Compression | None = None,
) -> Client:
    """Connects a worker to a parameter server; see :func:`open_session`.

    Args:
        mode: ``'auto'``, ``'shm'``, ``'socket'`` or ``'http'``.
        attempt: A number that no other attempt of this rank has.
        layout: Layout of the flat buffer; the server refuses another size.

    Raises:
        TransportError: No way leads to the server; says what was tried.
        AuthenticationError: The server refused the token.
    """
    session = open_session(
        endpoint, rank=rank, attempt=attempt, mode=mode, limits=limits_of(layout, compression),
        timeouts=timeouts,
    )  # fmt: skip
    return Client(session, compression)


def pull_center(driver: DriverClient) -> FloatArray:
    """A copy of the center (where the workers hold the weights: of the last snapshot).

    Args:
        driver: Connected with the limits of the store.
    """
    driver.request(Message(StoreKind.PULL))
    return driver.limits.dense(driver.raw).copy()
