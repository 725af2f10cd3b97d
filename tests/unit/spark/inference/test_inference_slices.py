"""predict and evaluate decode an Arrow batch a forward pass at a time, however many rows it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.data import ColumnSpec, DataSpec
from sparkdl.errors import DataError
from sparkdl.launch.task import RankContext
from sparkdl.learner.archives.archive import ModelArchive
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.learner.signature import Signature, TensorSpec
from sparkdl.spark.inference import evaluate, forward
from sparkdl.spark.inference.evaluate import evaluation_stacks
from sparkdl.spark.inference.forward import PredictorTask
from sparkdl.spark.inference.function import UdfTask
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.inference.predict import AppendTask, PredictTask

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
    return pa.RecordBatch.from_pydict(
        {"image": pa.array(values, pa.binary()), "label": np.arange(ROWS) * 1.0}
    )


class Doubling:
    """A model that returns its first so many values twice as large: all, or one more each call."""

    def __init__(self, growing: bool) -> None:
        self.growing, self.calls, self.passes = growing, 0, 1

    def predict(self, x: dict[str, np.ndarray], batch_size: int) -> dict[str, np.ndarray]:
        done.append("predicted")
        self.calls += 1
        return {"y": 2 * x["x"][:, : self.calls + 1 if self.growing else WIDTH]}


class Doubled:
    """What the tasks share: a model that needs no Keras."""

    growing: bool = False

    def predictor(self, resources: Any) -> Any:
        return nullcontext(Doubling(self.growing))


@dataclass(frozen=True)
class Structs(Doubled, PredictTask):
    """A task that returns its predictions alone: a struct for each row."""

    growing: bool = False

    def over(self, *batches: pa.RecordBatch) -> Iterator[list[Any]]:
        """The predictions, batch by batch."""
        sent = (pa.RecordBatch.from_arrays([b.column(0)], names=["c0"]) for b in batches)
        for batch in self.run(RankContext(0), sent):
            yield [row and row["c0"] for row in batch.column(0).to_pylist()]


@dataclass(frozen=True)
class Appended(Doubled, AppendTask):
    """A task that returns all columns, and its predictions as the third of them."""

    growing: bool = False

    def over(self, *batches: pa.RecordBatch) -> Iterator[list[Any]]:
        """The predictions, batch by batch, after a look whether they stand in the right rows."""
        for batch in self.run(RankContext(0), iter(batches)):
            rows = batch.to_pylist()
            assert all(row["c2"] is None or row["c2"][0] == 2 * row["c0"][0] for row in rows)
            yield [row["c2"] for row in rows]


TASKS = pytest.mark.parametrize("kind", [Structs, Appended])


def task(kind: Any, **options: Any) -> Any:
    signature = Signature({}, {"y": TensorSpec("y", (None,), "float32")}, {}, False)
    archive = PredictorArchive(ModelArchive(b"", b"", "tensorflow", ""), "keras", "", signature)
    if kind is Appended:
        options |= {"kept": 2, "positions": (0,)}
    return kind(archive, spec(), 4, "auto", (OutputColumn("p", "y"),), **options)


def doubled(rows: int = ROWS) -> list[list[float]]:
    return [[2.0 * (i + 1)] * WIDTH for i in range(rows)]


@pytest.fixture(autouse=True)
def _nothing_done() -> None:
    done.clear()


AT_A_TIME = [*["decoded"] * 4, "predicted", *["decoded"] * 4, "predicted", *["decoded"] * 3,
             "predicted"]  # fmt: skip


@TASKS
def test_predict_decodes_the_rows_of_one_forward_pass_at_a_time(kind: Any) -> None:
    out = list(task(kind).over(one_batch()))
    assert done == AT_A_TIME
    assert out == [doubled()], "in one piece, for who reads only the first"


@TASKS
def test_rows_that_fill_no_forward_pass_wait_for_the_next_arrow_batch(kind: Any) -> None:
    """Also over several batches: only the last pass is short, and every row is in its place."""
    given = one_batch()
    small = [given.slice(start, 3) for start in range(0, ROWS, 3)]
    out = list(task(kind).over(*small))
    assert done == [*["decoded"] * 4, "predicted", *["decoded"] * 4, "predicted",
                    *["decoded"] * 3, "predicted"]  # fmt: skip
    assert out == [doubled()[:4], doubled()[4:8], doubled()[8:]]


@TASKS
@pytest.mark.parametrize("handle_invalid", ["keep", "skip"])
def test_invalid_rows_among_those_that_wait(kind: Any, handle_invalid: str) -> None:
    values = [bytes([i + 1]) if i % 3 else None for i in range(20)]
    batch = pa.RecordBatch.from_pydict(
        {"image": pa.array(values, pa.binary()), "label": np.arange(20)}
    )
    parts = [batch.slice(start, size) for start, size in ((0, 1), (1, 6), (7, 7), (14, 6))]
    out = [row for rows in task(kind, handle_invalid=handle_invalid).over(*parts) for row in rows]
    want = [[2.0 * v[0]] * WIDTH if v else None for v in values]
    if kind is Appended and handle_invalid == "skip":
        want = [row for row in want if row]
    assert out == want
    assert done.count("predicted") == 4  # 13 rows, 4 at a time


@TASKS
def test_large_predictions_are_returned_before_the_next_rows_are_decoded(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_RETURNED_BYTES", 5 * WIDTH * 4)
    batches = task(kind).over(one_batch(), one_batch())
    first = next(batches)
    assert first == doubled(8)
    assert done == AT_A_TIME[:10]
    rest = list(batches)
    assert [len(batch) for batch in rest] == [8, 6]
    assert [*first, *(row for batch in rest for row in batch)] == doubled() * 2


@TASKS
def test_outputs_of_a_free_size_may_differ_between_forward_passes(kind: Any) -> None:
    out = [row for rows in task(kind, growing=True).over(one_batch()) for row in rows]
    assert [len(row) for row in out] == [2] * 4 + [3] * 4 + [4] * 3


@TASKS
def test_a_wrong_row_is_named_by_its_number_in_the_partition(kind: Any) -> None:
    with pytest.raises(DataError, match=f"row {ROWS + 6} of the partition"):
        list(task(kind).over(one_batch(), one_batch(bad=6)))


def test_evaluate_decodes_the_rows_of_one_forward_pass_at_a_time() -> None:
    rows = []
    for stack in evaluation_stacks(iter([one_batch()]), spec(labels=True), 4):
        done.append("predicted")
        rows += stack.y["y"][0].tolist()
        assert stack.x["x"].shape == (1, stack.num_rows, WIDTH)
    assert done == AT_A_TIME
    assert rows == list(range(ROWS))


def stacks_of(spec: DataSpec, x: np.ndarray, batch_size: int) -> list[Any]:
    values = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x.shape[1])
    halves = [values.slice(0, len(x) // 2), values.slice(len(x) // 2)]
    records = [pa.RecordBatch.from_arrays([half], names=["x"]) for half in halves]
    return list(evaluation_stacks(iter(records), spec, batch_size))


@pytest.mark.parametrize(
    ("width", "together"), [(WIDTH, 16), (None, 1), (1 << 20, 1)], ids=["fixed", "free", "large"]
)
def test_batches_of_one_shape_are_evaluated_in_few_calls(
    width: int | None, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same batches in the same order as one at a time; none spans two Arrow batches."""
    x = np.arange(1200 * WIDTH, dtype=np.float32).reshape(1200, WIDTH)
    column = ColumnSpec(("x",), (None,) if width is None else (WIDTH,))
    if width == 1 << 20:
        monkeypatch.setattr(evaluate, "_MOST_BYTES", 4 * 16 * 8 * WIDTH - 1)
    stacks = stacks_of(DataSpec({"x": column}, {}), x, 4)
    counts = [stack.num_batches for stack in stacks]
    found = [batch for stack in stacks for batch in stack.x["x"]]
    assert [len(batch) for batch in found] == [4] * 300
    np.testing.assert_array_equal(np.concatenate(found), x)
    several = [1] * 128 + [16] + [1] * 6 + [16] * 9 + [1] * 6
    assert counts == (several if together > 1 else [1] * 300)


