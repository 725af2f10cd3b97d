"""Memory with a descriptor and without a name, so that nothing is left behind."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ProtocolError

_FIXED_SIZE = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW of <linux/fcntl.h>


def anonymous_file(size_bytes: int, name: str) -> int:
    """Descriptor of ``size_bytes`` of zeroed shared memory without a name in any file system."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        descriptor, path = tempfile.mkstemp(prefix=name)
        os.unlink(path)
    try:
        os.ftruncate(descriptor, size_bytes)
        if hasattr(fcntl, "F_ADD_SEALS") and hasattr(os, "memfd_create"):
            # who shrinks memory that another process maps would end that process by SIGBUS
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_received(
    data: bytes, descriptors: Sequence[int], size_bytes: int, sender: str, hint: str
) -> mmap.mmap:
    """Maps the memory whose descriptor ``socket.recv_fds`` gave, beside one byte.

    Raises:
        ProtocolError: There is none, or it is of another size, which ``hint`` explains.
    """
    try:
        if not data or len(descriptors) != 1:
            raise ProtocolError(
                f"{sender} has sent no memory", expected="one descriptor of shared memory",
                received=f"{len(descriptors)} descriptors",
            )  # fmt: skip
        received = os.fstat(descriptors[0]).st_size
        if received != size_bytes:
            raise ProtocolError(
                f"{sender} shares memory of another size", expected=f"{size_bytes} bytes",
                received=f"{received} bytes", hint=hint,
            )  # fmt: skip
        return mmap.mmap(descriptors[0], size_bytes)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def map_file(descriptor: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Maps a descriptor as bytes; the array keeps the mapping alive, the descriptor may close."""
    return np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)
