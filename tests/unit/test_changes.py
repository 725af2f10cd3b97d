"""What callbacks write, as bytes and in a flat buffer."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.errors import ProtocolError
from sparkdl.training.changes import VariableChanges


def test_values_of_any_dtype_come_back() -> None:
    changes = VariableChanges(
        {0: np.ones((2, 3), np.float64), 4: np.array(7, np.int64), 5: np.array([True, False])},
        {2: np.array([1, 2], ">u4")},
        {0: 11},
    )
    found = VariableChanges.from_bytes(changes.to_bytes())
    assert found.keys == changes.keys
    assert found.offsets == {0: 11}
    for number, value in changes.model.items():
        assert found.model[number].dtype == value.dtype
        np.testing.assert_array_equal(found.model[number], value)
    assert found.optimizer[2].tolist() == [1, 2]


def test_a_type_that_numpy_does_not_know_widens() -> None:
    import ml_dtypes

    value = np.array([1.5, -2], ml_dtypes.bfloat16)
    found = VariableChanges.from_bytes(VariableChanges({0: value}).to_bytes())
    assert found.model[0].tolist() == [1.5, -2]


def test_weights_are_written_where_they_lie() -> None:
    changes = VariableChanges({1: np.full((2, 2), 5.0), 2: np.array(9)}, offsets={1: 3})
    flat = np.zeros(8, np.float32)
    changes.write_into(flat)
    assert flat.tolist() == [0, 0, 0, 5, 5, 5, 5, 0]


def test_the_later_value_counts() -> None:
    both = VariableChanges({1: np.array(1), 2: np.array(2)}).followed_by(
        VariableChanges({1: np.array(3)}, {0: np.array(4)})
    )
    assert {k: int(v) for k, v in both.model.items()} == {1: 3, 2: 2}
    assert int(both.optimizer[0]) == 4


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b"XXXX" + b[4:], lambda b: b[:5]]
)
def test_other_bytes_are_refused(spoil) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ProtocolError, match="no changes of variables"):
        VariableChanges.from_bytes(spoil(VariableChanges({1: np.ones(3)}).to_bytes()))
