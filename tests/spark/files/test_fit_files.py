"""``fit`` on paths of files, which the workers read by themselves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import feather
from spark_models import make_mlp

import sparkdl
from sparkdl import Limits, SparkModel
from sparkdl.errors import DataError
from sparkdl.progress.events import EpochEnded
from sparkdl.spark.session.versions import table_of_frame


@pytest.fixture(scope="module")
def files(spark: Any, digits_df: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    df = digits_df.select("features", digits_df.label.cast("bigint").alias("label"))
    df.repartition(3).write.parquet(f"{folder}/rows.parquet")
    sparkdl.write_tfrecords(df.repartition(3), f"{folder}/rows.tfrecord")
    rows = table_of_frame(df)
    (folder / "rows.arrow").mkdir()
    for number in range(3):
        part = rows.slice(number * len(rows) // 3, len(rows) // 3)
        feather.write_feather(part, f"{folder}/rows.arrow/part-{number}.feather", chunksize=100)
    return folder


@pytest.mark.parametrize(
    ("kind", "mode"),
    [  # who reads a file does not know the mode
        ("parquet", "synchronous"),
        ("arrow", "allreduce"),
        ("tfrecord", "synchronous"),
        pytest.param("parquet", "allreduce", marks=pytest.mark.slow),
        pytest.param("arrow", "synchronous", marks=pytest.mark.slow),
        pytest.param("tfrecord", "allreduce", marks=pytest.mark.slow),
    ],
)
def test_files_train_as_their_frame_does(spark: Any, files: Path, kind: str, mode: str) -> None:
    path = str(files / f"rows.{kind}")
    model = SparkModel(make_mlp(), mode=mode, num_workers=2, limits=Limits(memory_budget_mb=1))
    history = model.fit(path, epochs=4, batch_size=32, validation_split=0.2, verbose=0).history
    assert history["loss"][-1] < 0.6 * history["loss"][0]
    assert history["val_loss"][-1] < history["val_loss"][0]
    scores = model.evaluate(path)
    assert scores["loss"] < history["loss"][0]
    assert np.isfinite(scores["loss"])


def test_files_to_validate_on(spark: Any, files: Path) -> None:
    model = SparkModel(make_mlp(), mode="asynchronous", num_workers=2)
    path = str(files / "rows.parquet" / "*.parquet")
    history = model.fit(path, epochs=2, validation_data=path, verbose=0).history
    assert len(history["val_loss"]) == 2


def test_a_column_of_files_chooses_the_rows_to_validate_on(
    spark: Any, digits_df: Any, tmp_path: Path
) -> None:
    path = f"{tmp_path}/rows.parquet"
    held = digits_df.select("features", "label", (digits_df.id % 4 == 0).alias("held"))
    held.write.parquet(path)
    model = SparkModel(make_mlp(), mode="synchronous", num_workers=2)
    history = model.fit(path, epochs=1, validation_data="held", verbose=0).history
    assert model.summary is not None
    assert model.summary.rows == held.where("NOT held").count()
    scores = model.evaluate(spark.read.parquet(path).where("held"))
    assert history["val_loss"] == pytest.approx([scores["loss"]], rel=1e-5)


def test_files_larger_than_the_budget_go_through_disk(
    spark: Any, digits_df: Any, tmp_path: Path
) -> None:
    """Some 2.5 MiB of rows for each worker, whose budget is 1 MiB; every row counts once."""
    rows = digits_df.select("features", digits_df.label.cast("bigint").alias("label"))
    rows.union(rows).union(rows).repartition(1).write.parquet(f"{tmp_path}/rows.parquet")
    many = [f"{tmp_path}/rows.parquet"] * 3
    spark.read.parquet(*many).repartition(4).write.parquet(f"{tmp_path}/many.parquet")
    count = 9 * digits_df.count()
    model = SparkModel(
        make_mlp(), mode="allreduce", num_workers=2, limits=Limits(memory_budget_mb=1)
    )
    trained: list[int] = []

    def hear(event: Any) -> None:
        if isinstance(event, EpochEnded):
            trained.append(event.rows)

    path = f"{tmp_path}/many.parquet"
    history = model.fit(path, epochs=2, batch_size=32, verbose=0, sinks=[hear]).history
    assert history["loss"][1] < 0.5 * history["loss"][0]
    assert trained == [count] * 2


def test_a_fit_of_files_goes_on_where_it_ended(spark: Any, files: Path, tmp_path: Path) -> None:
    path = str(files / "rows.parquet")
    options: dict[str, Any] = {"batch_size": 32, "verbose": 0}
    folder = str(tmp_path / "checkpoints")

    def made() -> SparkModel:
        return SparkModel(make_mlp(), mode="allreduce", num_workers=2, seed=3)

    whole = made()
    losses = whole.fit(path, epochs=4, **options).history["loss"]
    made().fit(path, epochs=2, checkpoint_dir=folder, **options)
    resumed = made()
    history = resumed.fit(path, epochs=4, checkpoint_dir=folder, resume=True, **options)
    assert history.epoch == [2, 3]
    np.testing.assert_allclose(history.history["loss"], losses[2:], rtol=1e-5)
    for ours, theirs in zip(resumed.model.get_weights(), whole.model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_file_that_breaks_off_is_the_error_of_the_fit(
    spark: Any, files: Path, tmp_path: Path
) -> None:
    """The driver, which reads the files' ends alone, finds nothing wrong."""
    for path in (files / "rows.parquet").glob("*.parquet"):
        shutil.copy(path, tmp_path)
    broken = max(tmp_path.glob("*.parquet"))
    content = bytearray(broken.read_bytes())
    middle = len(content) // 2
    content[8:middle] = b"\xff" * (middle - 8)
    broken.write_bytes(content)
    model = SparkModel(make_mlp(), mode="synchronous", num_workers=2)
    with pytest.raises(DataError, match=f"{broken.name} cannot be read"):
        model.fit(str(tmp_path), epochs=1, verbose=0)
