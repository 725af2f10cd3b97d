"""How far inputs are from having mean 0."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.data import ColumnSpec, DataSpec, rows_from_numpy
from sparkdl.data.rows import off_center

UNIFORM = np.random.default_rng(0).random((2000, 50)).astype(np.float32)


def found(x: np.ndarray, dtype: str = "float32") -> float:
    spec = DataSpec({"x": ColumnSpec(("x",), x.shape[1:], dtype)})
    return off_center(rows_from_numpy({"x": x}, {}, spec=spec))["x"]


@pytest.mark.parametrize(
    ("x", "part"),
    [
        (UNIFORM, 0.75),  # 0.5 squared over a third
        (UNIFORM - 0.5, 0.0),
        (np.full((30, 4), 3.0, np.float32), 1.0),
        (np.zeros((30, 4), np.float32), 0.0),
        (UNIFORM[:1], 0.0),
    ],
    ids=["not centered", "centered", "constant", "zeros", "one row"],
)
def test_the_part_that_the_mean_makes_up(x: np.ndarray, part: float) -> None:
    assert found(x) == pytest.approx(part, abs=0.01)


def test_tokens_have_no_center() -> None:
    assert found(np.full((30, 4), 3, np.int32), "int32") == 0.0


def test_of_several_inputs_each_has_its_own() -> None:
    spec = DataSpec({name: ColumnSpec((name,), (50,)) for name in "ab"})
    rows = rows_from_numpy({"a": UNIFORM - 0.5, "b": UNIFORM}, {}, spec=spec)
    assert off_center(rows) == pytest.approx({"a": 0.0, "b": 0.75}, abs=0.01)
