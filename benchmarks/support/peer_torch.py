"""What users of PyTorch write to train the network of ``workload.py`` on two ranks.

The same functions run under Spark's TorchDistributor and under Ray Train. Lines that end with
``# benchmark`` are not a user's: ``torch_peers.py`` leaves them out when it counts.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import workload


def make_network(seed: int = 1) -> Any:
    """784-128-128-10 with the initial weights that Keras draws from (Glorot's), logits out."""
    import torch

    torch.manual_seed(seed)
    network = torch.nn.Sequential(
        torch.nn.Linear(784, 128), torch.nn.ReLU(),
        torch.nn.Linear(128, 128), torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )  # fmt: skip
    for layer in network[::2]:
        torch.nn.init.xavier_uniform_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return network


def loss_of(network: Any, x: Any, y: Any) -> float:
    """The mean loss on all rows."""
    import torch

    with torch.no_grad():
        told = network(torch.from_numpy(x))
        return float(torch.nn.functional.cross_entropy(told, torch.from_numpy(y).long()))


class Watch:
    """Times the loop of a rank, and kills rank 1 once, where that is asked for.

    Args:
        rank: Of this process.
        marker: A path; when it ends with ``.kill``, rank 1 makes the file after half of the
            epochs and kills itself, unless the file is there already. Rank 0 notes beside it, with
            the ending ``.epochs``, each epoch that it has done.
    """

    def __init__(self, rank: int, epochs: int, marker: str) -> None:
        self.rank, self.epochs, self.marker = rank, epochs, Path(marker)
        self._began = time.perf_counter()

    def after(self, epoch: int) -> None:
        if self.rank == 0:
            with self.marker.with_suffix(".epochs").open("a") as file:
                file.write(f"{epoch}\n")
        asked = self.marker.suffix == ".kill" and epoch == self.epochs // 2 - 1
        if self.rank == 1 and asked and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began


def train_with_loader(path: str, epochs: int, seed: int, marker: str) -> Any:
    """As Spark's documentation of TorchDistributor has it: a DataLoader with a sampler."""
    import pyarrow.parquet as parquet
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    table = parquet.read_table(path)
    features = table["features"].combine_chunks().flatten().to_numpy()
    x = torch.from_numpy(features.reshape(len(table), -1))
    y = torch.from_numpy(table["label"].to_numpy()).long()
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=workload.BATCH, sampler=sampler)
    model = DistributedDataParallel(make_network(seed))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = Watch(torch.distributed.get_rank(), epochs, marker)  # benchmark
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for rows, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(rows), labels).backward()
            optimizer.step()
        watch.after(epoch)  # benchmark
    seconds = watch.seconds  # benchmark
    return model.module.state_dict(), seconds


def train_tensors(path: str, epochs: int, seed: int, marker: str) -> Any:
    """The fastest loop: batches are cut out of tensors in memory, without a DataLoader."""
    import pyarrow.parquet as parquet
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():  # Ray Train has done so
        torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    table = parquet.read_table(path)
    features = table["features"].combine_chunks().flatten().to_numpy()
    x = torch.from_numpy(features.reshape(len(table), -1))
    y = torch.from_numpy(table["label"].to_numpy()).long()
    model = DistributedDataParallel(make_network(seed))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = Watch(rank, epochs, marker)  # benchmark
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed + epoch))
        own = order[rank : len(x) // ranks * ranks : ranks]  # as many on each rank
        for at in own.split(workload.BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[at]), y[at]).backward()
            optimizer.step()
        watch.after(epoch)  # benchmark
    seconds = watch.seconds  # benchmark
    return model.module.state_dict(), seconds


LOOPS = {"loader": train_with_loader, "tensors": train_tensors}
