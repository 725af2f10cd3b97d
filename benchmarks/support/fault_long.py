"""What lasts: fits over Spark Connect, a stream that is begun again, fits over a bad link.

    python benchmarks/support/fault_long.py connect --rounds 300
    python benchmarks/support/fault_long.py stream --minutes 20
    python benchmarks/support/fault_long.py link --delay-ms 50 --loss 0.01

``connect`` fits and predicts in one session, and prints how much the memory, descriptors and
threads of the driver and of Spark's Python workers grew with each round. ``stream`` writes a file a
second, trains on them with ``fit_stream``, kills the driver in the middle, begins again, and counts
how often each row was trained. ``link`` puts the driver and one worker on one host, the other
worker on another one, loses packets between them, and counts likewise. Each ends with status 1
if what it promises does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import fault_counts
import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ |= {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
MIB = 1 << 20
FRAMEWORK_BYTES = 250 << 20
MODES = ("asynchronous", "hogwild", "synchronous", "allreduce")
FILE_ROWS = 4 * fault_counts.BATCH * fault_counts.WORKERS


def open_session(builder: Any) -> Any:
    return (
        builder.config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "OFF")
        .config("spark.executorEnv.PYTHONPATH", str(ROOT))
        .getOrCreate()
    )


# -- fits over Spark Connect ----------------------------------------------------------------------


def used_by(process: psutil.Process) -> list[float]:
    """MiB of memory, descriptors, threads."""
    return [process.memory_info().rss / MIB, process.num_fds(), process.num_threads()]


def workers_use() -> dict[int, list[float]]:
    """Process -> what it uses, of Spark's Python workers that have a framework."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            told = used_by(process)
            if "pyspark.daemon" in " ".join(process.cmdline()) and told[0] * MIB > FRAMEWORK_BYTES:
                found[process.pid] = told
    return found


def growth(samples: list[list[float]], rounds: int) -> list[float]:
    """By least squares over all rounds but the first third; nothing of fewer than nine samples."""
    told = np.asarray([s for s in samples if s[0] >= rounds / 3])
    return [] if len(told) < 9 else [*np.polyfit(told[:, 0], told[:, 1:], 1)[0]]


def connect(rounds: int) -> bool:
    """Prints growth per round, now and then and at the end."""
    import keras
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F
    from pyspark.sql.connect.client import DefaultChannelBuilder

    from sparkdl import SparkModel

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # where remote('local[2]') looks for its server, else at 15002
    DefaultChannelBuilder.default_port = staticmethod(lambda: port)
    builder = SparkSession.builder.remote("local[2]")
    spark = open_session(builder.config("spark.connect.grpc.binding.port", str(port)))
    numbers = spark.range(0, 512, 1, 2)
    x = F.array(*(F.sin(F.col("id") * (n + 1.5)).cast("float") for n in range(8)))
    frame = numbers.select(x.alias("features"), (F.col("id") % 2).cast("int").alias("label"))
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(2, "softmax")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("adam", "sparse_categorical_crossentropy")
    spark_model = SparkModel(model, "synchronous", num_workers=2)
    driver, samples, began = psutil.Process(), dict[str, list[list[float]]](), time.monotonic()
    slopes: dict[str, list[float]] = {}
    for number in range(rounds):
        spark_model.fit(frame, epochs=1, verbose=0)
        rows = len(spark_model.predict(frame).collect())
        assert rows == 512, rows
        samples.setdefault("driver", []).append([number, *used_by(driver)])
        for pid, told in workers_use().items():
            samples.setdefault(f"worker {pid}", []).append([number, *told])
        done = number + 1
        if done % 50 and done < rounds:
            continue
        each_s = (time.monotonic() - began) / done
        print(f"{done} fits and predictions over Spark Connect, {each_s:.2f} s each", flush=True)
        slopes = {who: growth(sampled, done) for who, sampled in samples.items()}
        slopes = {who: slope for who, slope in slopes.items() if slope}
        for who, (mib, descriptors, threads) in slopes.items():
            print(
                f"{who}: {mib:+.3f} MiB, {descriptors:+.3f} descriptors, "
                f"{threads:+.3f} threads a round, {samples[who][-1][1]:.0f} MiB at last",
                flush=True,
            )
    spark.stop()
    seen = "driver" in slopes and len(slopes) > 1
    return seen and all(
        mib < 0.1 and abs(d) < 0.05 and abs(t) < 0.05 for mib, d, t in slopes.values()
    )


