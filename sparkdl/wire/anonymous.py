"""Memory with a descriptor and without a name, so that nothing is left behind."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import tempfile

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


def receive_file(connection: socket.socket, size_bytes: int, sender: str) -> mmap.mmap:
    """Maps the memory whose descriptor comes over a Unix socket.

    Raises:
        OSError, EOFError: The sender is gone, or sends none.
        ProtocolError: It is of another size.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    try:
        if data != b"m" or len(descriptors) != 1:
            raise EOFError("it has sent no memory")
        received = os.fstat(descriptors[0]).st_size
        if received != size_bytes:
            raise ProtocolError(
                f"{sender} shares memory of another size", expected=f"{size_bytes} bytes",
                received=f"{received} bytes", hint="do both run the same version of sparkdl?",
            )  # fmt: skip
        return mmap.mmap(descriptors[0], size_bytes)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def map_file(descriptor: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Maps a descriptor as bytes; the array keeps the mapping alive, the descriptor may close."""
    return np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)
