"""TLS between the processes of one run, with a certificate that the driver makes for the run.

Names and authorities play no part. A client accepts the one certificate whose SHA-256 fingerprint
came to it beside the token, over Spark's own channel; ranks that exchange with each other show each
other the run's certificate. Only TLS 1.3 is spoken.

Before TLS begins a client *knocks*: it proves that it knows the token
(:mod:`sparkdl.wire.proving`). So a stranger never gets as far as TLS, whose handshake would cost
the server memory and time.
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
from sparkdl.wire.greeting import BusyError
from sparkdl.wire.proving import WELCOME, IncomingProof, prove

KNOCK = b"SPDK"
"""A client's first bytes, the hello of its proof."""
HANDSHAKE_S = 5.0
"""Seconds from the proof to the first words over TLS, in all."""
_MAX_NAME_BYTES = 255
_AGE, _LIFE = timedelta(days=1), timedelta(days=3650)
"""Clocks of hosts may differ. What ends a certificate's use is the end of its run."""


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate of one run, and its private key; no text of it shows the key.

    Args:
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
                expected="the package cryptography in the driver's Python", received=str(error),
                hint="pip install cryptography, which executors do not need; or encrypt=False",
            ) from error  # fmt: skip
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

    def server_context(self) -> ssl.SSLContext:
        """For a server, whose clients compare the certificate's fingerprint."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # nothing is resumed
        return self._completed(context)

    def peer_context(self, name: str, *, listens: bool) -> ssl.SSLContext:
        """For two processes of the run: both show this certificate and check the other's.

        All processes hold the same one. So that nobody between two hosts can join the connection
        of one pair to that of another, both ends also name theirs, in TLS' own negotiation (ALPN);
        :func:`require_name` compares the names after the handshake.

        Args:
            name: Name of the connection; at most 255 bytes count.
            listens: Whether this is the end that was connected to.
        """
        if listens:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.num_tickets = 0
        else:
            context = _plain_client()
        context.load_verify_locations(cadata=self.public)
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols([_shortened(name)])
        return self._completed(context)

    def _completed(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        text = (self.public + self.private).encode()
        descriptor = anonymous_file(len(text), "sparkdl-certificate")  # Python reads only files
        try:
            os.pwrite(descriptor, text, 0)
            context.load_cert_chain(f"/dev/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return context


def require_name(secured: ssl.SSLSocket | ssl.SSLObject, name: str, peer: str) -> None:
    """Checks after the handshake of a :meth:`Certificate.peer_context` which connection it is.

    Raises:
        AuthenticationError: The other end means another connection.
    """
    found = secured.selected_alpn_protocol() or ""
    if not hmac.compare_digest(found, _shortened(name)):
        raise AuthenticationError(
            f"{peer} could not prove itself", expected=f"the connection {name}",
            received=found or "no name",
            hint="something between the two hosts joins connections of other processes",
        )  # fmt: skip


def _shortened(name: str) -> str:
    return name[:_MAX_NAME_BYTES]


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


def connect_encrypted(connection: socket.socket, token: str, fingerprint: str) -> ssl.SSLSocket:
    """A client's end: knocks, and begins TLS. Takes ``connection`` over, also where it fails.

    Raises:
        AuthenticationError: The server does not know the token, or has another certificate.
        BusyError: It has no room now, or has ended a handshake that took long; another try may
            succeed.
        OSError, EOFError: The connection broke.
    """
    try:
        prove(connection, token.encode(), KNOCK, "the server")
        secured = _shake_hands(connection)
    except BaseException:
        connection.close()
        raise
    shown = secured.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(_fingerprint(shown), fingerprint):
        secured.close()
        raise AuthenticationError(
            "the server shows another certificate than that of this run",
            expected=f"SHA-256 fingerprint {fingerprint}", received=_fingerprint(shown),
            hint="something between this host and the driver answers in its place",
        )  # fmt: skip
    return secured


def _shake_hands(connection: socket.socket) -> ssl.SSLSocket:
    try:
        return _pinning_client().wrap_socket(connection)
    except (ConnectionError, ssl.SSLEOFError) as error:
        raise BusyError(
            "the server ended the TLS handshake", expected=f"a handshake within {HANDSHAKE_S:g} s",
            received=f"{type(error).__name__}: {error}",
            hint="was this host held up? does a firewall let TLS pass on the server's port?",
        ) from error  # fmt: skip


def first_knock(connection: socket.socket, token: str) -> IncomingProof:
    """A server's end of an accepted connection: what must come before TLS begins."""
    return IncomingProof(connection, token.encode(), len(KNOCK), lambda hello: hello == KNOCK)


class ServerEncryption:
    """TLS at the end of a server: one object for all of a run's ports. Thread-safe."""

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
            connection.sendall(WELCOME)
            secured = self._context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
            return secured, until
        except BaseException:
            connection.close()
            raise
