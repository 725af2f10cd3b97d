"""A run's state in bytes: what goes in comes out, and anything else is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from plain_learner import InOne

from sparkdl.errors import ProtocolError
from sparkdl.files.run_state import RunState
from sparkdl.weights import FloatArray, Layout

LAYOUT = Layout.of([("w", (3,), "float32")])


class Learner(InOne):
    """Three weights and an optimizer of a few bytes."""

    layout = LAYOUT

    def __init__(self, weights: list[float], optimizer: bytes) -> None:
        self.weights, self.slots = np.array(weights, np.float32), optimizer
        self.loads, self.carried = 0, b"counters"

    def read_weights(self, out: FloatArray) -> None:
        out[...] = self.weights

    def write_weights(self, flat: FloatArray) -> None:
        self.weights[...] = flat

    def optimizer_state(self) -> bytes:
        return self.slots

    def load_optimizer_state(self, state: bytes) -> None:
        self.loads += 1
        self.slots = state

    def carried_state(self) -> bytes:
        return self.carried

    def load_carried_state(self, state: bytes) -> None:
        self.carried = state


states = st.builds(
    RunState,
    epoch=st.integers(-(2**63), 2**63 - 1),
    weights=hnp.arrays(np.float32, st.integers(0, 9), elements=st.floats(width=32)),
    optimizer=st.binary(max_size=20),
    rule=st.binary(max_size=20),
    carried=st.binary(max_size=20),
)


@given(states)
def test_a_state_comes_back_as_it_was(state: RunState) -> None:
    back = RunState.from_bytes(state.to_bytes())
    assert (back.epoch, back.optimizer, back.rule) == (state.epoch, state.optimizer, state.rule)
    assert back.carried == state.carried
    np.testing.assert_array_equal(back.weights, state.weights)
    assert back.weights.dtype == np.float32


def test_a_learners_state_goes_on_in_another() -> None:
    state = RunState.of(Learner([1, 2, 3], b"momentum"), 4, b"outer")
    assert (state.epoch, state.rule) == (4, b"outer")
    other = Learner([0, 0, 0], b"")
    other.carried = b""
    RunState.from_bytes(state.to_bytes()).load_into(other)
    np.testing.assert_array_equal(other.weights, [1, 2, 3])
    assert (other.slots, other.carried) == (b"momentum", b"counters")


def test_a_state_of_the_first_version_is_read() -> None:
    first = struct.pack("<4sHxxqQQQ", b"SDRS", 1, 3, 4, 3, 4) + b"\0\0\x80\x3foptrule"
    state = RunState.from_bytes(first)
    assert (state.epoch, state.optimizer, state.rule) == (3, b"opt", b"rule")
    assert (state.weights.tolist(), state.carried) == ([1.0], b"")


def test_a_state_without_a_part_leaves_that_part_alone() -> None:
    learner = Learner([1, 2, 3], b"momentum")
    RunState(5).load_into(learner)
    np.testing.assert_array_equal(learner.weights, [1, 2, 3])
    assert (learner.slots, learner.loads) == (b"momentum", 0)
    RunState(5, optimizer=b"new").load_into(learner)
    np.testing.assert_array_equal(learner.weights, [1, 2, 3])
    assert learner.slots == b"new"


def test_a_state_is_of_its_moment() -> None:
    learner = Learner([1, 2, 3], b"")
    state = RunState.of(learner, 0)
    learner.weights += 1
    np.testing.assert_array_equal(state.weights, [1, 2, 3])


def test_weights_of_any_memory_order_are_written() -> None:
    strided = np.arange(6, dtype=np.float64)[::2]
    back = RunState.from_bytes(RunState(0, strided).to_bytes())  # type: ignore[arg-type]
    np.testing.assert_array_equal(back.weights, [0, 2, 4])


WHOLE = RunState(3, np.ones(2, np.float32), b"opt", b"rule").to_bytes()


@pytest.mark.parametrize("size", [0, 3, 39, 40, 47, 48, len(WHOLE) - 1])
def test_a_truncated_state_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match="no whole run state") as caught:
        RunState.from_bytes(WHOLE[:size])
    assert "truncated" in caught.value.hint


@pytest.mark.parametrize(
    "content",
    [
        WHOLE + b"more",
        b"XXXX" + WHOLE[4:],
        WHOLE[:4] + struct.pack("<H", 99) + WHOLE[6:],
        struct.pack("<4sHxxqQQQ", b"SDRS", 1, 0, 3, 0, 0) + b"abc",  # three quarters of a float32
        struct.pack("<4sHxxqQQQ", b"SDRS", 1, 0, 2**63, 2**63, 0),
        struct.pack("<4sHxxqQQQQ", b"SDRS", 2, 0, 2**63, 2**63, 0, 0),
    ],
)
def test_bytes_that_are_no_state_are_refused(content: bytes) -> None:
    with pytest.raises(ProtocolError, match="no whole run state"):
        RunState.from_bytes(content)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_state_or_refused_never_worse(content: bytes) -> None:
    with pytest.raises(ProtocolError):
        RunState.from_bytes(content)
