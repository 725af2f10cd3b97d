"""A model with rows in tables, through Spark: trained, looked up, gone on with, and refused."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import row_functions
from faulty import AtEpoch, python_workers
from pyspark.ml import PipelineModel

import sparkdl
from sparkdl import SparkModel, load_spark_model
from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.layers import ServedEmbedding
from sparkdl.ml import KerasTransformer

ROWS, IDS = 240, 40


def make_model(rate: Any = None, **settings: Any) -> Any:
    """With ``rate`` the rows follow the model's, else they have one of their own."""
    keras.utils.set_random_seed(1)
    x = keras.Input((3,), dtype="int64", name="ids")
    own = keras.optimizers.Adagrad(0.3) if rate is None else None
    rows = ServedEmbedding(4, table="ads", optimizer=own, seed=2, **settings)(x)
    model = keras.Model(x, keras.layers.Dense(1, "sigmoid")(keras.layers.Flatten()(rows)))
    optimizer = keras.optimizers.Adam(0.05) if rate is None else keras.optimizers.SGD(rate)
    model.compile(optimizer, "binary_crossentropy")
    return model


def make_rows() -> tuple[np.ndarray, np.ndarray]:
    """Ids of all sizes; each says by itself what its label is."""
    rng = np.random.default_rng(0)
    every = rng.integers(-(2**63), 2**63 - 1, IDS)
    chosen = rng.integers(0, IDS, (ROWS, 3))
    return every[chosen], (chosen.sum(1) % 2 == 0).astype("float32")


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    ids, labels = make_rows()
    rows = [(row.tolist(), float(label)) for row, label in zip(ids, labels, strict=True)]
    return spark.createDataFrame(rows, "features array<bigint>, label double").cache()


def test_a_fit_a_lookup_a_prediction_and_a_fit_that_goes_on(
    frame: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the driver is, and no worker
    ids, labels = make_rows()
    model = make_model()
    spark_model = SparkModel(model, "allreduce", num_workers=2, batch_size=16)
    folder = "run"
    history = spark_model.fit(
        frame, epochs=3, verbose=0, checkpoint_dir=folder, validation_split=0.2
    ).history
    assert history["loss"][-1] < history["loss"][0]
    table = spark_model.tables["ads"]
    found, known = table.look_up(np.unique(ids))
    assert len(table) == known.sum() > IDS * 0.8
    assert (np.abs(found[known]) > 0).all()
    listed = {row["id"]: row["row"] for row in table.to_dataframe().collect()}
    assert sorted(listed) == np.unique(ids)[known].tolist()
    np.testing.assert_array_equal([listed[i] for i in sorted(listed)], found[known])

    alone = model.predict(ids, verbose=0)[:, 0]
    predicted = sorted(
        float(np.ravel(row["prediction"])[0]) for row in spark_model.predict(frame).collect()
    )
    np.testing.assert_allclose(predicted, np.sort(alone), atol=1e-6)
    score = sparkdl.predict_udf(model)
    looked_up = sorted(float(r[0]) for r in frame.select(score("features")).collect())
    np.testing.assert_allclose(looked_up, np.sort(alone), atol=1e-6)
    assert spark_model.evaluate(frame)["loss"] == pytest.approx(
        model.evaluate(ids, labels, verbose=0), abs=1e-5
    )

    goes_on = SparkModel(make_model(), "allreduce", num_workers=1, batch_size=32)
    more = goes_on.fit(frame, epochs=5, verbose=0, checkpoint_dir=folder, resume=True).history
    assert len(more["loss"]) == 2
    assert more["loss"][-1] < history["loss"][-1]
    again = SparkModel(make_model(), "allreduce", num_workers=1, batch_size=32)
    with pytest.warns(UserWarning, match="nothing left to train"):
        again.fit(frame, epochs=5, verbose=0, checkpoint_dir=folder, resume=True)
    np.testing.assert_array_equal(
        again.model.predict(ids, verbose=0), goes_on.model.predict(ids, verbose=0)
    )
    with pytest.raises(ModelError, match="cannot be exported"):
        goes_on.export(str(tmp_path / "saved"))


@pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed (make horovod)"
)
def test_horovod_trains_the_same_rows(frame: Any, tmp_path: Any) -> None:
    found = []
    for name in ("builtin", "horovod"):
        spark_model = SparkModel(
            make_model(), "allreduce", num_workers=2, batch_size=16, communicator=name
        )
        spark_model.fit(frame, epochs=2, verbose=0, checkpoint_dir=str(tmp_path / name))
        found.append(spark_model.tables["ads"].pull(np.unique(make_rows()[0])))
    assert np.abs(found[0]).max() > 0.05
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)


