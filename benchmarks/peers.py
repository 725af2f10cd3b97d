"""sparkdl against Elephas 7.3 (``make bench-peers``), each in its own virtual environment.

    python benchmarks/peers.py [--repeats 3] [--only epoch batch]

The same network, data, cluster and epochs; the wall time of the whole ``fit`` call, alternately.
A small fit comes first in both, so that TensorFlow's import in the executors is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
PEERS = os.path.join(ROOT, ".venv-peers")
sys.path.insert(0, HERE)
import workload  # noqa: E402


def elephas(frequency: str, rows: int, epochs: int) -> dict[str, float]:
    python = os.path.join(PEERS, "bin", "python")
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", PEERS], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "elephas==7.3.0"], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYSPARK_PYTHON"}
    done = subprocess.run(
        [python, os.path.join(HERE, "peer_elephas.py"), frequency, str(rows), str(epochs)],
        env={**environment, "SPARK_LOCAL_IP": "127.0.0.1"}, capture_output=True, text=True,
        timeout=550, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line[7:]))
    raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])


def sparkdl(frequency: str, rows: int, epochs: int) -> dict[str, float]:
    """In a fresh process too, so that both pay the same start-up."""
    code = f"""
import sys, json, time; sys.path.insert(0, {HERE!r})
import workload
from sparkdl import SparkModel
x, y = workload.make_data(); spark = workload.start_spark(2)
frame = workload.make_frame(spark, x[:{rows}], y[:{rows}], 2)
model = SparkModel(workload.make_model(), 'asynchronous', {frequency!r}, num_workers=2,
                   batch_size=workload.BATCH)
few = workload.make_frame(spark, x[:256], y[:256], 2)
SparkModel(workload.make_model(), num_workers=2, batch_size=workload.BATCH).fit(few, verbose=0)
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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=["epoch", "batch"])
    args = parser.parse_args()
    count, epochs, rows = workload.ROWS, workload.EPOCHS, []
    for peer_frequency, ours_frequency in (("epoch", "auto"), ("batch", "batch")):
        if peer_frequency not in args.only:
            continue
        ours, theirs = [], []
        for _ in range(args.repeats):
            theirs.append(elephas(peer_frequency, count, epochs))
            ours.append(sparkdl(ours_frequency, count, epochs))
            time.sleep(1)
        speed = workload.median([r["rows_s"] for r in theirs])
        mine = workload.median([r["rows_s"] for r in ours])
        rows.append([
            f"asynchronous, {peer_frequency} (sparkdl: {ours_frequency})",
            f"{speed:,.0f}", f"{workload.median([r['loss'] for r in theirs]):.3f}",
            f"{mine:,.0f}", f"{workload.median([r['loss'] for r in ours]):.3f}",
            f"{mine / speed:.1f}",
        ])  # fmt: skip
    print(workload.table(
        ["", "Elephas rows/s", "loss after", "sparkdl rows/s", "loss after", "×"], rows
    ))  # fmt: skip


if __name__ == "__main__":
    main()
