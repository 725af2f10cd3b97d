"""A server that is killed at ten moments of a fit with 10^7 rows in a table: how soon it goes on.

    python benchmarks/recovery.py [--rows 10000000] [--dim 16] [--servers 2] [--kills 10]

The loss is minus the sum of the rows of a batch, and the rate makes each step add 1: so after the
fit each number of a row says how often its id was trained. After an epoch, and a time of its own,
one of the servers is killed; the fit goes back to its last checkpoint. Printed are the seconds from
each kill to the first batches beyond those that were trained before it (a part of an epoch is
trained again within them), and whether all rows count as if nothing
had happened. The servers share this machine's processors with the workers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import tempfile
import threading
import time
import warnings
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
import keras
import numpy as np
import psutil
from pyspark.sql import SparkSession

import sparkdl
from sparkdl import Limits, Network, SparkModel
from sparkdl.progress.events import EpochProgressed

BATCH, WORKERS = 64, 2


class Killer(keras.callbacks.Callback):
    """Kills a server after each epoch, as long as there are kills left."""

    def __init__(self, kills: int) -> None:
        super().__init__()
        self.left, self.random = kills, random.Random(0)
        self.killed_at: float | None = None
        self.seconds: list[float] = []
        self.epochs: set[int] = set()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.left and epoch not in self.epochs:
            self.epochs.add(epoch)
            self.left -= 1
            timer = threading.Timer(self.random.uniform(0.0, 4.0), self.kill)
            timer.daemon = True
            timer.start()

    def kill(self) -> None:
        servers = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if "sparkdl.ps.server" in " ".join(process.cmdline()):
                    servers.append(process)
        shards = sorted(servers, key=lambda p: p.pid)[:-1]  # the last one is the coordinator
        if not shards:
            return
        os.kill(self.random.choice(shards).pid, signal.SIGKILL)
        self.killed_at = time.monotonic()

    def told(self, event: Any) -> None:
        """A sink of the fit."""
        now = time.monotonic()
        if not isinstance(event, EpochProgressed) or not event.batches or self.killed_at is None:
            return
        if now - self.killed_at > 0.5:  # what was trained before the kill is told at once
            self.seconds.append(now - self.killed_at)
            self.killed_at = None
            print(f"went on after {self.seconds[-1]:.1f} s", flush=True)


def summed(y_true: Any, y_pred: Any) -> Any:
    return -keras.ops.sum(y_pred, axis=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--trained", type=int, default=1 << 17)
    args = parser.parse_args()
    spark = (
        SparkSession.builder.master(f"local-cluster[{WORKERS},1,1024]")
        .config("spark.driver.host", "127.0.0.1").config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF").config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )  # fmt: skip
    x = keras.Input((1,), dtype="int64")
    layer = sparkdl.layers.ServedEmbedding(
        args.dim,
        table="counters",
        initializer="zeros",
        optimizer=keras.optimizers.SGD(float(BATCH)),
    )
    zeros = keras.ops.cast(x, "float32") * 0.0  # some dense weights, which add nothing
    added = keras.layers.Dense(args.dim, use_bias=False)(zeros)
    model = keras.Model(x, keras.layers.Flatten()(layer(x)) + added)
    model.compile("sgd", summed)
    every = (np.arange(args.rows, dtype=np.int64) * 2_654_435_761) % (1 << 40)
    layer.load(every, np.zeros((args.rows, args.dim), np.float32))
    ids = every[:: args.rows // args.trained][: args.trained, None]
    killer, epochs = Killer(args.kills), args.kills + 2
    spark_model = SparkModel(
        model, "asynchronous", num_workers=WORKERS, batch_size=BATCH,
        rule={"name": "downpour", "damping": False}, network=Network(num_servers=args.servers),
        limits=Limits(max_restarts=args.kills),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.monotonic()
        spark_model.fit(
            (ids, np.zeros(len(ids), np.float32)), epochs=epochs, verbose=0,
            checkpoint_dir=folder, callbacks=[killer], sinks=killer.told,
        )  # fmt: skip
        took = time.monotonic() - began
        table = spark_model.tables["counters"]
        found = table.pull(ids[:, 0])
        off = int(np.sum((found != epochs).any(axis=1)))
        total, expected = table.get("sum"), float(epochs) * len(ids) * args.dim
    print(f"{args.rows:,} rows of {args.dim}, {args.servers} servers; the fit took {took:.0f} s")
    print("| kills | went on after, median | longest | rows off | sum of all rows | expected |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {len(killer.seconds)} | {statistics.median(killer.seconds):.1f} s "
        f"| {max(killer.seconds):.1f} s | {off} | {total:,.0f} | {expected:,.0f} |"
    )
    spark.stop()


if __name__ == "__main__":
    main()
