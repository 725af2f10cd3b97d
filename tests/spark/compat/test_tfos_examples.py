"""The examples in ``examples/tfos``: TensorFlowOnSpark's mnist programs on digits."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import mnist_data_setup
import mnist_inference
import mnist_pipeline
import mnist_spark
import mnist_spark_streaming
import mnist_tf
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digits(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CSV and TFRecord files, as the other programs read them."""
    folder = tmp_path_factory.mktemp("digits")
    mnist_data_setup.write(spark, str(folder), 4)
    return folder


def arguments(folder: Path, images_labels: Path, **more: Any) -> Namespace:
    """What the command line would give."""
    (folder / "model").mkdir(exist_ok=True)
    return Namespace(
        cluster_size=2, epochs=6, batch_size=32, learning_rate=0.005,
        images_labels=str(images_labels), model_dir=str(folder / "model"),
        export_dir=str(folder / "export"), output=str(folder / "output"), **more,
    )  # fmt: skip


def recognized(spark: Any, args: Namespace, digits: Path) -> float:
    """The share of the digits that the exported model recognizes, by ``mnist_inference``."""
    given = Namespace(**{**vars(args), "images_labels": str(digits / "tfr")})
    mnist_inference.run(spark, given)
    lines = [
        line.split()
        for part in sorted(Path(args.output).glob("part-*"))
        for line in part.read_text().splitlines()
    ]
    assert len(list(Path(args.output).glob("part-*"))) == args.cluster_size
    assert len(lines) == mnist_data_setup.NUM_DIGITS
    return sum(label == found for label, found in lines) / len(lines)


def test_spark_feeds_and_other_nodes_infer(spark: Any, digits: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path, digits / "csv")
    mnist_spark.run(spark, args)
    assert len(list((tmp_path / "model").glob("weights-*.weights.h5"))) == args.epochs
    assert recognized(spark, args, digits) > 0.9


def test_nodes_read_tfrecord_files(spark: Any, digits: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path, digits / "tfr")
    mnist_tf.run(spark, args)
    assert recognized(spark, args, digits) > 0.9


def test_a_pipeline(spark: Any, digits: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path, digits / "tfr")
    assert mnist_pipeline.run(spark, args) > 0.9
    lines = [
        json.loads(line)
        for part in Path(args.output).glob("part-*")
        for line in part.read_text().splitlines()
    ]
    assert len(lines) == mnist_data_setup.NUM_DIGITS
    assert {line["prediction"] for line in lines} == set(range(10))


def test_files_that_arrive(spark: Any, digits: Path, tmp_path: Path) -> None:
    arriving = tmp_path / "arriving"
    arriving.mkdir()
    parts = sorted((digits / "csv").glob("part-*"))
    args = arguments(tmp_path, arriving)
    cluster, run = mnist_spark_streaming.start(spark, args)
    for number in range(4):  # each file comes four times
        for part in parts:
            (tmp_path / "new").write_bytes(part.read_bytes())
            (tmp_path / "new").rename(arriving / f"{number}-{part.name}")
    deadline = time.monotonic() + 300
    while run.batches_done < 4 * len(parts):
        assert time.monotonic() < deadline
        assert run.exception is None
        time.sleep(0.2)
    run.stop(240)
    cluster.shutdown()
    assert recognized(spark, args, digits) > 0.85
