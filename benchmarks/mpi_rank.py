"""One rank of the MPI contender of all_reduce.py, which starts it by ``mpiexec``.

It needs only NumPy and mpi4py, so that it can run in a virtual environment that has only these.
"""

from __future__ import annotations

import multiprocessing.connection
import sys
import time

import numpy as np
from mpi4py import MPI


def main() -> None:
    world = MPI.COMM_WORLD
    pipe = multiprocessing.connection.Client(sys.argv[1], authkey=bytes.fromhex(sys.argv[2]))
    pipe.send(world.rank)
    while (order := pipe.recv()) is not None:
        size_bytes, repeats = order
        array = np.zeros(max(1, size_bytes // 4), np.float32)
        world.Allreduce(MPI.IN_PLACE, array)
        world.Barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            world.Allreduce(MPI.IN_PLACE, array)
        pipe.send((time.perf_counter() - start) / repeats)


if __name__ == "__main__":
    main()
