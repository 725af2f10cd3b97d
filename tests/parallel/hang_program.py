"""One rank of the tests of what goes wrong in the middle: ``FOLDER RANK SIZE COMMUNICATOR WHAT``.

After some steps the last rank does what ``WHAT`` says; rank 0 prints what it gets, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from exact_program import TOKEN, Meeting

TIMEOUT_S = 6.0


def main() -> None:
    import keras

    from sparkdl.collective.communicator import Member, make_communicator
    from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
    from sparkdl.data import Batches, rows_from_numpy
    from sparkdl.learner import make_learner

    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    communicator_name, what = sys.argv[4:6]
    x = np.random.default_rng(rank).normal(size=(64, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    learner = make_learner(model)
    window = next(iter(Batches(rows_from_numpy(x, (x[:, 0] > 0).astype(int)), 8).stacks(0, 8)))
    connector = make_communicator(communicator_name, rank=rank, timeout_s=TIMEOUT_S)
    texts = Meeting(folder, rank, size).all_gather(connector.prepare().to_json())
    told: dict[str, Any] = {"error": None}
    began = time.monotonic()
    communicator = connector.connect([Member.from_json(t) for t in texts], TOKEN)
    try:
        synchronizer = AllReduceGradientSynchronizer(communicator, learner.layout)
        synchronizer.start(learner, scale=8.0)
        for step in range(8):
            if step == 4 and rank == size - 1:
                if what == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif what == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                else:  # another branch, which takes its time
                    time.sleep(600)
            began = time.monotonic()
            synchronizer.train(learner, window)
    except Exception as error:
        told = {"error": type(error).__name__, "text": str(error)}
    finally:
        told["seconds"] = time.monotonic() - began
        communicator.close()
    told["close_s"] = time.monotonic() - began - told["seconds"]
    if rank == 0:
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
