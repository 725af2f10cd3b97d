"""generate: the text of every row in its place, on two executors, and errors before any job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from causal_models import WORDS, tiny_gpt2

import sparkdl
from sparkdl.errors import ConfigError, DataError, ModelError

hub = pytest.importorskip("keras_hub")
RNG = np.random.default_rng(1)
ROWS = [(i, " ".join(RNG.choice(WORDS, RNG.integers(1, 4)))) for i in range(23)]
SCHEMA = "number int, text string"


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return list(tiny_gpt2().generate([text for _, text in ROWS], max_length=14))


def test_texts_of_rows_in_their_order(spark: Any, plain: list[str], tmp_path: Path) -> None:
    frame = spark.createDataFrame([*ROWS, (23, None)], SCHEMA).repartition(3, "number").cache()
    made = sparkdl.generate(tiny_gpt2(), frame, max_length=14, batch_size=4, handle_invalid="keep")
    assert made.columns == ["number", "text", "generated"]
    rows = made.collect()
    assert [row.number for row in rows] == [row.number for row in frame.collect()]
    texts = {row.number: row.generated for row in rows}
    assert texts.pop(23) is None
    assert [texts[i] for i in range(23)] == plain
    frame.coalesce(1).write.parquet(str(tmp_path / "in"))
    stream = sparkdl.generate(
        tiny_gpt2(), spark.readStream.schema(SCHEMA).parquet(str(tmp_path / "in")), "text", 14,
        batch_size=4, handle_invalid="skip",
    )  # fmt: skip
    query = stream.writeStream.format("memory").queryName("generated").trigger(availableNow=True)
    query.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination(240)
    read = {row.number: row.generated for row in spark.table("generated").collect()}
    assert [read[i] for i in range(23)] == plain
    assert len(read) == 23


def test_seeds_of_rows(spark: Any) -> None:
    task, rows = tiny_gpt2("top_k"), [(i, text) for i, text in ROWS[:5] for _ in range(2)]
    frame = spark.createDataFrame([(n, *row) for n, row in enumerate(rows)], f"n long, {SCHEMA}")

    def texts(frame: Any, **options: Any) -> dict[int, str]:
        made = sparkdl.generate(task, frame, max_length=20, batch_size=3, seed=7, **options)
        return {row.n: row.generated for row in made.collect()}

    first = texts(frame.coalesce(1))
    assert texts(frame.repartition(2).orderBy("text")) == first
    assert [first[n] for n in range(0, 10, 2)] == [first[n] for n in range(1, 10, 2)]
    apart = texts(frame, seed_column="n")
    assert all(apart[n] != apart[n + 1] for n in range(0, 10, 2))


def test_errors_before_a_job(spark: Any) -> None:
    frame, task = spark.createDataFrame(ROWS, SCHEMA), tiny_gpt2()
    with pytest.raises(ModelError, match="cannot write texts on"):
        sparkdl.generate(task.backbone, frame)
    with pytest.raises(DataError, match="number"):
        sparkdl.generate(task, frame, prompt="number")
    with pytest.raises(DataError, match="nothing"):
        sparkdl.generate(task, frame, prompt="nothing")
    with pytest.raises(DataError, match="already have a column"):
        sparkdl.generate(task, frame, output_column="text")
    for length in (1, 33):  # the model has 32 positions
        with pytest.raises(ConfigError, match="max_length"):
            sparkdl.generate(task, frame, max_length=length)
    with pytest.raises(ConfigError, match="writes into a column"):
        sparkdl.generate(task, ["the cat"])

    class Drawing(hub.samplers.TopKSampler):
        """A sampler of the user's own."""

    task.compile(sampler=Drawing())
    with pytest.raises(ConfigError, match="row by row"):
        sparkdl.generate(task, frame, seed=1)


def test_embeddings_are_predictions_of_the_backbone(spark: Any) -> None:
    tokens = RNG.integers(0, 30, size=(9, 8)).astype("int32")
    mask = np.arange(8) < RNG.integers(1, 9, size=(9, 1))
    frame = spark.createDataFrame(
        [(t.tolist(), [int(v) for v in m]) for t, m in zip(tokens, mask, strict=True)],
        "tokens array<int>, mask array<int>",
    )
    backbone = tiny_gpt2().backbone
    made = sparkdl.predict(
        backbone, frame, features={"token_ids": "tokens", "padding_mask": "mask"},
        output_column="embedding",
    ).collect()  # fmt: skip
    expected = backbone.predict({"token_ids": tokens, "padding_mask": mask}, verbose=0)
    np.testing.assert_allclose([row.embedding for row in made], expected, atol=1e-5)
