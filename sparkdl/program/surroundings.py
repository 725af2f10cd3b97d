"""``Surroundings``: where a program runs, as the part that launches it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparkdl.launch.task import Launcher
from sparkdl.network import THIS_HOST, PortSpec, RankListening
from sparkdl.transport.address import Endpoint
from sparkdl.wire.tls import Certificate


@dataclass(frozen=True)
class Surroundings:
    """The place in which a program runs: it starts the nodes, and says how they are reached.

    Args:
        launcher: Starts them.
        bind: Address that the launching process listens on.
        advertised: Address that nodes connect to; None: the one that is listened on.
        ports: Of the launching process, see :func:`sparkdl.network.ports_of`.
        listening: Where the nodes listen for each other.
        certificate: For TLS between hosts; None for no encryption.
        endpoint: Of the coordinator where the nodes meet; None: they meet by the launcher.
        look: Is called again and again while the nodes run, and once when they have ended.
    """

    launcher: Launcher
    bind: str = "127.0.0.1"
    advertised: str | None = None
    ports: PortSpec = 0
    listening: RankListening = THIS_HOST
    certificate: Certificate | None = None
    endpoint: Endpoint | None = None
    look: Callable[[], None] = lambda: None
