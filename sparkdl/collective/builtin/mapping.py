"""One anonymous memory mapping that all ranks of a host share."""

from __future__ import annotations

import mmap
import os
import select
import socket
from collections.abc import Mapping, Sequence

from sparkdl.collective.builtin.waiting import SLICE_MS, Watch, peer_gone
from sparkdl.errors import ProtocolError, TransportError
from sparkdl.wire.anonymous import anonymous_file


def share_mapping(
    index: int,
    ranks: Sequence[int],
    links: Mapping[int, socket.socket],
    size: int,
    watch: Watch,
) -> mmap.mmap:
    """The host's mapping of ``size`` bytes; index 0 makes it and hands it to the others.

    It has no name (a memfd), so nothing is left behind when all ranks are killed.

    Args:
        index: This rank among those of the host.
        ranks: The ranks of the host, as the communicator numbers them.
        links: A connected Unix socket to each other index.
        size: Bytes, the same on all ranks.
        watch: Deadline of the wait for it.

    Raises:
        TransportError: A peer ended meanwhile, or the system has no anonymous shared memory.
        ProtocolError: Another rank shares memory of another size.
    """
    if index == 0:
        return _make(ranks, links, size)
    return _receive(index, ranks, links[0], size, watch)


def _make(ranks: Sequence[int], links: Mapping[int, socket.socket], size: int) -> mmap.mmap:
    if not hasattr(os, "memfd_create"):
        raise TransportError(
            "cannot share memory between ranks",
            expected="a system with memfd_create (Linux)",
            received=os.uname().sysname,
            hint="communicator='horovod', or a mode with a server",
        )
    number = anonymous_file(size, "sparkdl")
    try:
        for other, link in links.items():
            try:
                socket.send_fds(link, [b"m"], [number])
            except OSError as error:
                raise peer_gone(ranks[0], ranks[other], error) from error
        return mmap.mmap(number, size)
    finally:
        os.close(number)


def _receive(
    index: int, ranks: Sequence[int], link: socket.socket, size: int, watch: Watch
) -> mmap.mmap:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    watch.start()
    while not poll.poll(SLICE_MS):
        watch.look([ranks[0]])
    try:
        data, numbers, _, _ = socket.recv_fds(link, 1, 1)
    except OSError as error:
        raise peer_gone(ranks[index], ranks[0], error) from error
    try:
        if data != b"m" or len(numbers) != 1:
            raise peer_gone(ranks[index], ranks[0], "it has sent no memory")
        received = os.fstat(numbers[0]).st_size
        if received != size:
            raise ProtocolError(
                f"rank {ranks[0]} shares memory of another size",
                expected=f"{size} bytes",
                received=f"{received} bytes",
                hint="do all ranks run the same version of sparkdl?",
            )
        return mmap.mmap(numbers[0], size)
    finally:
        for number in numbers:
            os.close(number)
