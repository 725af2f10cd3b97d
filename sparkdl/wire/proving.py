"""The handshake by which two processes prove to each other that they belong to the same run.

C connects and L listens; both know the run's token T::

    C → L   hello, nonce_C
    L → C   nonce_L, HMAC(T, "listener" + hello + nonce_C + nonce_L)
    C → L   HMAC(T, "connector" + hello + nonce_C + nonce_L)
    L → C   one byte: welcome

The hello has a fixed length and says what the connection is for. Where L has no room it answers
BUSY instead, where the proof is wrong it closes. A proof is good on its own connection only:
nothing has to be remembered, and who has recorded one is a stranger everywhere. Proofs are compared
in constant time. In an encrypted run TLS follows (:mod:`sparkdl.wire.tls`); in any other the data
that follow are neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Callable

from sparkdl.errors import AuthenticationError
from sparkdl.wire.greeting import hear_bytes, no_room

TOKEN_BYTES = 32
"""Bytes of a token that is made for this handshake."""
NONCE_BYTES = PROOF_BYTES = 32
WELCOME, BUSY = b"\x01", b"\x02"
"""Last byte of the listener: the caller may begin; or there is no room now."""


class IncomingProof:
    """The listener's side, for a :class:`sparkdl.wire.greeting.Greeter` or a loop of its own."""

    def __init__(
        self,
        connection: socket.socket,
        token: bytes,
        hello_bytes: int = 0,
        expected: Callable[[bytes], bool] = lambda hello: True,
    ) -> None:
        self.connection = connection
        self.hello = b""
        self._token, self._hello_bytes, self._expected = token, hello_bytes, expected
        self._heard = bytearray()
        self._opening = self._nonce = b""

    def hear(self) -> bool:
        """Reads what has come and answers it; True once :meth:`welcome` may be called.

        Raises:
            OSError, EOFError: The peer is gone.
            AuthenticationError: The peer means another listener, or has another token.
        """
        if not self._opening:
            if not hear_bytes(self.connection, self._heard, self._hello_bytes + NONCE_BYTES):
                return False
            self._opening, self._nonce = bytes(self._heard), secrets.token_bytes(NONCE_BYTES)
            self._heard.clear()
            self.hello = self._opening[: self._hello_bytes]
            if not self._expected(self.hello):
                raise AuthenticationError(
                    "a hello that was not meant for this process",
                    expected="a connection of this run", received="another one",
                )  # fmt: skip
            proof = proof_of(self._token, b"listener", self._opening, self._nonce)
            self.connection.send(self._nonce + proof)
        if not hear_bytes(self.connection, self._heard, PROOF_BYTES):
            return False
        own = proof_of(self._token, b"connector", self._opening, self._nonce)
        if not hmac.compare_digest(bytes(self._heard), own):
            raise AuthenticationError(
                "a wrong token", expected="a peer that knows the run's token",
                received="one that does not",
            )  # fmt: skip
        return True

    def welcome(self) -> None:
        """Tells the other side that it may begin; to be called by who serves the connection.

        Raises:
            OSError: The peer is gone.
        """
        self.connection.send(WELCOME)

    def turn_away(self) -> None:
        """Says that there is no room, if the peer's end takes it at once."""
        self.connection.send(BUSY)


class OutgoingProof:
    """The connecting side."""

    def __init__(self, connection: socket.socket, token: bytes, hello: bytes, name: str) -> None:
        self._connection, self._token, self._name = connection, token, name
        self._opening = hello + secrets.token_bytes(NONCE_BYTES)
        self._heard = bytearray()
        self._answered = False

    def begin(self) -> None:
        """Sends the hello."""
        self._connection.sendall(self._opening)

    def advance(self) -> bool:
        """Reads what has come and answers it; True when the listener has said welcome.

        Raises:
            OSError, EOFError: The listener is gone, or has refused this side.
            BusyError: It has no room now; another try may find some.
            AuthenticationError: The listener has another token.
        """
        if not self._answered:
            if not self._hear(NONCE_BYTES + PROOF_BYTES):
                return False
            nonce, proof = bytes(self._heard[:NONCE_BYTES]), bytes(self._heard[NONCE_BYTES:])
            self._heard.clear()
            own = proof_of(self._token, b"listener", self._opening, nonce)
            if not hmac.compare_digest(proof, own):
                raise AuthenticationError(
                    f"{self._name} could not prove itself",
                    expected="a proof made with this run's token", received="another proof",
                    hint="is a process of another run listening there?",
                )  # fmt: skip
            self._connection.sendall(proof_of(self._token, b"connector", self._opening, nonce))
            self._answered = True
        return self._hear(len(WELCOME))

    def _hear(self, wanted: int) -> bool:
        try:
            whole = hear_bytes(self._connection, self._heard, wanted)
        except EOFError:
            if self._heard == BUSY:
                raise no_room() from None
            raise
        if whole and self._heard == BUSY:
            raise no_room()
        return whole


def prove(connection: socket.socket, token: bytes, hello: bytes = b"", name: str = "") -> None:
    """The connecting side of the handshake on a connection that blocks; its timeout holds."""
    proof = OutgoingProof(connection, token, hello, name)
    broken: OSError | None = None
    try:
        proof.begin()
    except (BrokenPipeError, ConnectionResetError) as error:  # its answer may say why
        broken = error
    try:
        while not proof.advance():
            pass
    except EOFError:
        if broken is not None:
            raise broken from None
        raise


def proof_of(token: bytes, role: bytes, opening: bytes, nonce: bytes) -> bytes:
    """The proof that only a holder of ``token`` can make; it does not tell the token."""
    return hmac.digest(token, role + opening + nonce, "sha256")
