"""A member's weights and optimizer state on their way to a joiner."""

from __future__ import annotations

from sparkdl.coordinator.blobs import Assembly, chunk_reply
from sparkdl.coordinator.group import Group
from sparkdl.errors import ProtocolError
from sparkdl.ps.kinds import StoreKind
from sparkdl.transport.frames import ByteArray, Kind, Message


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
        if not self.readers and self.uploader is None:
            self._blob = None

    def put(self, message: Message) -> None:
        """Takes one chunk.

        Raises:
            ProtocolError: Too large, or a chunk out of order.
        """
        whole = self._assembly.put(message)
        if whole is not None:
            self._blob, self._fresh = whole, True
            self.uploader, self.position = None, (message.epoch, message.batch)

    def get(self, offset: int, limit: int) -> Message:
        """The reply with one chunk from ``offset`` on.

        Raises:
            ProtocolError: There is no state, or the offset lies outside it.
        """
        if self._blob is None:
            raise ProtocolError(
                "no state is stored for a joiner",
                expected="STATE_PUT of a member first",
                received="STATE_GET",
            )
        return chunk_reply(self._blob, offset, limit)

    def leave(self, rank: int) -> None:
        """``rank`` is gone: it neither reads nor uploads any more."""
        if rank in self.readers:
            self.read_by(rank)
        if self.uploader == rank:
            self.uploader = None

    def read_by(self, rank: int) -> None:
        """``rank`` has read the state; frees it after the last reader."""
        self.readers.discard(rank)
        if not self.readers and self.uploader is None:
            self._blob = None

    def receive(self, group: Group, connection: int, message: Message) -> None:
        """Answers a chunk that a member uploads, or a joiner that asks for one."""
        worker = group.identify(connection, message)
        if message.kind is StoreKind.STATE_PUT:
            if worker.member and self.uploader == worker.rank:
                self.put(message)  # once it is whole, the store lets the joiners in
            group.answer(connection, Message(Kind.OK), worker)
            return
        reply = self.get(message.offset, group.limits.chunk_bytes)
        if reply.offset + reply.body_bytes == reply.total:
            self.read_by(worker.rank)
        group.answer(connection, reply, worker)
