"""What a worker may send, and what it may not: NaN and infinity at every place of a flat buffer."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.training.finite import PIECE, FiniteCheck
from sparkdl.weights import NotFiniteError

SIZE = 2 * PIECE + 5
"""The last piece is a short one."""


@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, 2 * PIECE + 4])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_found_in_every_piece(place: int, value: float) -> None:
    values = np.ones(SIZE, np.float32)
    check = FiniteCheck("skip", SIZE)
    assert check.admits(values)
    values[place] = value
    assert not check.admits(values)
    assert check.refused == 1
    with pytest.raises(NotFiniteError):
        FiniteCheck("raise", SIZE).admits(values)
    assert FiniteCheck("ignore", SIZE).admits(values)


def test_numbers_whose_sum_overflows_are_finite() -> None:
    values = np.full(100, 3e38, np.float32)
    assert FiniteCheck("raise", 100).admits(values)


def test_a_statistic_may_be_infinite_but_not_nan() -> None:
    check = FiniteCheck("skip", 3)
    values = np.float32([1, 2, 3, np.inf, -np.inf])
    assert check.admits(values)
    values[4] = np.nan
    assert not check.admits(values)


def test_a_part_is_looked_at_where_it_begins() -> None:
    """Of five values three are trained; the part holds the last two and one that is trained."""
    check = FiniteCheck("skip", 3)
    assert check.notes(np.float32([1, np.inf, 0]), 2, None)
    assert check.notes(np.float32([np.inf, np.inf]), 3, None)
    check.settle()
    assert not check.notes(np.float32([np.inf, 0, 0]), 2, None, batch=4)
    check.settle()
    assert check.refused == 1
