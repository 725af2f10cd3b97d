"""A sample of the sessions of tests/parity on a real cluster: frames, files and arrays of Spark."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from needed import needs_spark
from scripted import run_script
from session import EVALUATED, Place, Rows, call, plain, rows
from session_check import check
from session_examples import BUILD, EXAMPLES, FIT, LOOKS

import sparkdl
from sparkdl import SparkModel

NAMES = ["number", "features", "label", "weight", "held_out"]
_FLOATS = pa.list_(pa.float32())
KINDS = [pa.int32(), _FLOATS, _FLOATS, pa.float32(), pa.bool_()]


class SparkPlace(Place):
    """The executors of a session of Spark, and its Python workers, which it keeps."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self._spark, self._folder, self._numbers = spark, folder, itertools.count()

    @property
    def jobs(self) -> int:
        return -next(self._numbers)  # every error counts as one within a job

    def spark_model(self, model: Any, **settings: Any) -> SparkModel:
        return SparkModel(model, **settings, repartition=False)

    def load(self, path: str, custom_objects: dict[str, Any]) -> SparkModel:
        return sparkdl.load_spark_model(f"file:{path}", custom_objects, safe_mode=False)

    def fit(
        self, ours: Any, form: str, every: Rows, sizes: Sequence[int], validation: Rows | None,
        held_sizes: Sequence[int], **arguments: Any,
    ) -> Any:  # fmt: skip
        columns = {"sample_weight": "weight"} if every[2] else {}
        if form == "arrays":
            return ours.fit(plain(every), **arguments).history
        frame = self._frame(every, sizes, validation, held_sizes)
        if validation:
            columns["validation_data"] = "held_out"
        if form == "files":
            path = str(self._folder / f"rows-{next(self._numbers)}")
            frame.write.parquet(path)
            return ours.fit(path, **columns, **arguments).history
        return ours.fit(frame, **columns, **arguments).history

    def evaluate(self, ours: SparkModel, every: Rows, batch: int) -> dict[str, Any]:
        named = {"features": "features", "label": "label"}
        weight = "weight" if every[2] else None
        frame = self._frame(every, EVALUATED)
        return ours.evaluate(frame, batch_size=batch, sample_weight=weight, **named)

    def predictor(self, ours: SparkModel, how: str, batch: int) -> Any:
        if how == "function":
            made = sparkdl.predict_udf(ours.model, batch_size=batch)
            return self._frame(rows(sum(EVALUATED), 2), EVALUATED).select(
                "number", made("features").alias("prediction")
            )
        return ours.predict(self._frame(rows(sum(EVALUATED), 2), EVALUATED), batch, "features")

    def predict(self, predictor: Any) -> np.ndarray:
        found = sorted((r["number"], r["prediction"]) for r in predictor.collect())
        return np.asarray([value for _, value in found], "float64").reshape(len(found), -1)

    def kill(self, number: int) -> None:
        def end(_: Any) -> Any:
            if not Path(marked).exists():
                Path(marked).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return iter([1])

        marked = str(self._folder / f"killed-{next(self._numbers)}")
        self._spark.sparkContext.parallelize(range(2), 2).mapPartitions(end).count()

    def _frame(
        self, every: Rows, sizes: Sequence[int], validation: Rows | None = None,
        held_sizes: Sequence[int] = (),
    ) -> Any:  # fmt: skip
        """The rows, in partitions of these sizes."""
        parts = _parts(every, sizes, False)
        if validation:
            held = _parts((*validation[:2], every[2] and {"w": np.ones(99)}), held_sizes, True)
            parts = [[*a, *b] for a, b in zip(parts, held, strict=True)]

        def made(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    columns = zip(*parts[number], strict=True)
                    arrays = [pa.array([*c], kind) for c, kind in zip(columns, KINDS, strict=True)]
                    if arrays:
                        yield pa.RecordBatch.from_arrays(arrays, NAMES)

        return self._spark.range(0, len(parts), 1, len(parts)).mapInArrow(
            made,
            "number int, features array<float>, label array<float>, weight float, held_out boolean",
        )


def _parts(every: Rows, sizes: Sequence[int], held_out: bool) -> list[list[Any]]:
    x, y, w = every
    weight = w.get("w", np.ones(sum(sizes)))
    made = [
        (i, x["x"][i].tolist(), y["y"][i].tolist(), float(weight[i]), held_out)
        for i in range(sum(sizes))
    ]
    edges = [0, *itertools.accumulate(sizes)]
    return [made[a:b] for a, b in itertools.pairwise(edges)]


@pytest.fixture
def place(spark: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        yield SparkPlace(spark, Path(folder))


def _fit(**arguments: Any) -> Any:
    return call("fit", **{"mode": "synchronous", "sizes": (8, 8), "form": "frame", **arguments})


SESSION = [
    call("build", **{**BUILD, "stack": ("Scaled", "ByModule")}, loss="by_helpers",
         metrics=("own_metric",)),
    _fit(held_out=5),
    call("evaluate", how="workers"),
    call("make_function"),
    call("change", what="innermost", value=3.0),
    _fit(weighted=True),
    call("predict", how="frame"),
    call("use_function", number=0),
    call("change", what="module", value=0.5),
    _fit(form="files", batch=16, mode="allreduce"),
    call("predict", how="function"),
    call("kill", number=0),
    call("change", what="Scaled.factor", value=0.5, optimizer="adam"),
    _fit(classes=True, shuffle=True),
    call("evaluate", how="workers", weighted=True),
    call("use_function", number=0),
    call("save"),
    _fit(),
    call("predict", how="frame"),
]  # fmt: skip


@pytest.mark.tries_again  # kill
def test_session(place: SparkPlace) -> None:
    found = check(SESSION, place)
    assert not found, found


NOT_HERE = ("nothing to train", "another session of Spark")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in NOT_HERE])
def test_example(place: SparkPlace, name: str) -> None:
    why, calls = EXAMPLES[name]
    given = [call(c.name, **c.arguments, form="frame") if c.name == "fit" else c for c in calls]
    found = check(given, place)
    assert not found, f"{why}: {found}"


CONNECT = [pytest.mark.slow, needs_spark(4, 0, "its packages have no Connect server")]


@pytest.mark.tries_again
@pytest.mark.parametrize("where", ["classic", pytest.param("connect", marks=CONNECT)])
def test_session_after_session(where: str) -> None:
    """``spark.stop()``, and another session: the same ``SparkModel`` goes on."""
    assert "as plain Keras" in run_script("sessions.py", where)


assert FIT in LOOKS
