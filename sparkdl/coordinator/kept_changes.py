"""What the driver's callbacks wrote to the model, kept until every worker has taken it."""

from __future__ import annotations

from sparkdl.changes import VariableChanges
from sparkdl.coordinator.blobs import Assembly, chunk_reply
from sparkdl.errors import ProtocolError
from sparkdl.transport.frames import ByteArray, Message


class KeptChanges:
    """Changes of variables, numbered from 1 in the order in which the driver sent them.

    Each worker takes them in that order. One that joins late takes all of them; those whose
    variables a later one sets again are forgotten when all members have taken them.

    Args:
        max_bytes: Bound of one of them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._assembly = Assembly("the changes of variables", max_bytes)
        self._kept: dict[int, tuple[ByteArray, VariableChanges]] = {}
        self._count = 0

    def put(self, message: Message) -> VariableChanges | None:
        """Takes one chunk from the driver; returns the changes once they are whole.

        Raises:
            ProtocolError: They are too large, malformed, or a chunk is out of order.
        """
        blob = self._assembly.put(message)
        if blob is None:
            return None
        changes = VariableChanges.from_bytes(blob.tobytes())
        self._count += 1
        self._kept[self._count] = (blob, changes)
        return changes

    def read(self, message: Message, limit: int) -> Message:
        """One chunk of the first changes that are kept from number ``message.sequence`` on.

        Raises:
            ProtocolError: There are none, or the chunk lies outside of them.
        """
        number = min((n for n in self._kept if n >= message.sequence), default=0)
        if not number:
            raise ProtocolError(
                "changes of variables that nobody has sent",
                expected=f"a number up to {self._count}",
                received=str(message.sequence),
            )
        reply = chunk_reply(self._kept[number][0], message.offset, limit)
        reply.sequence = number
        return reply

    def forget(self, taken: int) -> None:
        """Forgets what nobody will ask for, once all members have taken the first ``taken``."""
        later: frozenset[tuple[str, int]] = frozenset()
        for number in sorted(self._kept, reverse=True):
            keys = self._kept[number][1].keys
            if number <= taken and keys <= later:
                del self._kept[number]
            later |= keys
