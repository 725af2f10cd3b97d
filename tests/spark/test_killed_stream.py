"""A stream of 20 files whose driver is killed, twice, and started again: each file counts once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SCRIPT = Path(__file__).parent / "scripts" / "killed_stream.py"
ROWS, WIDTH, FILES = 16, 4, 20


def start(folder: Path, die_after: int = -1) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK", "SPARK_"))}
    with open(folder / "shown", "wb") as shown:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), str(die_after)],
            env=environment, stdin=subprocess.DEVNULL, stdout=shown, stderr=subprocess.STDOUT,
        )  # fmt: skip


def end_of(process: subprocess.Popen[bytes], folder: Path) -> int:
    try:
        return process.wait(timeout=500)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError((folder / "shown").read_text()[-4000:]) from None


def trained(folder: Path) -> list[int]:
    file = folder / "trained"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


@pytest.mark.slow
def test_a_killed_stream_trains_each_file_once(tmp_path: Path) -> None:
    """Killed after a micro-batch that Spark has not noted, and again somewhere in a micro-batch."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(FILES, ROWS, WIDTH)).astype("float32")
    y = (x.sum(-1) > 0).astype("int64")
    (tmp_path / "in").mkdir()
    for number in range(FILES):
        path = tmp_path / "in" / f"{number:02d}.parquet"
        features = pa.array(x[number].tolist(), pa.list_(pa.float32()))
        pq.write_table(pa.table({"features": features, "label": y[number]}), path)
        os.utime(path, (1_700_000_000 + number,) * 2)  # Spark takes files by their times
    keras.utils.set_random_seed(0)
    plain = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(8, activation="tanh"),
                              keras.layers.Dense(2, activation="softmax")])  # fmt: skip
    plain.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    plain.save(tmp_path / "model.keras")
    plain.fit(x.reshape(-1, WIDTH), y.reshape(-1), batch_size=ROWS, shuffle=False, verbose=0)

    first = start(tmp_path, die_after=6)
    assert end_of(first, tmp_path) == -signal.SIGKILL, (tmp_path / "shown").read_text()[-4000:]
    assert trained(tmp_path) == list(range(7))

    second = start(tmp_path)
    until = time.monotonic() + 500
    while len(trained(tmp_path)) < 12 and second.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert second.poll() is None, (tmp_path / "shown").read_text()[-4000:]
    second.kill()
    assert end_of(second, tmp_path) == -signal.SIGKILL

    third = start(tmp_path)
    assert end_of(third, tmp_path) == 0, (tmp_path / "shown").read_text()[-4000:]
    seen = trained(tmp_path)
    # One that is in the model may lack its line, if the kill fell between the two.
    assert seen == sorted(set(seen))
    assert len(seen) >= FILES - 1
    assert seen[-1] == FILES - 1
    with np.load(tmp_path / "weights.npz") as file:
        for mine, theirs in zip(file.values(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