@TASKS
def test_a_null_is_found_before_the_model_is_up(kind: Any) -> None:
    """Also in a row far behind those of the first forward pass."""
    values = [bytes([1])] * (ROWS - 1) + [None]
    batch = pa.RecordBatch.from_pydict(
        {"image": pa.array(values, pa.binary()), "label": np.arange(ROWS)}
    )
    with pytest.raises(DataError, match=f"row {ROWS - 1} of the partition"):
        list(task(kind).over(batch))
    assert done == []
    valid = [[2.0] * WIDTH] * (ROWS - 1)
    kept = list(task(kind, handle_invalid="keep").over(batch))
    assert kept == [[*valid, None]]
    left_out = [None] if kind is Structs else []  # the driver leaves null structs out
    skipped = list(task(kind, handle_invalid="skip").over(batch))
    assert skipped == [valid + left_out]


@TASKS
def test_rows_of_which_none_is_valid(kind: Any) -> None:
    batch = pa.RecordBatch.from_pydict(
        {"image": pa.array([None, None], pa.binary()), "label": [1.0, 2.0]}
    )
    assert list(task(kind, handle_invalid="keep").over(batch)) == [[None, None]]
    left_out = [None, None] if kind is Structs else []
    assert list(task(kind, handle_invalid="skip").over(batch)) == [left_out]
    assert "predicted" not in done