def test_rows_are_set_and_removed_and_a_fit_goes_on_from_them(frame: Any, tmp_path: Any) -> None:
    ids = np.unique(make_rows()[0])
    spark_model = SparkModel(make_model(tracks=True), "allreduce", num_workers=2, batch_size=16)
    options = {"verbose": 0, "checkpoint_dir": str(tmp_path / "run")}
    spark_model.fit(frame, epochs=1, **options)
    table = spark_model.tables["ads"]
    spark, step, count = frame.sparkSession, table.step, len(table)
    assert table.to_dataframe(since=step).count() == 0
    assert table.to_dataframe(since=0).count() == count

    known = ids[table.look_up(ids)[1]]
    new = [int(known[0]), -(2**63), 2**63 - 1]
    changed = {i: [float(n), -1.0, 0.5, 2.0] for n, i in enumerate(new)}
    rows = spark.createDataFrame(list(changed.items()), "id bigint, row array<double>")
    table.load(rows.repartition(3))
    np.testing.assert_array_equal(table.pull(np.array(new)), list(changed.values()))
    after = spark_model.tables["ads"]
    assert after.folder == table.folder
    assert len(after) == count + sum(i not in known for i in new)
    layer = spark_model.model.layers[1]
    np.testing.assert_array_equal(layer.rows(new), list(changed.values()))
    other = known[~np.isin(known, new)]
    assert np.isfinite(table.pull(other)).all()
    assert table.statistics().get("size") == len(table)
    table.load(np.array([5]), np.full((1, 4), 3.0))  # arrays, and a second change
    assert table.pull(np.array([5]))[0, 0] == 3.0

    rows = np.stack([r["row"] for r in table.to_dataframe().collect()]).astype(np.float64)
    for name, known_value in (
        ("nrm2", np.linalg.norm(rows)), ("sum", rows.sum()), ("amax", np.abs(rows).max()),
        ("size", len(rows)),
    ):  # fmt: skip
        assert table.get(name) == pytest.approx(known_value, rel=1e-5)
    with pytest.raises(ConfigError, match="addPyFile"):
        table.get(row_functions.count)
    spark.sparkContext.addPyFile(row_functions.__file__)
    assert table.get(row_functions.count) == len(rows)
    np.testing.assert_allclose(table.get(row_functions.column_sums), rows.sum(0), rtol=1e-5)
    assert table.update("multiply", 0.5) == len(rows)
    assert spark_model.tables["ads"].get("nrm2") == pytest.approx(
        np.linalg.norm(rows) / 2, rel=1e-5
    )
    table.update(row_functions.normalized)
    assert table.get("nrm2") == pytest.approx(np.sqrt(len(rows)), rel=1e-5)
    before = table.folder
    with pytest.raises(DataError, match="not finite"):
        table.update("divide", 0)
    with pytest.raises(ConfigError, match="installed on all hosts"):
        table.update(lambda ids, rows: rows)
    with pytest.raises(ConfigError, match="2 finite numbers"):
        table.update("clip", 1)
    with pytest.raises(sparkdl.errors.UnknownNameError, match="nrm2"):
        table.get("nrm3")
    assert spark_model.tables["ads"].folder == before

    seen = {r["id"]: r["seen"] for r in table.to_dataframe().collect()}
    rare = sum(n < 3 for n in seen.values())
    assert 0 < rare < len(seen)
    assert table.shrink(below=3) == rare
    assert len(spark_model.tables["ads"]) == len(seen) - rare
    assert {r["seen"] >= 3 for r in table.to_dataframe().collect()} == {True}

    before = table.pull(other)
    spark_model.fit(frame, epochs=2, initial_epoch=1, **options)
    onward = spark_model.tables["ads"]
    assert onward.step > step
    moved = np.abs(onward.pull(other) - before).max()
    assert 0 < moved < 1.5  # as a few steps of Adagrad, and not as rows that began again
    resumed = SparkModel(make_model(tracks=True), "allreduce", num_workers=1, batch_size=16)
    resumed.fit(frame, epochs=3, resume=True, **options)


