"""Run by test_files.py in a process of its own: files through Spark Connect."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
os.environ["PYTHONPATH"] = ROOT
sys.path.insert(0, ROOT)
sys.path.insert(0, os.path.join(ROOT, "tests", "unit", "files"))


def main() -> None:
    import keras
    import numpy as np
    import pytest
    from connect_port import own_port
    from keras_zip import keras_zip
    from pyspark.sql import SparkSession

    import sparkdl
    from sparkdl.errors import ResourceError
    from sparkdl.files import storage
    from sparkdl.files.checkpoints import Checkpoints
    from sparkdl.files.run_state import RunState
    from sparkdl.progress.events import TrainingBegan
    from sparkdl.spark.files import CHUNK_BYTES, ConnectFileSystem
    from sparkdl.tracking.event_files import Timeline

    folder = tempfile.mkdtemp()
    behind = Path(folder) / "behind"
    behind.mkdir()
    spark = (
        SparkSession.builder.remote("local[2]")
        .config("spark.connect.grpc.binding.port", own_port())
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.warehouse.dir", f"{folder}/warehouse")
        .config("spark.hadoop.fs.viewfs.mounttable.test.link./models", f"file:{behind}")
        .getOrCreate()
    )
    root = "viewfs://test/models"
    try:
        path = f"{root}/a.bin"
        assert not storage.exists(path)
        storage.check_writable(path)
        assert not storage.exists(path)
        large = np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 17)
        for content in (b"", large, b"shorter"):
            storage.write_bytes(path, content)
            assert storage.exists(path)
            assert storage.read_bytes(path) == content
        storage.check_writable(path)
        assert storage.read_bytes(path) == b"shorter"
        storage.delete(path)
        assert not storage.exists(path)
        with pytest.raises(ResourceError, match="no file"):
            storage.read_bytes(path)
        with pytest.raises(ResourceError, match="cannot be read"):
            storage.read_bytes(f"{root}/missing.bin")
        for content in (large, b"from another program"):
            (behind / "real.bin").write_bytes(content)
            assert storage.read_bytes(f"{root}/real.bin") == content

        rows = [(0, 2, b"one of two chunks")]
        spark.createDataFrame(rows, "part int, parts int, content binary").write.parquet(
            f"{root}/torn.bin"
        )
        with pytest.raises(ResourceError, match="not written whole"):
            storage.read_bytes(f"{root}/torn.bin")

        checkpoints = Checkpoints.at(f"{root}/runs")
        assert checkpoints is not None
        assert checkpoints.restore() is None
        for epoch in (1, 2, 3):
            checkpoints.save(keras_zip(), RunState(epoch))
        assert Checkpoints(f"{root}/runs").restore().state.epoch == 3  # type: ignore[union-attr]
        spark.createDataFrame(rows, "part int, parts int, content binary").write.mode(
            "overwrite"
        ).parquet(f"{root}/runs/epoch-00003.keras")
        with pytest.warns(RuntimeWarning, match="not written whole"):
            assert checkpoints.restore().state.epoch == 2  # type: ignore[union-attr]
        Checkpoints.at(f"{root}/runs").save(keras_zip(), RunState(1))  # type: ignore[union-attr]
        assert not storage.exists(f"{root}/runs/epoch-00002.keras")
        checkpoints.clear()
        assert not checkpoints.exist

        # a folder that another program wrote: a SavedModel
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        model.export(str(behind / "served"), verbose=False)
        assert storage.exists(f"{root}/served/variables")
        assert storage.list_files(f"{root}/served", ".pb") == [
            f"{root}/served/{name}" for name in ("fingerprint.pb", "saved_model.pb")
        ]
        with pytest.raises(ResourceError, match="cannot be read"):
            storage.list_files(f"{root}/nowhere", "")
        x = np.random.default_rng(1).normal(size=(5, 3)).astype("float32")
        predicted = sparkdl.predict(f"{root}/served", x)
        np.testing.assert_allclose(predicted, model.predict(x, verbose=0), atol=1e-5)
        timeline = Timeline(f"{root}/timeline.json")
        for act in (
            lambda: sparkdl.SparkModel(model).export(f"{root}/elsewhere"),
            lambda: timeline.handle(TrainingBegan(0, 1)),
        ):
            with pytest.raises(ResourceError, match="no file that other programs can read"):
                act()
        assert [p.name for p in behind.glob("[et]*")] == ["torn.bin"]

        # what has no scheme stays with the client, whose Spark has a local warehouse
        storage.write_bytes(f"{folder}/local.bin", b"here")
        assert Path(f"{folder}/local.bin").read_bytes() == b"here"
        assert isinstance(storage._resolve("dbfs:/a")[0], ConnectFileSystem)
        print("CONNECT FILES OK")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
