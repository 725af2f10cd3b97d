"""``TF_CONFIG``: how TensorFlow's own distribution strategies learn who the ranks are."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator

import numpy as np

from sparkdl.collective.builtin.sockets import own_address
from sparkdl.collective.communicator import Communicator

_NAME = "TF_CONFIG"


@contextlib.contextmanager
def tf_config(communicator: Communicator) -> Iterator[None]:
    """Within, ``TF_CONFIG`` names every rank's address and says which one this process is.

    Rank 0 is the chief, the others are workers 0, 1, ... Each rank takes a free port, which is
    closed again before TensorFlow can listen on it: another process might take it in between.

    Args:
        communicator: Of all ranks; it carries the addresses.
    """
    alone = communicator.local_size == communicator.size
    with socket.create_server(("", 0)) as held:
        host = "127.0.0.1" if alone else own_address()
        mine = f"[{host}]" if ":" in host else host
        told = np.frombuffer(f"{mine}:{held.getsockname()[1]}".encode(), np.uint8)
        addresses = [bytes(a).decode() for a in communicator.all_gather(told)]
        communicator.barrier()  # no port is free again before all have one
    before = os.environ.get(_NAME)
    os.environ[_NAME] = config_of(addresses, communicator.rank)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_NAME, None)
        else:
            os.environ[_NAME] = before


def config_of(addresses: list[str], rank: int) -> str:
    """The value of ``TF_CONFIG`` on a rank.

    Args:
        addresses: ``host:port`` of every rank.
        rank: Which one.

    >>> config_of(["a:1", "b:2"], 1)
    '{"cluster": {"chief": ["a:1"], "worker": ["b:2"]}, "task": {"type": "worker", "index": 0}}'
    """
    cluster = {"chief": addresses[:1]}
    if len(addresses) > 1:
        cluster["worker"] = addresses[1:]
    task: dict[str, str | int] = {"type": "worker", "index": rank - 1}
    if rank == 0:
        task = {"type": "chief", "index": 0}
    return json.dumps({"cluster": cluster, "task": task})
