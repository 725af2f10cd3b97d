"""Memory that a server and a worker share: neither can take it from under the other."""

from __future__ import annotations

import fcntl
import os
import sys

import numpy as np
import pytest

from sparkdl.wire.anonymous import anonymous_file, map_file


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seals are Linux's")
@pytest.mark.parametrize("size", [0, 512, 8192])
def test_shared_memory_has_one_size_for_good(size: int) -> None:
    """A peer that shrank it would end the process that maps it by SIGBUS."""
    descriptor = anonymous_file(4096, "sparkdl-test")
    peer = os.dup(descriptor)  # as a worker has it
    mine = map_file(descriptor, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(peer, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(peer, fcntl.F_ADD_SEALS, 0x8)  # F_SEAL_WRITE: no further seals either
    os.pwrite(peer, b"abc", 4093)
    assert np.array_equal(mine[-3:], np.frombuffer(b"abc", np.uint8))
    os.close(peer)
    os.close(descriptor)
