"""Whether MLflow's tracking server answers, asked before MLflow waits for it by itself.

MLflow's client tries a request eight times, for four minutes, while the driver waits.
"""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from sparkdl.errors import TransportError

_PORTS = {"http": 80, "https": 443}
_CONNECT_S = 3.0


def require_server(uri: str, patience_s: float) -> None:
    """Returns if something listens where the server should be, or the URI is of another kind.

    Args:
        uri: MLflow's tracking URI.
        patience_s: For how long to try again: a server may be starting anew.

    Raises:
        TransportError: Nothing does.
    """
    parts = urlsplit(uri)
    port = _PORTS.get(parts.scheme)
    if port is None or not parts.hostname:
        return
    if parts.scheme in getproxies() and not proxy_bypass(parts.hostname):
        return  # the proxy reaches it, and perhaps this process does not
    address = parts.hostname, parts.port or port
    until = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection(address, _CONNECT_S).close()
            return
        except OSError as error:
            if time.monotonic() < until:
                time.sleep(0.5)
                continue
            raise TransportError(
                "MLflow's tracking server does not answer",
                expected=f"a server at {parts.hostname}:{address[1]}",
                received=str(error),
                hint="mlflow.set_tracking_uri, MLFLOW_TRACKING_URI; mlflow server starts one",
            ) from error
