"""The mean label of a partition: what a model can answer without its inputs."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.data import ColumnSpec, DataSpec, rows_from_numpy
from sparkdl.data.rows import MOST_LOOKED_AT, label_mean

X = {"x": np.zeros((8, 2), np.float32)}
CLASSES = np.array([0, 0, 0, 0, 1, 1, 2, 2])


def spec(label: ColumnSpec) -> DataSpec:
    return DataSpec({"x": ColumnSpec(("x",), (2,))}, {"y": label})


@pytest.mark.parametrize(
    "label",
    [
        ColumnSpec(("y",), (), "int32", "scalars", classes=4),
        ColumnSpec(("y",), (4,), kind="scalars", one_hot=4),
    ],
    ids=["class numbers", "one-hot"],
)
def test_classes_have_their_frequencies(label: ColumnSpec) -> None:
    rows = rows_from_numpy(X, {"y": CLASSES}, spec=spec(label))
    assert label_mean(rows) == (0.5, 0.25, 0.25, 0.0)


def test_other_labels_have_the_mean_of_each_value() -> None:
    one = rows_from_numpy(X, {"y": CLASSES.astype(np.float32)})
    assert label_mean(one) == (0.75,)
    two = rows_from_numpy(X, {"y": np.stack([CLASSES, 1 - CLASSES], 1).astype(np.float32)})
    assert label_mean(two) == (0.75, 0.25)


def test_of_many_rows_some_from_everywhere_are_looked_at() -> None:
    labels = np.repeat([0.0, 1.0], 2 * MOST_LOOKED_AT).astype(np.float32)  # in order
    rows = rows_from_numpy({"x": np.zeros((len(labels), 1), np.float32)}, {"y": labels})
    assert label_mean(rows) == pytest.approx((0.5,))


def test_of_labels_that_are_images_a_few_rows_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = np.full((40, 64, 64, 1), 0.25, np.float32)
    rows = rows_from_numpy({"x": np.zeros((40, 1), np.float32)}, {"y": images})
    gathered: list[int] = []
    gather = rows.storage.gather

    def counted(entry: int, index: np.ndarray) -> object:
        gathered.append(len(index))
        return gather(entry, index)

    monkeypatch.setattr(rows.storage, "gather", counted)
    assert label_mean(rows) == (0.25,)
    assert gathered == [MOST_LOOKED_AT // (64 * 64)]


def test_where_there_is_no_mean() -> None:
    y = {"y": CLASSES.astype(np.float32)}
    assert label_mean(rows_from_numpy(X, y, np.ones(8, np.float32))) == ()
    assert label_mean(rows_from_numpy(X, {**y, "z": y["y"]})) == ()
    assert label_mean(rows_from_numpy(X)) == ()
    empty = rows_from_numpy({"x": np.zeros((0, 2), np.float32)}, {"y": np.zeros(0, np.float32)})
    assert label_mean(empty) == ()
    assert label_mean(rows_from_numpy(X, {"y": np.zeros((8, 1001), np.float32)})) == ()
