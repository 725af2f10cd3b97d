"""Fits with PySpark's TorchDistributor, from a DataFrame; started by torch_peers.py."""

from __future__ import annotations

import sys
from typing import Any

import peer_session
import peer_torch


def fit(frame: Any, path: str, train: Any, epochs: int, seed: int, marker: str) -> Any:
    """Each rank reads the rows from files: TorchDistributor has no public way for a DataFrame."""
    from pyspark.ml.torch.distributor import TorchDistributor

    frame.write.mode("overwrite").parquet(path)
    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    state, seconds = distributor.run(train, path, epochs, seed, marker)
    network = peer_torch.make_network(seed)
    network.load_state_dict(state)
    return network, seconds


class Peer(peer_session.Peer):
    def fit(self, epochs: int, seed: int, marker: str) -> tuple[Any, float]:
        path = f"{self.folder}/rows"
        return fit(self.frame, path, peer_torch.LOOPS[self.case], epochs, seed, marker)

    def loss(self, trained: Any) -> float:
        return peer_torch.loss_of(trained, self.x, self.y)


if __name__ == "__main__":
    peer_session.main(Peer, sys.argv[1:])