def test_a_saved_model_and_a_saved_pipeline_have_their_rows_wherever_they_are_copied(
    frame: Any, tmp_path: Any
) -> None:
    ids, _ = make_rows()
    spark_model = SparkModel(make_model(), "allreduce", num_workers=2, batch_size=16)
    spark_model.fit(frame, epochs=2, verbose=0, checkpoint_dir=str(tmp_path / "run"))
    expected = spark_model.model.predict(ids, verbose=0)[:, 0]
    spark_model.save(str(tmp_path / "model.keras"))
    transformer = KerasTransformer(model=spark_model.model)
    stage = str(tmp_path / "stage")
    PipelineModel([transformer]).write().save(stage)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("model.keras", "model.keras.tables", "stage"):
        shutil.move(tmp_path / name, elsewhere / name)
    shutil.rmtree(tmp_path / "run")

    path = str(elsewhere / "model.keras")
    loaded = load_spark_model(path)
    np.testing.assert_array_equal(loaded.model.predict(ids, verbose=0)[:, 0], expected)
    assert Path(loaded.tables["ads"].folder) == elsewhere / "model.keras.tables" / "ads"
    scored = sparkdl.predict(path, frame)
    loaded.save(path)  # over itself: its rows stay
    pipeline = PipelineModel.load(str(elsewhere / "stage"))
    for found in (pipeline.transform(frame), scored):
        scores = sorted(float(np.ravel(row["prediction"])[0]) for row in found.collect())
        np.testing.assert_allclose(scores, np.sort(expected), atol=1e-6)
    with pytest.raises(ConfigError, match="the rows of the model lie there"):
        pipeline.stages[0].write().overwrite().save(str(elsewhere))
    loaded.fit(frame, epochs=1, verbose=0, checkpoint_dir=str(tmp_path / "more"))
    assert len(loaded.tables["ads"]) >= len(np.unique(ids)) * 0.8


def test_what_is_no_row_of_a_table_is_refused(frame: Any, tmp_path: Any) -> None:
    spark_model = SparkModel(make_model(), "allreduce", num_workers=2, batch_size=16)
    spark_model.fit(frame, epochs=1, verbose=0, checkpoint_dir=str(tmp_path / "run"))
    table, spark = spark_model.tables["ads"], frame.sparkSession
    folder, row = table.folder, [1.0] * 4

    def made(rows: list[Any], kinds: str = "id bigint, row array<float>") -> Any:
        return spark.createDataFrame(rows, kinds)

    nan = float("nan")
    for bad, said in [
        (made([(1, row), (1, row)]), "an id is there twice"),
        (made([(1, row), (2, [1.0])]), "rows of 4 numbers"),
        (made([(1, [nan] * 4)]), "finite"),
        (made([(1, None)]), "a null"),
        (made([(None, row)]), "a null"),
        (made([(1, row), (None, None)]), "a null"),
        (made([(1.0, row)], "id double, row array<float>"), "id \\(bigint\\)"),
        (made([(1, row)], "key bigint, row array<float>"), "not rows of a table"),
        (made([(1, "a")], "id bigint, row string"), "an array of 4"),
        (made([(1, ["a"] * 4)], "id bigint, row array<string>"), "row \\(array<string>\\)"),
        (made([(1, [row])], "id bigint, row array<array<float>>"), "array<array<float>>"),
    ]:
        with pytest.raises(DataError, match=said):
            table.load(bad)
    with pytest.raises(DataError, match="none of the table"):
        table.load([1, 2], [row])
    for call in (lambda: table.shrink(below=2), lambda: table.to_dataframe(since=1)):
        with pytest.raises(ConfigError, match="tracks=True"):
            call()
    with pytest.raises(ConfigError, match="be read here"):
        pickle.loads(pickle.dumps(table)).load([1], [row])
    assert spark_model.tables["ads"].folder == folder
    assert [path.name for path in (tmp_path / "run" / "tables").iterdir()] == [
        Path(folder).parent.name
    ]
    with pytest.raises(ModelError, match="files that a fit has written"):
        spark_model.model.layers[1].load([1], [row])


