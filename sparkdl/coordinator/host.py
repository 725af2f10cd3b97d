"""A coordinator in threads of this process: the driver's, where no store needs a process."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import replace

from sparkdl.coordinator.driver_client import DriverClient, open_driver
from sparkdl.coordinator.machine import Coordinator
from sparkdl.coordinator.settings import Settings
from sparkdl.coordinator.store import Store
from sparkdl.process.closing import Closing
from sparkdl.transport.address import Endpoint
from sparkdl.transport.listeners import Listeners, ListenOptions
from sparkdl.transport.server import Server
from sparkdl.wire.hosts import loopback_of
from sparkdl.wire.tls import Certificate


class CoordinatorHost(Closing):
    """Serves a coordinator over framed TCP, until closed.

    What goes through it is small (metrics, orders, log lines) or rare (a state per epoch), so it
    needs no process of its own.

    Args:
        settings: Number of workers and time limits.
        listen: Where the ranks connect.
        certificate: For TLS; None for no encryption.
        store: What the ranks share beside; None: nothing.

    Raises:
        ResourceError: No port is free, or the address is not this host's.
    """

    def __init__(
        self,
        settings: Settings,
        listen: ListenOptions,
        certificate: Certificate | None = None,
        store: Store | None = None,
    ) -> None:
        token = secrets.token_urlsafe(32)
        listeners = Listeners.bind(listen, None)
        self._server = Server(
            Coordinator(settings, store), token, listeners, settings.num_workers, certificate
        )
        fingerprint = "" if certificate is None else certificate.fingerprint
        self.endpoint = Endpoint(self._server.address, token, fingerprint)
        self._driver: DriverClient | None = None
        with contextlib.ExitStack() as failed:
            failed.callback(self._server.close)
            self._server.start()
            # by the address that is bound: the advertised one may not be reachable from here
            address = replace(self.endpoint.address, host=loopback_of(listen.bind_address))
            self._driver = open_driver(replace(self.endpoint, address=address))
            failed.pop_all()

    @property
    def driver(self) -> DriverClient:
        """The driver's connection."""
        assert self._driver is not None
        return self._driver

    def close(self) -> None:
        """Ends all connections and threads."""
        if self._driver is not None:
            self._driver.close()
        self._server.close()
