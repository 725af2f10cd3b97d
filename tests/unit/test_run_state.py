"""run_state: one format for what training goes on from, refused if it is not whole."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.errors import ProtocolError
from sparkdl.run_state import RunState
from sparkdl.weights import FloatArray, Layout


class FakeLearner:
    """Two weights, and an optimizer state in bytes."""

    layout = Layout.of([("w", (2,), "float32")])

    def __init__(self) -> None:
        self.weights = np.array([1.0, 2.0], np.float32)
        self.optimizer = b"momentum"

    def read_weights(self, out: FloatArray) -> None:
        out[:] = self.weights

    def write_weights(self, flat: FloatArray) -> None:
        self.weights = flat.copy()

    def optimizer_state(self) -> bytes:
        return self.optimizer

    def load_optimizer_state(self, state: bytes) -> None:
        self.optimizer = state


@pytest.mark.parametrize(
    "state",
    [
        RunState(0),
        RunState(3, np.arange(5, dtype=np.float32), b"optimizer", b"rule"),
        RunState(2, optimizer=b"optimizer"),
        RunState(7, rule=b"rule"),
    ],
    ids=["empty", "whole", "optimizer", "rule"],
)
def test_the_bytes_hold_all_of_it(state: RunState) -> None:
    again = RunState.from_bytes(state.to_bytes())
    assert (again.epoch, again.optimizer, again.rule) == (state.epoch, state.optimizer, state.rule)
    np.testing.assert_array_equal(again.weights, state.weights)


def test_a_learner_goes_on_from_the_state_of_another() -> None:
    one, other = FakeLearner(), FakeLearner()
    one.weights, one.optimizer = np.array([5.0, 6.0], np.float32), b"more"
    state = RunState.from_bytes(RunState.of(one, 4, b"outer").to_bytes())
    assert (state.epoch, state.rule) == (4, b"outer")
    state.load_into(other)
    np.testing.assert_array_equal(other.weights, one.weights)
    assert other.optimizer == b"more"
    RunState(5).load_into(other)  # what a state does not have stays as it is
    np.testing.assert_array_equal(other.weights, one.weights)
    assert other.optimizer == b"more"


def test_what_is_not_whole_is_refused() -> None:
    whole = RunState(3, np.ones(4, np.float32), b"optimizer", b"rule").to_bytes()
    huge = bytearray(whole)
    huge[16:24] = (1 << 60).to_bytes(8, "little")
    for bad in (b"", b"SDRS", whole[:-1], whole + b"x", b"XXXX" + whole[4:], whole[:4] + b"\x09\0"
                + whole[6:], bytes(huge)):  # fmt: skip
        with pytest.raises(ProtocolError, match="no whole run state"):
            RunState.from_bytes(bad)
