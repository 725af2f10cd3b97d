"""What a connection to the page must show before a thread serves it: the token of the page's link.

Browsers open connections that they may never use, and whoever reaches the address can: neither may
take the threads of those who look at the page.
"""

from __future__ import annotations

import contextlib
import socket
from urllib.parse import parse_qs, urlsplit

from sparkdl.errors import AuthenticationError, ProtocolError
from sparkdl.wire.listening import token_matches

FIRST_LINE_BYTES = 4 << 10
"""Of a request; the token is in it."""
REFUSAL = "This page wants the token of its link, which the driver has printed.\n"
_REFUSED = (
    "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nCache-Control: no-store\r\n"
    f"Content-Length: {len(REFUSAL)}\r\nConnection: close\r\n\r\n{REFUSAL}"
).encode()


class FirstPageRequest:
    """A connection whose first request must have the token, for a
    :class:`sparkdl.wire.greeting.Greeter`.

    The request stays in the socket, for the page's server to read.

    Args:
        connection: Accepted; does not block.
        token: Of the page's link.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection, self._token = connection, token

    def hear(self) -> bool:
        """Looks at what has come; True once the first line is whole and has the token.

        Raises:
            OSError, EOFError: The peer is gone.
            ProtocolError: The first line is too long.
            AuthenticationError: There is no token, or another one; the peer has been told.
        """
        try:
            seen = self.connection.recv(FIRST_LINE_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        if not seen:
            raise EOFError("the peer closed the connection")
        line, end, _ = seen.partition(b"\r\n")
        if not end:
            if len(seen) < FIRST_LINE_BYTES:
                return False
            raise ProtocolError(
                "the first line of a request is too long",
                expected=f"at most {FIRST_LINE_BYTES} bytes",
                received=f"{len(seen)} bytes without an end",
            )
        if not token_matches(_token_in(line.decode("latin-1")), self._token):
            with contextlib.suppress(BlockingIOError):  # what is unread would reset the connection
                self.connection.recv(64 << 10)
            self.connection.send(_REFUSED)
            raise AuthenticationError(
                "a wrong or missing token",
                expected="the token of the page's link",
                received="another one, or none",
            )
        return True

    def turn_away(self) -> None:
        """Nothing to say: browsers connect again when they have something to ask."""


def _token_in(line: str) -> str | None:
    """The token in the first line of a request."""
    try:
        query = urlsplit(line.split(" ")[1]).query
        return parse_qs(query).get("token", [None])[0]
    except (IndexError, ValueError):  # no request
        return None
