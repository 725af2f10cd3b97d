"""The memory that the ranks of a host share: none can take it from under the others."""

from __future__ import annotations

import fcntl
import os
import socket
import sys

import pytest

from sparkdl.collective.builtin.shared import share_mapping
from sparkdl.collective.builtin.waiting import Watch
from sparkdl.errors import TransportError


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seals are Linux's")
@pytest.mark.parametrize("size", [0, 512, 8192])
def test_the_memory_of_a_host_has_one_size_for_good(size: int) -> None:
    """A rank that shrank it would end the others by SIGBUS."""
    near, far = socket.socketpair()
    with near, far, share_mapping(0, [4, 7], {1: near}, 4096, Watch(4, 10.0)) as mine:
        _, (peer,), _, _ = socket.recv_fds(far, 1, 1)  # as the other rank gets it
        try:
            with pytest.raises(PermissionError):
                os.ftruncate(peer, size)
            with pytest.raises(PermissionError):
                fcntl.fcntl(peer, fcntl.F_ADD_SEALS, 0x8)  # F_SEAL_WRITE: no further seals either
            os.pwrite(peer, b"abc", 4093)
            assert mine[-3:] == b"abc"
        finally:
            os.close(peer)


def test_both_ranks_of_a_host_map_the_same_memory() -> None:
    near, far = socket.socketpair()
    with (
        near,
        far,
        share_mapping(0, [4, 7], {1: near}, 4096, Watch(4, 10.0)) as mine,
        share_mapping(1, [4, 7], {0: far}, 4096, Watch(7, 10.0)) as theirs,
    ):
        mine[:3] = b"abc"
        assert theirs[:3] == b"abc"


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_that_has_ended_is_named(index: int) -> None:
    """One with a wrong token ends while the others already share."""
    near, far = socket.socketpair()
    with near:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1" + bytes(7))
        near.send(b"unread")  # so that its end resets the connection
        far.close()
        with pytest.raises(TransportError, match=f"rank {[7, 4][index]} is gone"):
            share_mapping(index, [4, 7], {1 - index: near}, 4096, Watch([4, 7][index], 10.0))
