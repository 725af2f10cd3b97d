"""Fits with Ray Train, from a Spark DataFrame, in Ray's own virtual environment; started by
torch_peers.py."""

from __future__ import annotations

import sys
from typing import Any

import peer_session
import peer_torch
import workload


def train_with_ray_data(config: dict[str, Any]) -> None:
    """As Ray's documentation has it: Ray Data reads, shuffles and brings the batches."""
    import tempfile

    import ray.train.torch
    import torch

    torch.set_num_threads(1)
    model = ray.train.torch.prepare_model(peer_torch.make_network(config["seed"]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    shard = ray.train.get_dataset_shard("train")
    rank = ray.train.get_context().get_world_rank()
    watch = peer_torch.Watch(rank, config["epochs"], config["marker"])  # benchmark
    for _epoch in range(config["epochs"]):
        batches = shard.iter_torch_batches(
            batch_size=workload.BATCH, local_shuffle_buffer_size=SHUFFLED
        )
        for batch in batches:
            optimizer.zero_grad()
            told = model(batch["features"])
            torch.nn.functional.cross_entropy(told, batch["label"].long()).backward()
            optimizer.step()
        watch.after(_epoch)  # benchmark
    seconds = watch.seconds  # benchmark
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            torch.save(model.module.state_dict(), f"{folder}/model.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"seconds": seconds}, checkpoint=checkpoint)


def train_tensors(config: dict[str, Any]) -> None:
    """The loop of a user who lets each worker read the rows into its memory."""
    import tempfile

    import ray.train
    import torch

    state, seconds = peer_torch.train_tensors(**config)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(state, f"{folder}/model.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"seconds": seconds}, checkpoint=checkpoint)


def fit(frame: Any, folder: str, train: Any, config: dict[str, Any], attempts: int) -> Any:
    import ray.train.torch
    import torch

    frame.write.mode("overwrite").parquet(f"{folder}/rows")
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=f"{folder}/ray",
            failure_config=ray.train.FailureConfig(max_failures=attempts - 1),
        ),
        datasets=datasets_of(train, folder),
    )
    result = trainer.fit()
    network = peer_torch.make_network(config["seed"])
    with result.checkpoint.as_directory() as kept:
        network.load_state_dict(torch.load(f"{kept}/model.pt"))
    return network, result.metrics["seconds"]


def datasets_of(train: Any, folder: str) -> dict[str, Any]:
    import ray.data

    return {"train": ray.data.read_parquet(f"{folder}/rows")} if train in WITH_DATA else {}


SHUFFLED = 1_024
WITH_DATA = (train_with_ray_data,)
LOOPS = {"data": train_with_ray_data, "tensors": train_tensors}


class Peer(peer_session.Peer):
    def start(self) -> None:
        import ray

        # Two for the workers, two for the tasks that read: with two in all these would wait.
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @property
    def epochs(self) -> int:
        """One of Ray Data's takes as long as ten of the others."""
        return 1 if self.case == "data" else super().epochs

    def fit(self, epochs: int, seed: int, marker: str) -> tuple[Any, float]:
        config = {"epochs": epochs, "seed": seed, "marker": marker}
        if self.case == "tensors":
            config["path"] = f"{self.folder}/rows"
        attempts = 2 if marker.endswith(".kill") and "once" not in marker else 1
        return fit(self.frame, self.folder, LOOPS[self.case], config, attempts)

    def loss(self, trained: Any) -> float:
        return peer_torch.loss_of(trained, self.x, self.y)

    def stop(self) -> None:
        import ray

        ray.shutdown()


if __name__ == "__main__":
    peer_session.main(Peer, sys.argv[1:])
