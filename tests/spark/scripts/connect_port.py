"""A port for a Spark Connect server of one's own: several tests may have one at the same time."""

from __future__ import annotations

import socket

from pyspark.sql.connect.client import DefaultChannelBuilder


def own_port() -> str:
    """A free port; from now on ``remote('local…')`` looks for its server there, not at 15002.

    It is the value of ``spark.connect.grpc.binding.port``.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    DefaultChannelBuilder.default_port = staticmethod(lambda: port)
    return str(port)
