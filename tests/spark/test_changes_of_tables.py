"""Changes of a model's tables: each begins from the present ones, and none is lost."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl import SparkModel, load_spark_model
from sparkdl.errors import ConfigError, DataError, SparkDLError
from sparkdl.layers import ServedEmbedding
from sparkdl.spark.fit import trained_tables
from sparkdl.tables.checkpoints import TableCheckpoints, TableReference

IDS = np.arange(6)


def trained(folder: Path, steps: int = 1) -> SparkModel:
    """A model with two tables, as a fit leaves it: the rows of all ids are its steps."""
    x = keras.Input((2,), dtype="int64")
    rows = [ServedEmbedding(2, table=t, optimizer=keras.optimizers.SGD(0.1))(x) for t in "ab"]
    flat = keras.layers.Flatten()(keras.layers.Add()(rows))
    model = keras.Model(x, keras.layers.Dense(1)(flat))
    model.compile("sgd", "mse")
    spark_model = SparkModel(model, "allreduce", num_workers=2)
    fit(spark_model, folder, steps)
    return spark_model


def fit(spark_model: SparkModel, folder: Path, steps: int, parts: int = 2) -> None:
    """What a fit does with the tables."""
    stores = [
        {layer.table: layer.table_spec(spark_model.model.optimizer).store()}
        for layer in spark_model.model.layers
        if isinstance(layer, ServedEmbedding)
    ]
    every = {name: store for part in stores for name, store in part.items()}
    files = TableCheckpoints(str(folder / "tables"))
    former = spark_model._trained.rule_state
    reference = files.after(former, steps, tuple(sorted(every)))
    for part in range(parts):
        wanted = {n: s.from_settings(s.settings) for n, s in every.items()}
        for store in wanted.values():
            own = IDS[trained_tables.owner(IDS, parts) == part]
            store.load(own, np.full((len(own), 2), steps, np.float32))
            store.clock = steps
        files.write(reference, wanted, part, parts)
    files.finish(reference, parts, former)
    spark_model._trained.take_tables(reference)


def rows(spark_model: SparkModel, table: str, ids: Any = IDS) -> list[float]:
    return spark_model.tables[table].pull(np.asarray(ids))[:, 0].tolist()


def test_each_change_begins_from_the_present_tables(spark: Any, tmp_path: Path) -> None:
    spark_model = trained(tmp_path)
    for table in spark_model.tables.values():
        table.load(IDS[:1], np.full((1, 2), 7.0))
    assert rows(spark_model, "a")[:2] == rows(spark_model, "b")[:2] == [7, 1]

    one, other = spark_model.tables["a"], spark_model.tables["a"]
    one.load(IDS[1:2], np.full((1, 2), 8.0))
    other.load(IDS[2:3], np.full((1, 2), 9.0))
    assert rows(spark_model, "a") == [7, 8, 9, 1, 1, 1]

    fit(spark_model, tmp_path, 5, parts=3)  # other parts than those of the held object
    one.load(IDS[3:4], np.full((1, 2), 4.0))
    assert rows(spark_model, "a") == [5, 5, 5, 4, 5, 5]
    assert rows(spark_model, "b") == [5] * 6
    assert len(list((tmp_path / "tables").iterdir())) <= 4  # no change leaves its former behind

    errors: list[BaseException] = []

    def load(table: str, value: float) -> None:
        try:
            spark_model.tables[table].load(IDS[:1], np.full((1, 2), value))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=load, args=each) for each in (("a", 2.0), ("b", 3.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert rows(spark_model, "a")[0] == 2
    assert rows(spark_model, "b")[0] == 3

    with (
        spark_model._trained.one_at_a_time("fit"),
        pytest.raises(ConfigError, match="trained by another call"),
    ):
        one.load(IDS[:1], np.full((1, 2), 1.0))
    with pytest.raises(DataError, match="9223372036854775809"):
        one.load(np.array([2**63 + 1], np.uint64), np.zeros((1, 2)))


def test_a_change_that_ends_in_the_middle_changes_nothing(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark_model = trained(tmp_path)
    folder = spark_model.tables["a"].folder

    def fails(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("sparkdl.tables.checkpoints.write_manifest", fails)
        with pytest.raises(KeyboardInterrupt):
            spark_model.tables["a"].load(IDS[:1], np.zeros((1, 2)))
    assert spark_model.tables["a"].folder == folder
    assert [p.name for p in (tmp_path / "tables").iterdir()] == [Path(folder).parent.name]
    spark_model.tables["a"].load(IDS[:1], np.zeros((1, 2)))
    assert rows(spark_model, "a")[:2] == [0, 1]


def test_two_processes_that_change_the_tables_of_one_file_lose_nothing(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "model.keras")
    trained(tmp_path / "run").save(path)
    one, other = load_spark_model(path), load_spark_model(path)
    one.tables["a"].load(IDS[:1], np.full((1, 2), 7.0))
    with pytest.raises(ConfigError, match="changed or trained meanwhile"):
        other.tables["b"].load(IDS[:1], np.full((1, 2), 8.0))
    with pytest.raises(ConfigError, match="changed or trained meanwhile"):
        other.save(path)
    assert rows(one, "a")[0] == 7
    assert rows(other, "a")[0] == 1
    one.save(path)

    again = load_spark_model(path)
    assert rows(again, "a")[:2] == [7, 1]
    again.tables["b"].load(IDS[:1], np.full((1, 2), 8.0))  # and its process ends
    more = load_spark_model(path)  # has not heard of that: it was not saved
    assert rows(more, "b")[0] == 1
    more.tables["b"].load(IDS[1:2], np.full((1, 2), 9.0))
    assert rows(again, "b")[:2] == [8, 1]  # whose rows stay nevertheless
    more.save(path)
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("model.keras", "model.keras.tables"):
        shutil.move(tmp_path / name, moved / name)
    shutil.rmtree(tmp_path / "run")
    found = load_spark_model(str(moved / "model.keras"))
    assert rows(found, "a")[:2] == [7, 1]
    assert rows(found, "b")[:2] == [1, 9]

    # A save that is killed before the file is there leaves the file before it whole.
    path = str(moved / "model.keras")
    newer = trained(tmp_path / "run2", steps=4)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("sparkdl.spark.model_inference.write_model", killed)
        with pytest.raises(KeyboardInterrupt):
            newer.save(path)
    assert rows(load_spark_model(path), "b")[:2] == [1, 9]
    newer.save(path)
    assert rows(load_spark_model(path), "b")[:2] == [4, 4]


def test_a_fit_of_another_process_keeps_what_was_changed(spark: Any, tmp_path: Path) -> None:
    """Both go on from the tables of one checkpoint."""
    one, other = trained(tmp_path), trained(tmp_path / "elsewhere")
    other._trained.take_tables(TableReference.from_bytes(one._trained.rule_state))
    one.tables["a"].load(IDS[:1], np.full((1, 2), 7.0))
    for step in range(2, 6):
        fit(other, tmp_path, step)
    assert rows(one, "a")[:2] == [7, 1]
    with pytest.raises(SparkDLError, match="changed or trained meanwhile"):
        one.tables["a"].load(IDS[1:2], np.full((1, 2), 7.0))
    assert rows(other, "a")[:2] == [5, 5]
