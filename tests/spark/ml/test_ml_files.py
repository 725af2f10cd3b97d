"""Saving and loading of stages: what is whole, what is refused, and whose code runs."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from stage_cases import X, builder, quick, table

from sparkdl import Network
from sparkdl.errors import ConfigError, ModelError
from sparkdl.learner.archives.archive import archive_of_bytes, model_bytes
from sparkdl.ml import (
    KerasClassificationModel,
    KerasClassifier,
    KerasRegressor,
    KerasTransformer,
    trusted,
)
from sparkdl.spark.ml import files


class Doubled(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x * 2


def with_own_layer() -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), Doubled(), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    return model


def metadata(path: Path) -> Path:
    return next(f for f in (path / "metadata").iterdir() if f.name.startswith("part-"))


def rewrite(path: Path, **changes: Any) -> None:
    file = metadata(path)
    saved = json.loads(file.read_text())
    for name, value in changes.items():
        saved["sparkdl" if name in ("format", "model") else name] |= (
            {name: value} if name in ("format", "model") else value
        )
    file.write_text(json.dumps(saved))
    (file.parent / f".{file.name}.crc").unlink(missing_ok=True)


def test_an_estimator_with_everything_json_can_hold(spark: Any, tmp_path: Path) -> None:
    estimator = KerasRegressor(
        model=builder(), epochs=3, rule={"name": "downpour"}, learningRate=0.1, mode="hogwild",
        optimizer=keras.optimizers.SGD(0.5), loss="mse", metrics=["mae"], seed=5,
        network=Network("7000-7010"), featuresCol=["a", "b"], checkpointDir="/c", maxRestarts=5,
    )  # fmt: skip
    estimator.save(f"{tmp_path}/e")
    loaded = KerasRegressor.load(f"{tmp_path}/e")
    assert loaded.uid == estimator.uid
    assert {p.name: v for p, v in loaded.extractParamMap().items()} == {
        p.name: v for p, v in estimator.extractParamMap().items()
    }
    assert loaded._parts.network == Network()  # where the driver listens is never for a file to say
    made = loaded._parts.make_model(None, None)
    assert float(made.optimizer.learning_rate) == 0.5
    for one, other in zip(made.get_weights(), builder().get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_code_runs_only_if_the_reader_is_told_so(spark: Any, tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Noise:
        """Leaves a file when it is unpickled."""

        def __reduce__(self) -> Any:
            return Path.touch, (ran,)

    evil = KerasClassifier(model=builder(), decoder=lambda value: value)
    evil._parts = replace(evil._parts, decoder=Noise())
    evil.save(f"{tmp_path}/evil")
    for load in (
        lambda: KerasClassifier.load(f"{tmp_path}/evil"),
        lambda: KerasClassifier.read().customObjects({"a": 1}).load(f"{tmp_path}/evil"),
    ):
        with pytest.raises(ConfigError, match=r"(?s)code of decoder.*read\(\).trusted\(\)"):
            load()
    Pipeline(stages=[evil]).save(f"{tmp_path}/pipeline")
    with pytest.raises(ConfigError, match=r"sparkdl.ml.trusted\(\)"):
        Pipeline.load(f"{tmp_path}/pipeline")
    assert not ran.exists()
    with trusted():
        Pipeline.load(f"{tmp_path}/pipeline")
    assert ran.exists()
    with pytest.raises(ConfigError):  # outside, it is as before
        Pipeline.load(f"{tmp_path}/pipeline")


def test_builders_and_callbacks_come_back(spark: Any, tmp_path: Path) -> None:
    estimator = quick(
        model=None, modelBuilder=builder, builderArgs={"units": 5},
        callbacks=[keras.callbacks.EarlyStopping("loss", patience=7)],
    )  # fmt: skip
    estimator.write().overwrite().save(f"{tmp_path}/e")
    loaded = KerasClassifier.read().trusted().load(f"{tmp_path}/e")
    assert loaded._parts.make_model(loaded.getBuilderArgs(), None).layers[0].units == 5
    assert loaded._parts.callbacks[0].patience == 7


def test_layers_of_the_users_own(spark: Any, tmp_path: Path) -> None:
    transformer = KerasTransformer(model=with_own_layer(), outputCol="out")
    transformer.save(f"{tmp_path}/t")
    with pytest.raises(ConfigError, match=r"(?s)code of objects.*customObjects"):
        KerasTransformer.load(f"{tmp_path}/t")
    want = with_own_layer().predict(X, verbose=0)
    for reader in (
        KerasTransformer.read().trusted(),
        KerasTransformer.read().customObjects({"Doubled": Doubled}),
    ):
        scored = reader.load(f"{tmp_path}/t").transform(table(spark)).orderBy("id")
        got = np.array([row.out for row in scored.select("out").collect()])
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_lambdas_in_a_file_do_not_run(spark: Any, tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    transformer = KerasTransformer(model=model)
    content = tmp_path / "lambda.keras"
    keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: x + 1)]).save(content)
    archive = archive_of_bytes(content.read_bytes(), {})
    transformer.trained.archive = archive
    transformer.save(f"{tmp_path}/t")
    with pytest.raises(ModelError, match="cannot be loaded"):
        KerasTransformer.load(f"{tmp_path}/t")
    assert KerasTransformer.read().trusted().load(f"{tmp_path}/t").model


def bomb_of(model: Any) -> bytes:
    """The model's file with a vocabulary of 300 MiB, which is packed into 300 KiB."""
    content = io.BytesIO(model_bytes(model))
    with zipfile.ZipFile(content, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("assets/vocabulary.txt", bytes(300 << 20))
    return content.getvalue()


def test_a_model_that_would_fill_the_memory_is_not_unpacked(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, stages and pipelines unpacked whatever their model's file declared."""
    fitted = quick(epochs=1).fit(table(spark))
    transformer = KerasTransformer(model=builder())
    for stage in (fitted, transformer):
        bomb = bomb_of(stage.model)
        assert len(bomb) < 600_000
        stage.trained.archive = replace(stage.trained.archive, content=bomb)
    fitted.save(f"{tmp_path}/m")
    transformer.save(f"{tmp_path}/t")
    PipelineModel([transformer]).save(f"{tmp_path}/p")
    read: list[str] = []
    unpack = zipfile.ZipFile.read

    def hear(self: Any, name: Any, *arguments: Any) -> bytes:
        read.append(str(name))
        return unpack(self, name, *arguments)

    monkeypatch.setattr(zipfile.ZipFile, "read", hear)
    for load, where in (
        (KerasClassificationModel.load, "m"), (KerasTransformer.load, "t"),
        (PipelineModel.load, "p"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=rf"(?s){tmp_path}/{where}.*would fill the memory"):
            load(f"{tmp_path}/{where}")
    assert not read


def test_a_model_that_spark_reads(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its files are not on this machine's disk."""
    monkeypatch.setattr(files, "folder_here", lambda spark, path: None)
    monkeypatch.setattr(files, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(files, "_CHUNKS_PER_FILE", 4)
    stage = KerasTransformer(model=builder())
    content = stage.trained.archive.content
    stage.save(f"{tmp_path}/t")
    assert KerasTransformer.load(f"{tmp_path}/t").trained.archive.content == content
    said = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    model = f"{tmp_path}/t/model"
    for size in (len(content) - 1000, len(content) + 1000):
        with pytest.raises(ModelError, match=r"is not whole"):
            files.read_chunks(spark, model, {**said, "bytes": size}, "/t")
    with pytest.raises(ModelError, match=r"would fill the memory"):
        files.read_chunks(spark, model, {**said, "bytes": 400 << 20}, "/t")
    first = spark.read.parquet(model).where("idx = 0")
    long = spark.createDataFrame([(0, bytes(5000))], "idx int, chunk binary")
    others = spark.read.parquet(model).where("idx > 0")
    others.union(long).write.parquet(f"{tmp_path}/long")
    first.union(first).union(others.where("idx > 1")).write.parquet(f"{tmp_path}/twice")
    for changed in ("long", "twice"):
        with pytest.raises(ModelError, match=r"is not whole"):
            files.read_chunks(spark, f"{tmp_path}/{changed}", said, "/t")


def test_files_of_others_newer_and_damaged_ones(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "m"
    fitted = quick(epochs=1).fit(table(spark))
    fitted.save(str(path))
    with pytest.raises(ConfigError, match=r"(?s)not a saved KerasClassifier\b.*hint: Keras"):
        KerasClassifier.load(str(path))
    with pytest.raises(Exception, match=r"(?i)already exists"):
        fitted.save(str(path))
    rewrite(path, format=99)
    with pytest.raises(ModelError, match=r"(?s)newer version.*format 99"):
        KerasClassificationModel.load(str(path))
    rewrite(path, format=1, paramMap={"fromTheFuture": 1})
    with pytest.raises(ModelError, match=r"(?s)newer version.*fromTheFuture"):
        KerasClassificationModel.load(str(path))
    fitted.write().overwrite().save(str(path))
    saved = json.loads(metadata(path).read_text())["sparkdl"]["model"]
    rewrite(path, model={**saved, "bytes": saved["bytes"] + 1})
    with pytest.raises(ModelError, match="is not whole"):
        KerasClassificationModel.load(str(path))


def test_a_model_of_many_chunks(spark: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    wide = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(2600),
            keras.layers.Dense(2600),
            keras.layers.Dense(2),
        ]
    )
    transformer = KerasTransformer(model=wide)
    size = len(transformer.trained.archive.content)
    assert size > 25 * files.CHUNK_BYTES
    transformer.save(f"{tmp_path}/t")
    assert spark.read.parquet(f"{tmp_path}/t/model").count() == -(-size // files.CHUNK_BYTES)
    loaded = KerasTransformer.load(f"{tmp_path}/t")
    assert loaded.trained.archive.content == transformer.trained.archive.content
    PipelineModel([loaded]).write().overwrite().save(f"{tmp_path}/p")


def test_a_relative_path_is_where_spark_has_it(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jvm = spark.sparkContext._jvm
    began = Path(str(jvm.java.lang.System.getProperty("user.dir")))
    path = os.path.relpath(tmp_path / "saved stage", began)
    monkeypatch.chdir(tmp_path)  # after the JVM has begun: Spark's own files do not follow
    stage = KerasTransformer(model=builder())
    stage.write().overwrite().save(path)
    assert sorted(p.name for p in (tmp_path / "saved stage").iterdir()) == ["metadata", "model"]
    loaded = KerasTransformer.load(path)
    assert loaded.trained.archive.content == stage.trained.archive.content
