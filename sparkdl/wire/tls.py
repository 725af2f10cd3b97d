"""TLS between the processes of one run, with a certificate that the driver makes for the run.

Names and authorities play no part. A client accepts the one certificate whose SHA-256 fingerprint
came to it beside the token, over Spark's own channel; ranks that exchange with each other show each
other the run's certificate. Only TLS 1.3 is spoken.

Before TLS begins a client *knocks*, the server sends a nonce, and the client a proof that only a
holder of the token can make of it. So a stranger never gets as far as TLS, whose handshake would
cost the server memory and time. A proof is good on its own connection only: nothing has to be
remembered, and who has recorded one is a stranger at every server of the run::

    client: KNOCK                   server: GO_ON, nonce
    client: proof of the nonce      server: GO_ON               then TLS

Where it has no room the server answers BUSY, where the proof is wrong it closes.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import socket
import ssl
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Self

from sparkdl.errors import AuthenticationError, ConfigError
from sparkdl.wire.anonymous import anonymous_file
from sparkdl.wire.exact import receive_into
from sparkdl.wire.greeting import BusyError, no_room

KNOCK = b"SPDK"
"""A client's first bytes."""
NONCE_BYTES, PROOF_BYTES = 16, 32
GO_ON, BUSY = b"\x01", b"\x02"
"""What the server answers with: the client may go on; or there is no room now."""
HANDSHAKE_S = 5.0
"""From the proof to the first words over TLS, in all."""
_AGE, _LIFE = timedelta(days=1), timedelta(days=3650)
"""Clocks of hosts may differ. What ends a certificate's use is the end of its run."""


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate of one run, and its private key; no text of it shows the key.

    Args:
        public: The certificate, as PEM.
        private: Its key, as PEM.
    """

    public: str
    private: str = field(repr=False)

    @classmethod
    def make(cls) -> Self:
        """A new certificate with a new key (ECDSA, P-256); takes about a millisecond.

        Raises:
            ConfigError: The package ``cryptography`` is not installed.
        """
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise ConfigError(
                "no certificate can be made for an encrypted run",
                expected="the package cryptography in the driver's Python",
                received=str(error),
                hint="pip install cryptography; executors do not need it. Or encrypt=False",
            ) from error
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sparkdl run")])
        now = datetime.now(UTC)
        built = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _AGE)
            .not_valid_after(now + _LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return cls(built.public_bytes(serialization.Encoding.PEM).decode(), private.decode())

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, in hexadecimal digits."""
        return _fingerprint(ssl.PEM_cert_to_DER_cert(self.public))

    def server_context(self, *, mutual: bool = False) -> ssl.SSLContext:
        """For the side that is connected to; ``mutual``: the other side must show the same one."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # nothing is resumed
        return self._completed(context, mutual)

    def client_context(self) -> ssl.SSLContext:
        """For a rank that connects to another one: both show this certificate."""
        return self._completed(_plain_client(), mutual=True)

    def _completed(self, context: ssl.SSLContext, mutual: bool) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        text = (self.public + self.private).encode()
        descriptor = anonymous_file(len(text), "sparkdl-certificate")  # Python reads only files
        try:
            os.pwrite(descriptor, text, 0)
            context.load_cert_chain(f"/dev/fd/{descriptor}")
        finally:
            os.close(descriptor)
        if mutual:
            context.load_verify_locations(cadata=self.public)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _plain_client() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return context


@functools.cache
def _pinning_client() -> ssl.SSLContext:
    """Takes every certificate: its fingerprint is compared after the handshake."""
    context = _plain_client()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_NONE
    return context


def _fingerprint(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()


def proof_of(token: str, nonce: bytes) -> bytes:
    """:data:`PROOF_BYTES` that only a holder of ``token`` can make; they do not tell the token."""
    return hmac.digest(token.encode(), b"sparkdl knock" + nonce, "sha256")


def connect_encrypted(connection: socket.socket, token: str, fingerprint: str) -> ssl.SSLSocket:
    """A client's end: knocks, and begins TLS. Takes ``connection`` over, also where it fails.

    Args:
        connection: Connected to a server; its timeout holds for each step.
        token: The run's secret; nothing of it is sent before TLS.
        fingerprint: Of the server's certificate.

    Raises:
        AuthenticationError: The server closed at the proof, or has another certificate.
        BusyError: It has no room now, or has ended a handshake that took long; another try may
            succeed.
        OSError, EOFError: The connection broke.
    """
    try:
        _ask(connection, KNOCK)
        nonce = bytearray(NONCE_BYTES)
        receive_into(connection, memoryview(nonce))
        _ask(connection, proof_of(token, bytes(nonce)))
        secured = _shake_hands(connection)
    except BaseException:
        connection.close()
        raise
    shown = secured.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(_fingerprint(shown), fingerprint):
        secured.close()
        raise AuthenticationError(
            "the server shows another certificate than that of this run",
            expected=f"SHA-256 fingerprint {fingerprint}",
            received=_fingerprint(shown),
            hint="something between this host and the driver answers in its place",
        )
    return secured


def _ask(connection: socket.socket, words: bytes) -> None:
    """Sends ``words``; returns when the server has answered that the client may go on."""
    broken: OSError | None = None
    try:
        connection.sendall(words)
    except (BrokenPipeError, ConnectionResetError) as error:  # its answer may say why
        broken = error
    answer = connection.recv(1)
    if answer == BUSY:
        raise no_room()
    if broken is not None:
        raise broken
    if answer != GO_ON:
        raise AuthenticationError(
            "the server closed the connection at the sight of the token's proof",
            expected="the token of this run",
            received="another one, or a server that is going down",
            hint="workers of an earlier run cannot join a later one",
        )


def _shake_hands(connection: socket.socket) -> ssl.SSLSocket:
    try:
        return _pinning_client().wrap_socket(connection)
    except (ConnectionError, ssl.SSLEOFError) as error:
        raise BusyError(
            "the server ended the TLS handshake",
            expected=f"a handshake within {HANDSHAKE_S:g} s",
            received=f"{type(error).__name__}: {error}",
            hint="was this host held up? does a firewall let TLS pass on the server's port?",
        ) from error


class ServerEncryption:
    """TLS at the end of a server: one object for all of a run's ports. Thread-safe.

    Args:
        certificate: The run's.
    """

    def __init__(self, certificate: Certificate) -> None:
        self._context = certificate.server_context()

    def begin(self, connection: socket.socket) -> tuple[ssl.SSLSocket, float]:
        """The connection, after its proof was taken, for ``do_handshake()``, and a deadline.

        Takes ``connection`` over, also where it fails.

        Args:
            connection: Blocks; gets a timeout of :data:`HANDSHAKE_S`, which ``do_handshake()``
                keeps in all.

        Returns:
            The connection, and when its first words must have come, on the monotonic clock.

        Raises:
            OSError: The peer is gone.
        """
        try:
            until = time.monotonic() + HANDSHAKE_S
            connection.settimeout(HANDSHAKE_S)
            connection.sendall(GO_ON)
            secured = self._context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
            return secured, until
        except BaseException:
            connection.close()
            raise