# -- a stream that is begun again -----------------------------------------------------------------


def train_on_stream(folder: Path, files: int) -> None:
    """The driver: trains until it was told to end and all files are in the model."""
    from pyspark.sql import SparkSession

    spark = open_session(SparkSession.builder.master("local-cluster[2,1,1024]"))
    reader = spark.readStream.schema("features array<int>, label float")
    stream = reader.parquet(str(folder / "in"))
    fault_counts.ROWS["allreduce"] = files * FILE_ROWS
    # a micro-batch that lies in two partitions is not dealt anew: a worker may have more steps
    spark_model = fault_counts.make_spark_model("", "allreduce", summed=True)
    batches, began = [0], time.monotonic()

    def note(batch_id: int, history: Any) -> None:
        if not batches[0]:
            print(f"first batch {batch_id} after {time.monotonic() - began:.1f} s", flush=True)
        batches[0] += 1
        (folder / "_used").write_text(json.dumps(used_by(psutil.Process())))
        (folder / "_used").replace(folder / "used")

    trigger = {"processingTime": "1 second"}
    training = spark_model.fit_stream(
        stream, checkpoint_dir=str(folder / "run"), trigger=trigger, on_batch=note
    )
    while not (folder / "end").exists():
        if training.await_termination(1):
            raise SystemExit("the stream ended")
    training.stop()
    last = spark_model.fit_stream(
        stream, checkpoint_dir=str(folder / "run"), trigger={"availableNow": True}, on_batch=note
    )
    if not last.await_termination(300):
        raise SystemExit("the rest of the stream takes too long")
    (folder / "counts").write_text(json.dumps(fault_counts.found(last.model, 1)))
    print(f"{batches[0]} batches", flush=True)
    spark.stop()


def stream(minutes: float) -> bool:
    """Prints how often the rows of all files were trained."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = int(minutes * 60)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        (folder / "in").mkdir()

        def start() -> subprocess.Popen[bytes]:
            command = [sys.executable, __file__, "stream-driver", str(folder), str(files)]
            child = subprocess.Popen(command, start_new_session=True)
            stack.callback(child.wait)
            stack.callback(lambda: child.poll() is None and os.killpg(child.pid, signal.SIGKILL))
            return child

        driver, used = start(), list[list[float]]()
        for number in range(files):
            ids = np.arange(number * FILE_ROWS, (number + 1) * FILE_ROWS, dtype=np.int32)
            features = pa.array([[i] for i in ids.tolist()], pa.list_(pa.int32()))
            label = pa.array(np.zeros(FILE_ROWS, np.float32))
            hidden = folder / "in" / f"_{number:05d}"
            pq.write_table(pa.table({"features": features, "label": label}), hidden)
            hidden.rename(folder / "in" / f"{number:05d}.parquet")
            if number == files // 2:
                driver.kill()
                driver.wait()
                driver = start()
                (folder / "used").unlink(missing_ok=True)
            if (folder / "used").exists():
                used.append([number, *json.loads((folder / "used").read_text())])
            time.sleep(1.0)
            if driver.poll() is not None:
                print(f"the driver ended with {driver.returncode}")
                return False
        (folder / "end").touch()
        code = driver.wait(timeout=600)
        counts = json.loads((folder / "counts").read_text()) if code == 0 else {}
    late = np.asarray([u for u in used if u[0] > 0.6 * files])
    if len(late) > 10:
        slope = np.polyfit(late[:, 0], late[:, 1:], 1)[0]
        print(
            "the driver grew by {:+.3f} MiB, {:+.3f} descriptors, {:+.3f} threads a file".format(
                *slope
            )
        )
    print(f"{minutes:g} minutes, {files} files, the driver killed once: {counts}")
    return bool(counts) and not counts["rows_off"]


# -- a bad link -----------------------------------------------------------------------------------


def fit_over_link(master: str, host: str) -> None:
    """The driver: a fit in each mode."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).config("spark.driver.host", host)
    builder = builder.config("spark.executor.cores", "1").config("spark.cores.max", "2")
    spark = open_session(builder.config("spark.executor.memory", "1g"))
    for mode in MODES:
        fault_counts.ROWS[mode] = 1 << (13 if mode in ("asynchronous", "hogwild") else 10)
        frame, began = fault_counts.make_frame(spark, mode), time.monotonic()
        spark_model = fault_counts.make_spark_model("", mode)
        spark_model.fit(frame, epochs=4, verbose=0)
        told = fault_counts.found(spark_model.model, 4)
        print(
            json.dumps({"mode": mode, "seconds": round(time.monotonic() - began, 1), **told}),
            flush=True,
        )
    spark.stop()