def test_a_row_left_out_is_no_row_of_nulls() -> None:
    """The driver tells one from the other by the struct: null itself, or of null fields."""
    batch = one_batch(bad=3)
    values = {}
    for handle_invalid in ("keep", "skip"):
        sent = iter([pa.RecordBatch.from_arrays([batch.column(0)], names=["c0"])])
        out = next(task(Structs, handle_invalid=handle_invalid).run(RankContext(0), sent))
        values[handle_invalid] = out.column(0)[3].as_py()
        assert out.column(0).type == pa.struct({"c0": pa.list_(pa.float32())})
    assert values == {"keep": {"c0": None}, "skip": None}


@pytest.mark.parametrize(("backend", "length"), [("tensorflow", 3), ("jax", 4)])
def test_a_function_of_sql_pads_rows_of_different_length(
    monkeypatch: pytest.MonkeyPatch, backend: str, length: int
) -> None:
    """The mask is made of the argument; JAX compiles for each length, so it gets few."""
    shapes: list[tuple[int, ...]] = []

    class Summing:
        passes = 1

        def predict(self, x: dict[str, np.ndarray], batch_size: int) -> dict[str, np.ndarray]:
            shapes.extend([x["x"].shape, x["x_mask"].shape])
            return {"y": (x["x"] * x["x_mask"]).sum(1)}

    monkeypatch.setattr(PredictorTask, "predictor", lambda self, resources: nullcontext(Summing()))
    signature = Signature(
        {"x": TensorSpec("x", (None,), "float32"), "x_mask": TensorSpec("x_mask", (None,), "bool")},
        {"y": TensorSpec("y", (), "float32")}, {}, True,
    )  # fmt: skip
    archive = PredictorArchive(ModelArchive(b"", b"", backend, ""), "keras", "", signature)
    made = UdfTask(archive, OutputColumn("p", "y"), 4, False, pad=-7)
    rows = pa.RecordBatch.from_pydict({"_0": pa.array([[1.0], [1.0, 2.0], [1.0, 2.0, 3.0]])})
    (predicted,) = made.run(RankContext(0), iter([rows]))
    assert predicted.column(0).to_pylist() == [1.0, 3.0, 6.0]
    assert [shape[1] for shape in shapes] == [length] * 2
