"""What a step of the network takes in one process: plain PyTorch, and Keras on PyTorch.

    python benchmarks/peer_step.py

Batch 64, SGD, one thread, no exchange: what of the rates in torch_peers.py is the framework's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

os.environ["KERAS_BACKEND"] = "torch"
import keras
import peer_torch
import torch
import workload


def time_step(action: Callable[[], object], steps: int) -> float:
    """Milliseconds per step, of the best of three; a first call is not counted."""
    action()
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return min(taken) / steps * 1e3


def main() -> None:
    torch.set_num_threads(1)
    x, y = workload.make_data(200 * workload.BATCH)
    features, labels = torch.from_numpy(x), torch.from_numpy(y).long()
    network = peer_torch.make_network()
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    batches = list(zip(features.split(64), labels.split(64), strict=True))
    model = workload.make_model()
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")

    def plain() -> None:
        for rows, wanted in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(rows), wanted).backward()
            optimizer.step()

    def with_keras() -> None:
        for batch in batches:
            model.train_step(batch)

    rows = [
        ["plain PyTorch", f"{time_step(plain, len(batches)):.2f}"],
        ["Keras' train_step on PyTorch", f"{time_step(with_keras, len(batches)):.2f}"],
    ]
    print(workload.table(["", "ms per step"], rows))


if __name__ == "__main__":
    main()
