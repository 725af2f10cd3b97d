"""Functions of all rows of a table: by name, or of a module."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.errors import ConfigError, DataError, UnknownNameError
from sparkdl.tables.functions import TableFunction
from sparkdl.tables.store import RowStore

IDS, ROWS = np.arange(3), np.array([[1, -4], [9, 16], [0.25, -2]], np.float32)


def flattened(ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return rows.reshape(-1)


@pytest.mark.parametrize(
    ("name", "numbers", "first"),
    [
        ("abs", (), [1, 4]),
        ("add", (2,), [3, -2]),
        ("clip", (-1, 0.5), [0.5, -1]),
        ("divide", (4,), [0.25, -1]),
        ("exp", (), np.exp([1, -4])),
        ("fill", (7,), [7, 7]),
        ("multiply", (-3,), [-3, 12]),
        ("negative", (), [-1, 4]),
        ("power", (2,), [1, 16]),
        ("square", (), [1, 16]),
    ],
)
def test_changes_are_those_of_numpy(name: str, numbers: tuple[float, ...], first: list) -> None:
    store = RowStore(2, "adagrad", "zeros")
    store.load(IDS, ROWS)
    state = store.export().state
    assert store.apply(TableFunction.of(name, numbers)) == 3
    np.testing.assert_allclose(store.pull(IDS[:1])[0], first, rtol=1e-6)
    np.testing.assert_array_equal(store.export().state, state)


def test_roots_of_negative_numbers_are_refused_and_change_nothing() -> None:
    store = RowStore(2, "sgd", "zeros")
    store.load(IDS, ROWS)
    for name in ("sqrt", "log"):
        with pytest.raises(DataError, match="2 numbers that are not finite"):
            store.apply(TableFunction.of(name))
    np.testing.assert_array_equal(store.pull(IDS), ROWS)


def test_what_is_no_function_of_a_table_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="multiply"):
        TableFunction.of("multiplied")
    for numbers in ((), (1, 2), (float("nan"),)):
        with pytest.raises(ConfigError, match="1 finite numbers"):
            TableFunction.of("add", numbers)
    for function in (lambda ids, rows: rows, RowStore.pull):
        with pytest.raises(ConfigError, match="its code is not sent"):
            TableFunction.of(function)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="shape"):
        TableFunction.of(flattened).change(IDS, ROWS)
    with pytest.raises(ConfigError, match="addPyFile"):
        TableFunction("nowhere_installed:function").measure(IDS, ROWS)
