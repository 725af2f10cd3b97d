"""``run(fn, distributed=...)``: frameworks that connect the ranks themselves find them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from processes import runs

import sparkdl
from sparkdl.errors import ConfigError, UnknownNameError, WorkerError


def test_torch_trains_one_model_on_two_ranks(spark: Any) -> None:
    pytest.importorskip("torch")

    def train() -> tuple[int, int, list[float], list[float]]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        torch.manual_seed(rank)  # they begin apart: DDP sends rank 0's weights
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        x = torch.arange(8.0).reshape(4, 2) * (rank + 1)
        model(x).sum().backward()
        slope = model.module.weight.grad.flatten().tolist()
        weights = model.module.weight.detach().flatten().tolist()
        dist.destroy_process_group()
        return rank, dist.is_initialized(), slope, weights

    told = sparkdl.run(train, num_workers=2, communicator="builtin", distributed="torch")
    assert [rank for rank, *_ in told] == [0, 1]
    # of the sum over rows: [12, 16] on rank 0, twice that on rank 1
    assert [slope for _, _, slope, _ in told] == [[18.0, 24.0]] * 2
    assert told[0][3] == told[1][3]


def test_jax_sees_the_devices_of_both_ranks(spark: Any) -> None:
    pytest.importorskip("jax")

    def look() -> tuple[int, int, list[float]]:
        import jax
        import numpy as np
        from jax.experimental import multihost_utils

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
            process_id=int(os.environ["JAX_PROCESS_ID"]),
        )
        mine = np.array([1.0 + jax.process_index()])
        gathered = multihost_utils.process_allgather(mine)
        found = jax.process_index(), jax.process_count(), np.ravel(gathered).tolist()
        jax.distributed.shutdown()
        return found

    told = sparkdl.run(look, num_workers=2, communicator="builtin", distributed="jax")
    assert told == [(0, 2, [1.0, 2.0]), (1, 2, [1.0, 2.0])]


def task() -> tuple[str, dict[str, Any]]:
    config = json.loads(os.environ["TF_CONFIG"])
    name = f"{config['task']['type']}/{config['task']['index']}"
    return name, {role: len(set(found)) for role, found in config["cluster"].items()}


def test_roles_are_in_tf_config_and_servers_end_with_the_others(spark: Any) -> None:
    def work() -> Any:
        name, cluster = task()
        while name.startswith("ps"):
            import time

            time.sleep(1)
        return name, cluster

    told = sparkdl.run(
        work, communicator="builtin", roles={"ps": 1, "worker": 1, "evaluator": 1, "chief": 1}
    )
    cluster = {"chief": 1, "worker": 1, "ps": 1}
    names = ("chief/0", "worker/0", None, "evaluator/0")
    assert told == [None if name is None else (name, cluster) for name in names]


def test_a_failure_of_a_server_is_raised(spark: Any) -> None:
    def work() -> None:
        name, _ = task()
        if name == "ps/0":
            raise ValueError("the table is broken")
        sparkdl.communicator().barrier()

    with pytest.raises(WorkerError, match="the table is broken") as caught:
        sparkdl.run(work, communicator="builtin", roles={"chief": 1, "ps": 1})
    assert caught.value.rank == 1


@pytest.mark.parametrize("role", ["ps", "evaluator"])
def test_a_killed_server_or_evaluator_is_one_error_and_nothing_is_left(
    spark: Any, tmp_path: Path, role: str
) -> None:
    def work(victim: str, folder: str) -> None:
        name, _ = task()
        Path(folder, name.replace("/", "-")).write_text(str(os.getpid()))
        while len(os.listdir(folder)) < 3:
            time.sleep(0.05)
        if name == f"{victim}/0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    begun = time.monotonic()
    with pytest.raises(WorkerError, match="SIGKILL"):
        sparkdl.run(
            work, (role, str(tmp_path)), communicator="builtin",
            roles={"worker": 1, "ps": 1, "evaluator": 1},
        )  # fmt: skip
    died = max(path.stat().st_mtime for path in tmp_path.iterdir())
    assert time.time() - died < 15
    assert time.monotonic() - begun < 120
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    deadline = time.monotonic() + 15
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank has outlived the run"
        time.sleep(0.1)


def test_the_chief_of_a_parameter_server_strategy_sends_work(spark: Any) -> None:
    def work() -> Any:
        import tensorflow as tf

        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        if resolver.task_type in ("worker", "ps"):
            server = tf.distribute.Server(
                resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc"
            )
            server.join()
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            total, weight = tf.Variable(0.0), tf.Variable(0.0)

        @tf.function
        def add():  # type: ignore[no-untyped-def]  # AutoGraph runs it without this module
            total.assign_add(2.0)

        @tf.function
        def learn():  # type: ignore[no-untyped-def]
            inputs = tf.constant([1.0, -2.0, 0.5])
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((weight * inputs - 3.0 * inputs) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))

        for _ in range(5):
            coordinator.schedule(add)
        for _ in range(100):
            coordinator.schedule(learn)
        coordinator.join()
        return total.device, float(total.numpy()), float(weight.numpy())

    told = sparkdl.run(work, communicator="builtin", roles={"chief": 1, "worker": 2, "ps": 1})
    assert told[0][1] == 10.0
    assert told[0][2] == pytest.approx(3.0, abs=1e-3), "the workers have trained the weight"
    assert "/job:ps/replica:0/task:0" in told[0][0]
    assert told[1:] == [None, None, None]


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"distributed": "mxnet"}, UnknownNameError, "torch"),
        ({"distributed": "torch", "roles": {"chief": 1}}, ConfigError, "TensorFlow"),
        ({"roles": {"boss": 1}}, UnknownNameError, "chief"),
        ({"roles": {"chief": 2}}, ConfigError, "cannot be given"),
        ({"roles": {"ps": 2}}, ConfigError, "cannot be given"),
        ({"roles": {"worker": 0}}, ConfigError, "at least 1"),
        ({"roles": {"chief": 1, "ps": 1}, "data": {1}}, ConfigError, "cannot be fed"),
        ({"roles": {"worker": 2}, "num_workers": 3}, ConfigError, "cannot be given"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        sparkdl.run(task, **arguments)
