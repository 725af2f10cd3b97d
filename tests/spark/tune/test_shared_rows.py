"""Trials of one slot read the rows of a search from one broadcast."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest

from sparkdl import SparkModel, tune
from sparkdl.spark import shared_data
from sparkdl.spark.forms import arrays
from sparkdl.spark.forms.shared_rows import SharedRows, share_rows

SEARCH: dict[str, Any] = {"metric": "loss", "verbose": 0}


def build(trial: tune.Trial) -> Any:
    """Models of two sizes: each has names of its own."""
    units = trial.suggest_categorical("units", [4, 8])
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return model


def noted(frame: Any, folder: Path) -> Any:
    """The same rows; whoever computes a partition leaves a line."""
    path = str(folder / "partitions")

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        with open(path, "a") as file:
            file.write(f"{context.partitionId() if context else -1}\n")
        yield from batches

    return frame.mapInArrow(run, frame.schema)


def computed(folder: Path) -> Counter[str]:
    return Counter((folder / "partitions").read_text().split())


class Destroyed(list[SharedRows]):
    """The rows that were shared, when they are destroyed."""


@pytest.fixture
def destroyed(monkeypatch: pytest.MonkeyPatch) -> Destroyed:
    found = Destroyed()
    original = SharedRows.destroy

    def destroy(self: SharedRows) -> None:
        found.append(self)
        original(self)

    monkeypatch.setattr(SharedRows, "destroy", destroy)
    return found


@pytest.fixture(scope="module")
def few_df(spark: Any, digits: Any) -> Any:
    x, y = (part[:200] for part in digits)
    rows = [(row.tolist(), int(label)) for row, label in zip(x, y, strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label int")


def test_rows_are_computed_once_and_decoded_once_per_worker(
    few_df: Any, digits: Any, tmp_path: Path, destroyed: Destroyed
) -> None:
    decoded = str(tmp_path / "decoded")

    def decoder(content: bytes) -> Any:
        with open(decoded, "a") as file:
            file.write(f"{os.getpid()}\n")
        return np.frombuffer(content, "float32")

    x, y = (part[:50] for part in digits)
    rows = [(row.tobytes(), int(label)) for row, label in zip(x, y, strict=True)]
    frame = few_df.sparkSession.createDataFrame(rows, "features binary, label int").repartition(3)
    with tune.search(
        build, noted(frame, tmp_path), searcher=tune.RandomSearch(3, 1), max_concurrent=1,
        validation_split=0.2, settings={"decoder": decoder}, **SEARCH,
    ) as study:  # fmt: skip
        assert [r.epochs for r in study.records] == [1] * 3
    assert computed(tmp_path) == {"0": 1, "1": 1, "2": 1}
    by_process = Counter(Path(decoded).read_text().split())
    assert set(by_process.values()) == {50}  # never twice by one process
    assert len(destroyed) == 1


def test_results_are_those_of_a_fit_to_the_bit(few_df: Any, destroyed: Destroyed) -> None:
    """Each trial in two segments, with rows to validate on; the frame has one partition."""
    frame = few_df.coalesce(1).cache()
    held_out = few_df.limit(20).coalesce(1).cache()
    options: dict[str, Any] = {"validation_data": held_out}
    with tune.search(
        build, frame, searcher=tune.Asha(3, 4, 2, max_rungs=2), max_concurrent=2, seed=5,
        **SEARCH, **options,
    ) as study:  # fmt: skip
        best = study.best_trial
        assert best.epochs == 4
        found = study.best_model.get_weights()
    keras.utils.set_random_seed(5 + best.number)
    alone = SparkModel(build(tune.Trial(best.number, given=best.params)), "allreduce",
                       num_workers=1, seed=5)  # fmt: skip
    history = alone.fit(frame, epochs=4, verbose=0, **options)
    for ours, theirs in zip(found, alone.model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert best.metrics[4]["val_loss"] == history.history["val_loss"][-1]
    # the search's own; the fit's rows to validate on stay, and have no key when they go
    assert len([rows for rows in destroyed if rows.key]) == 1


def test_arrays_become_a_frame_once(
    few_df: Any, digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights for the output, under whatever name a model has for it.

    All rows are one batch, whose loss does not depend on their order.
    """
    x, y = (part[:200] for part in digits)
    weighted = (x, y, np.linspace(0, 2, len(x), dtype=np.float32))
    shipped: list[Any] = []
    original = arrays.ship_table

    def ship(spark: Any, table: Any) -> Any:
        shipped.append(table)
        return original(spark, table)

    monkeypatch.setattr(arrays, "ship_table", ship)
    with tune.search(
        build, weighted, searcher=tune.RandomSearch(4, 1), max_concurrent=2, batch_size=200,
        **SEARCH,
    ) as study:  # fmt: skip
        assert [r.epochs for r in study.records] == [1] * 4
        best = study.best_trial
    assert len(shipped) == 1
    keras.utils.set_random_seed(best.number)
    alone = SparkModel(build(tune.Trial(best.number, given=best.params)), "allreduce",
                       num_workers=1, seed=0)  # fmt: skip
    history = alone.fit(weighted, epochs=1, batch_size=200, verbose=0)
    assert best.metrics[1]["loss"] == pytest.approx(history.history["loss"][0], rel=1e-5)


def test_data_beyond_the_limit_are_read_by_every_trial(
    few_df: Any, tmp_path: Path, destroyed: Destroyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = noted(few_df.repartition(2), tmp_path)
    assert share_rows(frame.select("features", "label"), 10_000) is None
    monkeypatch.setattr(shared_data, "MOST_BYTES", 10_000)
    (tmp_path / "partitions").unlink()
    with tune.search(
        build, frame, searcher=tune.RandomSearch(2, 1), max_concurrent=1, **SEARCH
    ) as study:
        assert [r.epochs for r in study.records] == [1, 1]
    assert all(count >= 3 for count in computed(tmp_path).values())  # one look, and two trials
    assert not destroyed


def test_trials_of_two_workers_do_not_share(few_df: Any, destroyed: Destroyed) -> None:
    with tune.search(build, few_df, searcher=tune.Single(1), slots_per_trial=2, **SEARCH) as study:
        assert study.best_trial.epochs == 1
    assert not destroyed


def test_rows_that_cannot_be_read_fail_as_in_a_fit(spark: Any, destroyed: Destroyed) -> None:
    from sparkdl.errors import DataError

    frame = spark.createDataFrame([([1.0] * 63, 1)] * 4, "features array<float>, label int")
    with pytest.warns(RuntimeWarning), pytest.raises(DataError, match="63"):
        tune.search(build, frame, searcher=tune.RandomSearch(2, 1), **SEARCH)
    assert len(destroyed) == 1  # also where the search fails
