"""Where Horovod's rendezvous server listens: by itself on all addresses of the host."""

from __future__ import annotations

import errno
import socket
import socketserver
import threading
from typing import Any

_ANY_ADDRESS = ""


def start_on(server: Any, http_server: Any, host: str) -> int:
    """Starts a rendezvous server on one address, as its own ``start()`` does on all.

    Where ``host`` is no address of this machine (ranks connect through a NAT), it listens on all.

    Args:
        server: A ``RendezvousServer`` that has not started.
        http_server: The module that has it, ``horovod.runner.http.http_server``.
        host: The address that ranks connect to.

    Returns:
        The port, any free one.

    Raises:
        OSError: No port is free.
    """

    class OnOneAddress(http_server.RendezvousHTTPServer):  # type: ignore[misc]
        def server_bind(self) -> None:
            """Without looking up the address' name, which may take seconds, and no one needs."""
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = self.server_address[:2]

    address = host if _is_of_this_machine(host) else _ANY_ADDRESS
    server._httpd = OnOneAddress((address, 0), http_server.RendezvousHandler, 0)
    server._listen_thread = threading.Thread(target=server._httpd.serve_forever, daemon=True)
    server._listen_thread.start()
    return int(server._httpd.server_address[1])


def _is_of_this_machine(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except socket.gaierror:
        return False
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return False
    return True
