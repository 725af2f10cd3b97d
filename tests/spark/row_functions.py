"""Functions of the rows of tables, in a module, so that executors can import them by name."""

from __future__ import annotations

import numpy as np


def count(ids: np.ndarray, rows: np.ndarray) -> int:
    return len(ids)


def column_sums(ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return rows.sum(axis=0, dtype=np.float64)


def normalized(ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
