"""The addresses of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["auto", "http", "socket", "shm"]


@dataclass(frozen=True)
class Address:
    """The addresses of a server; they travel to the workers together with the token.

    Args:
        http: ``http://host:port`` of the Flask app: always there, for /health and /metrics.
        port: Its port; 0 for none.
        uds: Path of the Unix socket; empty for none.
        host_id: Of the server's host, so that workers know whether they share it.
    """

    http: str
    host: str = ""
    port: int = 0
    uds: str = ""
    host_id: str = ""
    mode: Mode = "auto"


@dataclass(frozen=True)
class Endpoint:
    """A server and the secret of its run: all that a rank needs to connect.

    Args:
        token: The run's secret; no text of this object shows it.
        fingerprint: SHA-256 of the server's certificate; empty where TCP is not encrypted.
    """

    address: Address
    token: str = field(repr=False)
    fingerprint: str = ""
