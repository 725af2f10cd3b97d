"""predict and evaluate decode an Arrow batch a forward pass at a time, however many rows it has."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.data import ColumnSpec, DataSpec
from sparkdl.errors import DataError
from sparkdl.launch.task import RankContext
from sparkdl.learner.archive import ModelArchive
from sparkdl.learner.predictor_archive import PredictorArchive
from sparkdl.learner.signature import Signature, TensorSpec
from sparkdl.spark.inference import forward
from sparkdl.spark.inference.evaluate import evaluation_stacks
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.inference.predict import PredictTask

ROWS = 11
WIDTH = 6
done: list[str] = []


def decoder(value: bytes) -> np.ndarray:
    done.append("decoded")
    if not value[0]:
        raise ValueError("an empty image")
    return np.full(WIDTH, value[0], np.float32)


def spec(labels: bool = False) -> DataSpec:
    label = {"y": ColumnSpec(("label",), (), kind="scalars")} if labels else {}
    image = ColumnSpec(("image",), (WIDTH,), kind="decoded", decoder=decoder)
    return DataSpec({"x": image}, label)


def one_batch(bad: int | None = None) -> pa.RecordBatch:
    values = [bytes([0 if i == bad else i + 1]) for i in range(ROWS)]
    return pa.record_batch({"image": pa.array(values, pa.binary()), "label": np.arange(ROWS) * 1.0})


class Doubling:
    """A model that returns its first so many values twice as large: all, or one more each call."""

    def __init__(self, growing: bool) -> None:
        self.growing, self.calls, self.passes = growing, 0, 1

    def predict(self, x: dict[str, np.ndarray], batch_size: int) -> dict[str, np.ndarray]:
        done.append("predicted")
        self.calls += 1
        return {"y": 2 * x["x"][:, : self.calls + 1 if self.growing else WIDTH]}


@dataclass(frozen=True)
class Task(PredictTask):
    growing: bool = False

    def predictor(self, resources: Any) -> Any:
        return nullcontext(Doubling(self.growing))


def task(**options: Any) -> Task:
    signature = Signature({}, {"y": TensorSpec("y", (None,), "float32")}, {}, False)
    archive = PredictorArchive(ModelArchive(b"", b"", "tensorflow", ""), "keras", "", signature)
    return Task(archive, spec(), 4, "auto", (OutputColumn("p", "y"),), 2, (0,), **options)


def predictions(batches: Any) -> list[Any]:
    return [row for batch in batches for row in batch.column(2).to_pylist()]


@pytest.fixture(autouse=True)
def _nothing_done() -> None:
    done.clear()


AT_A_TIME = [*["decoded"] * 4, "predicted", *["decoded"] * 4, "predicted", *["decoded"] * 3,
             "predicted"]  # fmt: skip


def test_predict_decodes_the_rows_of_one_forward_pass_at_a_time() -> None:
    out = list(task().run(RankContext(0), iter([one_batch()])))
    assert done == AT_A_TIME
    assert [batch.num_rows for batch in out] == [ROWS]
    assert predictions(out) == [[2.0 * (i + 1)] * WIDTH for i in range(ROWS)]


def test_large_predictions_are_returned_before_the_next_rows_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forward, "_RETURNED_BYTES", 5 * WIDTH * 4)
    batches = task().run(RankContext(0), iter([one_batch(), one_batch()]))
    first = next(batches)
    assert first.num_rows == 8
    assert done == AT_A_TIME[:10]
    rest = list(batches)
    assert [batch.num_rows for batch in rest] == [3, 8, 3]
    every = [first, *rest]
    assert predictions(every) == [[2.0 * (i + 1)] * WIDTH for i in range(ROWS)] * 2
    assert [row for b in every for row in b.column(1).to_pylist()] == [*range(ROWS)] * 2


def test_outputs_of_a_free_size_may_differ_between_forward_passes() -> None:
    out = predictions(task(growing=True).run(RankContext(0), iter([one_batch()])))
    assert [len(row) for row in out] == [2] * 4 + [3] * 4 + [4] * 3


def test_a_wrong_row_is_named_by_its_number_in_the_partition() -> None:
    with pytest.raises(DataError, match=f"row {ROWS + 6} of the partition"):
        list(task().run(RankContext(0), iter([one_batch(), one_batch(bad=6)])))


def test_evaluate_decodes_the_rows_of_one_forward_pass_at_a_time() -> None:
    rows = []
    for stack in evaluation_stacks(iter([one_batch()]), spec(labels=True), 4):
        done.append("predicted")
        rows += stack.y["y"][0].tolist()
        assert stack.x["x"].shape == (1, stack.num_rows, WIDTH)
    assert done == AT_A_TIME
    assert rows == list(range(ROWS))


def test_a_null_is_found_before_the_model_is_up() -> None:
    """Also in a row far behind those of the first forward pass."""
    values = [bytes([1])] * (ROWS - 1) + [None]
    batch = pa.record_batch({"image": pa.array(values, pa.binary()), "label": np.arange(ROWS)})
    with pytest.raises(DataError, match=f"row {ROWS - 1} of the partition"):
        list(task().run(RankContext(0), iter([batch])))
    assert done == []
    kept = list(task(handle_invalid="keep").run(RankContext(0), iter([batch])))
    assert predictions(kept)[-2:] == [[2.0] * WIDTH, None]
    skipped = list(task(handle_invalid="skip").run(RankContext(0), iter([batch])))
    assert [batch.num_rows for batch in skipped] == [ROWS - 1]
    assert len(predictions(skipped)) == ROWS - 1


def test_rows_of_which_none_is_valid() -> None:
    batch = pa.record_batch({"image": pa.array([None, None], pa.binary()), "label": [1.0, 2.0]})
    (kept,) = task(handle_invalid="keep").run(RankContext(0), iter([batch]))
    assert kept.column(2).to_pylist() == [None, None]
    assert kept.column(2).type == pa.list_(pa.float32())
    (skipped,) = task(handle_invalid="skip").run(RankContext(0), iter([batch]))
    assert skipped.num_rows == 0
    assert "predicted" not in done
