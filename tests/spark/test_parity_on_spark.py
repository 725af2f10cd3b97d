"""A sample of the cases of tests/parity on a real cluster, on a frame with known partitions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from case import Arrays, Case, build, rows
from own_parts import CUSTOM
from referee import differences, outcome_of, train_with_keras

from sparkdl import SparkModel

SAMPLE = [
    Case(inputs=("vector", "sequence"), blocks=("residual", "gru"), heads=("bits:crossentropy",),
         metrics=("auc",), optimizer="adamw", options=("clipnorm",), sizes=(13, 7), held_out=6,
         seed=1),
    Case(inputs=("image",), blocks=("conv", "layer norm"), form="sequential",
         heads=("classes:crossentropy",), metrics=("accuracy",), weights=("rows",),
         optimizer="momentum", options=("ema",), fits=("fit", "again"), sizes=(11, 0)),
    Case(blocks=("shared", "frozen"), heads=("numbers:huber", "shares:kl"), optimizer="adam",
         schedule="exponential", sizes=(2, 17), shuffle=True),
    Case(inputs=("sequence",), blocks=("conv1d",), heads=("sequences:mse",),
         weights=("positions",), metrics=("mae",), weighted=True, sizes=(13, 7), held_out=4),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", SAMPLE, ids=repr)
def test_case(spark: Any, case: Case) -> None:
    expected = train_with_keras(case)
    frame, columns = frame_of(spark, case)
    fresh, _ = frame_of(spark, case, (5, 2), salt=2)
    for mode in case.modes:
        spark_model = SparkModel(
            build(case), mode=mode, frequency="batch", batch_size=case.batch, repartition=False,
            custom_objects=CUSTOM,
        )  # fmt: skip
        histories = []
        for what in case.fits:
            epochs = 2 if what == "fit" else 1
            history = spark_model.fit(
                frame, epochs=epochs, verbose=0, shuffle=case.shuffle,
                validation_data="held_out" if case.held_out else None, **columns,
            )  # fmt: skip
            histories.append(history.history)
        evaluated = spark_model.evaluate(fresh, batch_size=3, **columns)
        predicted = _predicted(spark_model, fresh, case)
        outcome = outcome_of(spark_model.model, histories, evaluated, predicted, [])
        found = differences(case, expected, outcome)
        assert not found, f"{case!r} in {mode}: {found}"


def frame_of(
    spark: Any, case: Case, sizes: tuple[int, ...] = (), salt: int = 0
) -> tuple[Any, dict[str, Any]]:
    """The rows as a DataFrame with partitions of the case's sizes, and what its columns mean."""
    parts = [
        _table(part)
        for part in _cut(rows(case, sum(sizes or case.sizes), salt), sizes or case.sizes)
    ]
    if case.held_out and not salt:
        last = _table(rows(case, case.held_out, 1))
        parts[-1] = [(*row, False) for row in parts[-1]] + [(*row, True) for row in last]
        parts[:-1] = [[(*row, False) for row in part] for part in parts[:-1]]
    x, y, w = rows(case, 1)
    named = [(f"{kind} {name}", _kind(array)) for kind, group in zip("xyw", (x, y, w), strict=True)
             for name, array in group.items()]  # fmt: skip
    if case.held_out and not salt:
        named.append(("held_out", "boolean"))
    schema = ", ".join(f"`{name}` {kind}" for name, kind in named)
    count = len(parts)
    spread = spark.sparkContext.parallelize(range(count), count).flatMap(
        lambda number: parts[number]
    )
    return spark.createDataFrame(spread, schema), _columns(x, y, w, case)


def _cut(arrays: tuple[Arrays, ...], sizes: tuple[int, ...]) -> list[tuple[Arrays, ...]]:
    edges = np.cumsum([0, *sizes])
    return [
        tuple({name: a[start:end] for name, a in group.items()} for group in arrays)
        for start, end in itertools.pairwise(edges)
    ]


def _table(part: tuple[Arrays, ...]) -> list[tuple[Any, ...]]:
    arrays = [array.tolist() for group in part for array in group.values()]
    return list(zip(*arrays, strict=True))


def _kind(array: np.ndarray) -> str:
    kind = "int" if array.dtype == np.int32 else "float"
    for _ in range(array.ndim - 1):
        kind = f"array<{kind}>"
    return kind


def _columns(x: Arrays, y: Arrays, w: Arrays, case: Case) -> dict[str, Any]:
    inputs = {f"in_{name.replace(' ', '_')}": f"x {name}" for name in x}
    outputs = {name: f"y {name}" for name in y}
    columns: dict[str, Any] = {
        "features": inputs if len(x) > 1 else next(iter(inputs.values())),
        "label": outputs if len(y) > 1 else next(iter(outputs.values())),
    }
    if w:
        weights = {name: f"w {name}" for name in w}
        columns["sample_weight"] = weights if len(w) > 1 else next(iter(weights.values()))
    return columns


def _predicted(spark_model: SparkModel, frame: Any, case: Case) -> list[np.ndarray]:
    names = case.output_names()
    if len(names) == 1:
        found = spark_model.predict(frame).select("prediction").toPandas()["prediction"]
        return [np.stack([np.atleast_1d(value) for value in found])]
    told = spark_model.predict(frame, outputs={name: f"p {name}" for name in names}).toPandas()
    return [np.stack([np.atleast_1d(value) for value in told[f"p {name}"]]) for name in names]