def test_a_worker_that_is_killed_costs_no_step(frame: Any, tmp_path: Any) -> None:
    """The fit begins again from the last whole epoch, with the rows of that epoch."""
    ids = np.unique(make_rows()[0])

    def kill() -> None:
        os.kill(python_workers()[0].pid, signal.SIGKILL)

    found = []
    for name, callbacks in (("undisturbed", None), ("killed", [AtEpoch(1, kill)])):
        model = make_model()
        spark_model = SparkModel(model, "allreduce", num_workers=2, batch_size=16)
        spark_model.fit(
            frame, epochs=5, verbose=0, checkpoint_dir=str(tmp_path / name), callbacks=callbacks
        )
        rows = spark_model.tables["ads"].pull(ids)
        found.append([rows, *model.get_weights()])
    for undisturbed, killed in zip(*found, strict=True):
        np.testing.assert_array_equal(killed, undisturbed)


@pytest.mark.parametrize(
    ("settings", "call", "said"),
    [
        ({"mode": "asynchronous", "rule": "adam"}, {}, "a rule on weight changes"),
        ({"mode": "synchronous", "rule": "averaging"}, {}, "mode='allreduce'"),
        ({"mode": "allreduce", "rule": "local_sgd"}, {}, "mean of the gradients"),
        ({"mode": "allreduce", "on_nan": "skip"}, {}, "on_nan"),
        ({"mode": "allreduce"}, {"checkpoint_dir": None}, "checkpoint_dir"),
        (
            {"mode": "allreduce"},
            {"callbacks": [keras.callbacks.EarlyStopping("loss", restore_best_weights=True)]},
            "restore_best_weights",
        ),
        (
            {"mode": "allreduce"},
            {"callbacks": [keras.callbacks.ModelCheckpoint("best.keras")]},
            "ModelCheckpoint",
        ),
    ],
)
def test_a_fit_that_cannot_train_tables_is_refused(
    settings: Any, call: Any, said: str, frame: Any, tmp_path: Any
) -> None:
    model = SparkModel(make_model(), num_workers=2, **settings)
    with pytest.raises(ConfigError, match="tables") as caught:
        model.fit(frame, verbose=0, **{"checkpoint_dir": str(tmp_path), **call})
    assert said in str(caught.value)


@pytest.mark.slow
def test_the_example_learns() -> None:
    example = Path(__file__).parents[2] / "examples" / "click_logs.py"
    command = [sys.executable, str(example), "--rows", "40000", "--most-ids", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"AUC ([\d.]+), of the planted model ([\d.]+)", done.stdout)
    assert found, done.stdout
    assert 0.6 < float(found[1]) < float(found[2])


def test_an_optimizer_that_rows_cannot_have_is_refused(frame: Any, tmp_path: Any) -> None:
    x = keras.Input((3,), dtype="int64")
    flat = keras.layers.Flatten()(ServedEmbedding(4)(x))
    model = keras.Model(x, keras.layers.Dense(1)(flat))
    model.compile("adamw", "mse")
    with pytest.raises(ConfigError, match="optimizer"):
        SparkModel(model, "allreduce", num_workers=2).fit(
            frame, verbose=0, checkpoint_dir=str(tmp_path)
        )
