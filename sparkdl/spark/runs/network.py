"""The addresses of a run's driver and ranks on this cluster, and their encryption."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from sparkdl.errors import ResourceError
from sparkdl.settings.network import Network, RankListening
from sparkdl.spark.session.running import is_connect, is_local
from sparkdl.wire.tls import Certificate

_SPARK_ENCRYPTS = ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled")
"""Either of Spark's settings encrypts what driver and executors tell each other."""


def driver_address(spark: Any) -> tuple[str, str]:
    """``(bind, advertised)`` addresses for a server on the driver: the narrowest that works.

    Raises:
        ResourceError: This is a Spark Connect client, and Spark's driver is another machine.
    """
    if is_local(spark):
        return "127.0.0.1", "127.0.0.1"
    host = str(spark.conf.get("spark.driver.host", "127.0.0.1"))
    bind = str(spark.conf.get("spark.driver.bindAddress", host))
    if is_connect(spark) and not _can_bind(bind):
        raise ResourceError(
            "the parameter server runs here, and executors are not known to reach this client",
            expected="a session on the cluster's driver, or a Network with server_bind and "
            "server_address",
            received=f"a Spark Connect client; Spark's driver is {host}",
            hint="mode='allreduce' works from here; or network=Network(server_bind=..., "
            "server_address=<an address of this machine that executors reach>)",
        )
    return bind, host


def listening_address(spark: Any, network: Network) -> tuple[str, str | None]:
    """``(bind, advertised)`` addresses of a run's server: the user's, or :func:`driver_address`."""
    if network.server_bind is not None:
        return network.server_bind, network.server_address
    bind, reachable = driver_address(spark)
    return bind, network.server_address or reachable


def rank_listening(spark: Any, network: Network) -> RankListening:
    """The addresses at which the ranks of a run listen for each other: as few as works."""
    bind, port = network.worker_bind, network.worker_port
    if bind not in (None, "0.0.0.0", "::"):
        return RankListening(bind, port)
    if is_local(spark):
        return RankListening(bind or "127.0.0.1", port, "127.0.0.1")
    return RankListening(bind, port, str(spark.conf.get("spark.driver.host", "") or ""))


def certificate_of(spark: Any, network: Network, *, pickles: bool = False) -> Certificate | None:
    """A certificate for a new run, if what the run sends between hosts is to be encrypted.

    ``encrypt='auto'`` encrypts nothing with a local master. On a cluster it does as Spark does with
    its own traffic, by which the run's secret reaches the executors; and what is unpickled where it
    arrives is always encrypted.

    Args:
        spark: The session.
        network: What the user asked.
        pickles: Whether ranks unpickle what others send them, as nodes of a program do.

    Raises:
        ConfigError: None can be made here.
    """
    return Certificate.make() if is_encrypted(spark, network, pickles=pickles) else None


def is_encrypted(spark: Any, network: Network, *, pickles: bool = False) -> bool:
    """Whether what a run sends between hosts is encrypted; see :func:`certificate_of`."""
    if network.encrypt != "auto":
        return network.encrypt
    settings = (str(spark.conf.get(name, "false")).lower() for name in _SPARK_ENCRYPTS)
    return not is_local(spark) and (pickles or "true" in settings)


def _can_bind(host: str) -> bool:
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
            return True
    return False
