"""Local tables that are too large for the driver's JVM: through files, with the same result."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from spark_models import make_mlp

import sparkdl
from sparkdl import Feeding, SparkModel
from sparkdl.spark.forms import shipped


@pytest.fixture
def small_jvm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The driver's JVM as if it had 1,000 bytes; where the files are written."""
    monkeypatch.setattr(shipped, "_SMALL_BYTES", 0)
    monkeypatch.setattr(shipped, "_GROUP_BYTES", 10_000)
    monkeypatch.setattr(shipped, "_jvm_memory", lambda spark: 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def tables_in(folder: Path) -> list[Path]:
    return list(folder.glob("sparkdl-files-*/rows.parquet"))


def test_a_fit_of_arrays_is_that_of_plain_keras_and_leaves_no_files(
    spark: Any, small_jvm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    frame_of_file = shipped._frame_of_file
    monkeypatch.setattr(
        shipped, "_frame_of_file", lambda *args: written.append(1) or frame_of_file(*args)
    )
    x = np.random.default_rng(0).normal(size=(100, 8, 8)).astype("float32")
    y = np.arange(100) % 10
    plain, model = (_flat_model() for _ in range(2))
    plain.fit(x, y, batch_size=100, epochs=2, shuffle=False, verbose=0)
    spark_model = SparkModel(model, mode="synchronous", num_workers=2, batch_size=50)
    spark_model.fit((x, y), epochs=2, verbose=0)
    assert written
    for mine, expected in zip(spark_model.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-5)
    assert not tables_in(small_jvm)


def _flat_model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Flatten(), keras.layers.Dense(10, activation="softmax")]
    model = keras.Sequential([keras.Input((8, 8)), *layers])
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    return model


def test_rows_of_pandas_are_the_same_and_gone_after_evaluate(spark: Any, small_jvm: Path) -> None:
    x = np.random.default_rng(0).normal(size=(100, 64)).astype("float32")
    y = np.arange(100) % 10
    frame = pd.DataFrame({"features": list(x), "label": y})
    spark_model = SparkModel(make_mlp(), num_workers=2)
    expected = spark_model.model.evaluate(x, y, verbose=0)[0]
    assert spark_model.evaluate(frame)["loss"] == pytest.approx(expected, rel=1e-5)
    assert not tables_in(small_jvm)


def test_a_lazy_result_keeps_its_files(spark: Any, small_jvm: Path) -> None:
    def doubled(batches: Any) -> Any:
        for batch in batches:
            yield batch["n"] * 2

    given = pd.DataFrame({"n": np.arange(1000)})
    result = sparkdl.inference(doubled, given, "twice bigint")
    assert len(tables_in(small_jvm)) == 1
    rows = result.collect()
    assert sorted(row["n"] for row in rows) == list(range(1000))
    assert all(row["twice"] == 2 * row["n"] for row in rows)


def test_columns_may_have_names_that_files_cannot_have(spark: Any, small_jvm: Path) -> None:
    names = ["n", "N", "a b", "{x;y}"]
    table = pa.table([pa.array([number] * 200) for number in range(4)], names=names)
    frame = shipped.ship_table(spark, table)
    assert tables_in(small_jvm)
    assert frame.columns == names
    assert [tuple(row) for row in frame.distinct().collect()] == [(0, 1, 2, 3)]


def test_rows_of_a_run_are_gone_after_it(spark: Any, small_jvm: Path) -> None:
    def total(feed: Any) -> int:
        return sum(int(batch["n"].sum()) for batch in feed.batches(100))

    given = pd.DataFrame({"n": np.arange(1000)})
    options: dict[str, Any] = {"num_workers": 2, "communicator": "builtin"}
    ranks = sparkdl.run(total, data=given, feeding=Feeding(uneven="keep"), **options)
    assert sum(ranks) == 499_500
    assert not tables_in(small_jvm)


@pytest.mark.slow
def test_images_larger_than_the_jvm_are_trained() -> None:
    """602 MB with a JVM of 512 MB: Java's OutOfMemoryError before."""
    script = Path(__file__).parent / "scripts" / "large_arrays.py"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "PYTHONPATH": str(root), "SPARK_LOCAL_IP": "127.0.0.1"},
    )  # fmt: skip
    assert "TRAINED\n" in done.stdout, done.stderr[-3000:]