def link(delay_ms: float, loss: float) -> bool:
    """Prints, for each mode, how often the rows were trained."""
    import network
    import pyspark

    spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    deploy = "org.apache.spark.deploy."
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        hosts, how = stack.enter_context(
            network.two_hosts(1e9, delay_ms / 2000, loss=loss, mtu=1500)
        )
        print(f"{delay_ms:g} ms there and back, {loss:.1%} of the packets lost: {how}", flush=True)
        environment = {**os.environ, "SPARK_WORKER_DIR": f"{folder}/work"}
        one = hosts[0]
        master = f"spark://{one.address}:7077"
        commands = [(one, [f"{deploy}master.Master", "--host", one.address, "--port", "7077"])]
        commands += [
            (h, [f"{deploy}worker.Worker", "--host", h.address, "--cores", "1", "--memory", "1g",
                 master])
            for h in hosts
        ]  # fmt: skip
        inside = ["ip", "netns", "exec"]
        logs = []
        for number, (host, command) in enumerate(commands):
            logs.append(stack.enter_context(open(f"{folder}/{number}.log", "wb")))
            process = subprocess.Popen(
                [*inside, host.name, spark_class, *command], stdout=logs[-1], stderr=logs[-1],
                env={**environment, "SPARK_LOCAL_IP": host.address},
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.terminate)
        deadline = time.monotonic() + 120
        while Path(logs[0].name).read_text().count("Registering worker") < 2:
            if time.monotonic() > deadline:
                raise SystemExit(Path(logs[0].name).read_text()[-2000:])
            time.sleep(0.2)
        ran = subprocess.run(
            [*inside, one.name, sys.executable, __file__, "link-driver", master, one.address],
            env={**environment, "SPARK_LOCAL_IP": one.address}, stdout=subprocess.PIPE, text=True,
            check=False, timeout=560,
        )  # fmt: skip
    print(ran.stdout)
    told = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return len(told) == len(MODES) and not any(t["rows_off"] for t in told)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "what", choices=("connect", "stream", "link", "stream-driver", "link-driver")
    )
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--delay-ms", type=float, default=50)
    parser.add_argument("--loss", type=float, default=0.01)
    asked = parser.parse_args()
    if asked.what == "stream-driver":
        train_on_stream(Path(asked.arguments[0]), int(asked.arguments[1]))
        return 0
    if asked.what == "link-driver":
        fit_over_link(*asked.arguments)
        return 0
    holds = {
        "connect": lambda: connect(asked.rounds),
        "stream": lambda: stream(asked.minutes),
        "link": lambda: link(asked.delay_ms, asked.loss),
    }[asked.what]()
    print("holds" if holds else "DOES NOT HOLD", flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
