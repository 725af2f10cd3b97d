"""Driver on a machine of its own: the doctor, a fit in each mode, ``run``; all in one port range.

python namespaces_fit.py MASTER DRIVER_ADDRESS SERVER_ADDRESS RELAY_ADDRESS LOOPBACK_NAME SCRIPT \
    RESULT

RELAY_ADDRESS passes connections to the ports 7306 and 7307 on to the driver. LOOPBACK_NAME is the
driver's, and for the other machines one of their own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from sparkdl import Network

os.environ["PYSPARK_PYTHON"] = sys.executable

import keras
import numpy as np
from pyspark.sql import SparkSession

import sparkdl


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def own_address(known: str) -> str:
    known = known.strip("[]")
    family = socket.AF_INET6 if ":" in known else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((known, 9))  # sends nothing: the route says which address is one's own
        return str(probe.getsockname()[0])


def listening() -> list[int]:
    """Ports on which this machine waits for others: what its firewall must let in."""
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            # 127.0.0.1, itself and inside IPv6, and ::1
            if state == "0A" and not address.endswith(("0100007F", "0" * 24 + "01000000")):
                ports.add(int(port, 16))
    return sorted(ports)


class Listening(keras.callbacks.Callback):
    """Keeps the driver's ports of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.ports: set[int] = set()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.ports.update(listening())


def open_session(master: str, host: str, bind: str, script: str) -> SparkSession:
    """A session whose driver others find at ``host``; ``script`` tells an executor's GPUs."""
    return (
        SparkSession.builder.master(master)
        .config("spark.driver.host", host)
        .config("spark.driver.bindAddress", bind)
        .config("spark.executor.memory", "512m")
        .config("spark.cores.max", "4")
        .config("spark.task.cpus", "2")
        .config("spark.executor.resource.gpu.amount", "2")
        .config("spark.executor.resource.gpu.discoveryScript", script)
        .config("spark.driver.port", "7320")
        .config("spark.blockManager.port", "7330")
        .config("spark.port.maxRetries", "9")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )


def main() -> None:
    master, address, server, relay, name, script, result = sys.argv[1:]
    anywhere = "::" if ":" in server else "0.0.0.0"
    spark = open_session(master, address, anywhere, script)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 4)).astype("float32")
    y = x @ np.array([1.0, -2.0, 3.0, 0.5], "float32")
    rows = [(a.tolist(), float(b)) for a, b in zip(x, y, strict=True)]
    frame = spark.createDataFrame(rows, "features array<float>, label float")
    found: dict[str, Any] = {"doctor": {}, "losses": {}, "weights": {}}

    def examine(case: str, timeout_s: float = 30.0, **options: Any) -> None:
        asked = {
            "server_bind": anywhere, "server_address": address.strip("[]"),
            "worker_port": "7310-7319", **options,
        }  # fmt: skip
        report = sparkdl.doctor(
            spark, mode="allreduce", num_workers=2, timeout_s=timeout_s, network=Network(**asked)
        )
        found["doctor"][case] = report.to_dict()

    examine("healthy", port="7300-7309", server_address=server)
    examine("relay", port=7306, server_address=relay)
    examine("relay left out", port=7306, timeout_s=20.0)
    examine("port outside of the range", port=7999, timeout_s=20.0)
    examine("ranks outside of the range", port="7300-7309", worker_port="7400-7409", timeout_s=20.0)
    examine("loopback", port="7300-7309", server_address=name)
    own = Listening()
    ways: dict[str, dict[str, Any]] = {
        "asynchronous": {"port": "7300-7309"},
        "synchronous": {"network": Network("7300-7309", anywhere, server)},
        "hogwild": {"network": Network("7306-7307", anywhere, relay)},
        "allreduce": {
            "communicator": "builtin",
            "network": Network("7300-7309", worker_port="7310-7319"),
        },
    }
    for mode, options in ways.items():
        spark_model = sparkdl.SparkModel(make_model(), mode=mode, num_workers=2, **options)
        # Every step takes all rows: the order in which a shuffle delivers them changes nothing.
        history = spark_model.fit(frame, epochs=2, batch_size=128, verbose=0, callbacks=[own])
        found["losses"][mode] = history.history["loss"]
        found["weights"][mode] = [w.tolist() for w in spark_model.model.get_weights()]
    small = sparkdl.SparkModel(
        make_model(), mode="synchronous", resources={"cpus": 1, "gpu": 1}, port="7300-7309"
    )
    small.fit(frame, verbose=0)
    assert small.summary is not None
    found["workers"] = len(small.summary.rank_rows)
    found["gpus"] = sorted(gpus for given in small.summary.gpus.values() for gpus in given)
    # Horovod's Gloo listens on any free port and cannot be told otherwise.
    network = Network("7300-7309", worker_port="7310-7319")
    asked: dict[str, Any] = {"network": network, "communicator": "builtin"}
    found["driver ports"] = sorted(own.ports)
    found["worker ports"] = sparkdl.run(listening, num_workers=2, **asked)
    found["addresses"] = sparkdl.run(own_address, (address,), num_workers=2, **asked)
    spark.stop()

    spark = open_session(
        master, name, anywhere, script
    )  # which executors look for on their own machine
    examine("loopback for Spark", port="7300-7309", timeout_s=8.0)
    with open(result, "w") as file:
        json.dump(found, file)
    spark.stop()


if __name__ == "__main__":
    main()
