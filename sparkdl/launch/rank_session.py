"""A rank's session with the coordinator of a run that trains nothing: for meeting, for lines."""

from __future__ import annotations

import socket

from sparkdl.coordinator.session import Session, open_session
from sparkdl.errors import Cause, ResourceError, TransportError
from sparkdl.launch.task import RankContext
from sparkdl.transport.address import Endpoint
from sparkdl.transport.connection import Timeouts

CONNECT_TIMEOUT_S = 5.0
"""How long a rank tries to reach the coordinator."""


class DriverUnreachableError(ResourceError):
    """A rank cannot reach the coordinator. The others may: all must meet in another way."""

    cause = Cause.UNREACHED


def open_rank_session(endpoint: Endpoint, rank: RankContext) -> Session:
    """A session with the coordinator.

    Args:
        endpoint: Of the coordinator.
        rank: Whose session it is.

    Raises:
        DriverUnreachableError: It cannot be reached from here.
    """
    timeouts = Timeouts(connect_s=CONNECT_TIMEOUT_S, reconnect_s=CONNECT_TIMEOUT_S)
    try:
        return open_session(endpoint, rank=rank.rank, attempt=rank.attempt, timeouts=timeouts)
    except TransportError as error:
        problem = error.received
    # outside of the except: the failure is this rank's own, not a consequence of another's
    address = f"{endpoint.address.host}:{endpoint.address.port}"
    raise DriverUnreachableError(
        f"rank {rank.rank} on {socket.gethostname()} cannot reach the driver",
        expected=f"a connection to {address} within {CONNECT_TIMEOUT_S:g} s",
        received=problem,
        hint="server_bind, server_address and port say where the driver listens",
    )
