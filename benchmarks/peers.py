"""sparkdl against Elephas 7.3 (``make bench-peers``), each in its own virtual environment.

    python benchmarks/peers.py [--repeats 5] [--only epoch batch] [--servers http socket]

The same network, data, cluster and epochs; the wall time of the whole ``fit`` call, alternately.
Each repeat has a seed of its own for the initial weights. Speeds are medians, losses (of the
trained model on all rows) means with the lowest and the highest.
For both libraries the second fit of a session is timed: the first includes TensorFlow's import in
the executors, and the JVM has not compiled its own code yet.
Elephas has a server over HTTP (its default) and one over sockets. The one over sockets is so slow
batch by batch that it gets a tenth of the rows, for one epoch, and its loss is not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
PEERS = os.path.join(ROOT, ".venv-peers")
sys.path.insert(0, HERE)
import workload  # noqa: E402


def install() -> None:
    """Makes Elephas' virtual environment if there is none."""
    python = os.path.join(PEERS, "bin", "python")
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", PEERS], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "elephas==7.3.0"], check=True)


def elephas(frequency: str, server: str, rows: int, epochs: int, seed: int) -> dict[str, float]:
    install()
    python = os.path.join(PEERS, "bin", "python")
    script = os.path.join(HERE, "support", "peer_elephas.py")
    environment = {k: v for k, v in os.environ.items() if k != "PYSPARK_PYTHON"}
    done = subprocess.run(
        [python, script, "fit", frequency, server, str(rows), str(epochs), str(seed)],
        env={**environment, "SPARK_LOCAL_IP": "127.0.0.1"}, capture_output=True, text=True,
        timeout=550, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line[7:]))
    raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])


def sparkdl(frequency: str, rows: int, epochs: int, seed: int) -> dict[str, float]:
    """Runs sparkdl in a new process too, so that both libraries have the same start-up."""
    code = f"""
import sys, json, time; sys.path.insert(0, {HERE!r})
import workload
from sparkdl import SparkModel
x, y = workload.make_data(); spark = workload.start_spark(2)
frame = workload.make_frame(spark, x[:{rows}], y[:{rows}], 2)
for _ in range(2):
    model = SparkModel(workload.make_model(seed={seed}), 'asynchronous', {frequency!r},
                       num_workers=2, batch_size=workload.BATCH, seed={seed})
    t = time.perf_counter(); model.fit(frame, epochs={epochs}, verbose=0)
    seconds = time.perf_counter() - t
loss = model.model.evaluate(x, y, verbose=0)[0]
print('RESULT ' + json.dumps({{'rows_s': {rows * epochs} / seconds, 'loss': loss}}))
spark.stop()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=550, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line[7:]))
    raise RuntimeError(done.stderr[-4000:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=["epoch", "batch"])
    parser.add_argument("--servers", nargs="*", default=["http", "socket"])
    args = parser.parse_args()
    rows = []
    for frequency, our_frequencies in (("epoch", ("auto", "epoch")), ("batch", ("batch",))):
        if frequency not in args.only:
            continue
        theirs: dict[str, list[dict[str, float]]] = {server: [] for server in args.servers}
        ours: dict[str, list[dict[str, float]]] = {name: [] for name in our_frequencies}
        for seed in range(1, args.repeats + 1):
            for server, results in theirs.items():
                few = (frequency, server) == ("batch", "socket")
                size = (workload.ROWS // 10, 1) if few else (workload.ROWS, workload.EPOCHS)
                results.append(elephas(frequency, server, *size, seed))
                if few:
                    results[-1].pop("loss")
                time.sleep(1)
            for name, results in ours.items():
                results.append(sparkdl(name, workload.ROWS, workload.EPOCHS, seed))
                time.sleep(1)
        for server, results in theirs.items():
            speed = workload.median([r["rows_s"] for r in results])
            losses = [r["loss"] for r in results if "loss" in r]
            for name, own in ours.items():
                mine = workload.median([r["rows_s"] for r in own])
                rows.append([
                    f"asynchronous, {frequency}, {server} (sparkdl: {name})",
                    f"{speed:,.0f}", spread(losses),
                    f"{mine:,.0f}", spread([r["loss"] for r in own]),
                    f"{mine / speed:.1f}",
                ])  # fmt: skip
    print(workload.table(
        ["", "Elephas rows/s", "loss after", "sparkdl rows/s", "loss after", "×"], rows
    ))  # fmt: skip


def spread(losses: list[float]) -> str:
    """Mean, lowest and highest; empty for none."""
    if not losses:
        return ""
    return f"{statistics.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"


if __name__ == "__main__":
    main()
