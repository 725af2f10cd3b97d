"""The facts that ranks tell each other before they connect."""

from __future__ import annotations

import dataclasses
import json

from sparkdl.errors import ProtocolError


@dataclasses.dataclass(frozen=True)
class Member:
    """The addresses of one rank, which the ranks tell each other before they connect.

    Args:
        host: Address that the other hosts can connect to.
        port: TCP port of the listening socket, 0 if there is none.
        host_id: Equal for ranks that can share memory, different for all others.
        local: Name of the listening Unix socket for ranks of the same ``host_id``.
        communicator: Name of the communicator that this rank is prepared for.
    """

    host: str
    port: int
    host_id: str
    local: str = ""
    communicator: str = ""

    def to_json(self) -> str:
        """This member as one line, for a barrier's ``allGather``."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Member:
        """The counterpart of :meth:`to_json`.

        Raises:
            ProtocolError: The text is not a member.

        >>> Member.from_json(Member('10.0.0.1', 4711, 'a').to_json()).port
        4711
        """
        try:
            fields = json.loads(text)
            member = cls(**fields)
        except (ValueError, TypeError) as error:
            raise ProtocolError(
                "this text is no member of the world",
                expected="the JSON text of Member.to_json()",
                received=repr(text[:200]),
            ) from error
        texts = (member.host, member.host_id, member.local, member.communicator)
        if not all(isinstance(t, str) for t in texts) or not isinstance(member.port, int):
            raise ProtocolError(
                "this text is no member of the world",
                expected="texts, and a whole number as port",
                received=repr(text[:200]),
            )
        return member
