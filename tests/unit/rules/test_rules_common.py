"""What holds for every rule: the registry, and the properties that servers rely on."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.optimizers.blocks import BLOCK, use_threads
from sparkdl.rules import BSP, Commit, DynSGD, Rule, State, make_rule, rule_names
from sparkdl.weights import FloatArray

VARIANTS: list[dict[str, Any]] = [
    *({"name": name} for name in rule_names()),
    {"name": "bsp", "payload": "delta"},
    {"name": "dc_asgd", "adaptive": True},
    {"name": "dc_asgd", "payload": "gradient"},
    {"name": "gap_aware", "payload": "gradient"},
    {"name": "downpour_adagrad", "payload": "gradient"},
    {"name": "sgd", "momentum": 0.9},
    {"name": "sgd", "momentum": 0.9, "nesterov": True},
    {"name": "rmsprop", "momentum": 0.9, "centered": True},
    {"name": "ssp", "scale": "sum"},
    {"name": "hogwild", "scale": "mean"},
]
every_rule = pytest.mark.parametrize("spec", VARIANTS, ids=str)


def commits(draw: Any, count: int) -> list[Commit]:
    made = []
    for clock in range(count):
        pulled = draw(st.integers(0, clock))
        batches = draw(st.integers(1, 9))
        worker = draw(st.integers(0, 2))
        made.append(Commit(worker, 3, clock, pulled, batches, 32 * batches, 0.1))
    return made


@st.composite
def histories(draw: Any) -> tuple[FloatArray, list[FloatArray], list[Commit]]:
    size = draw(st.sampled_from([0, 1, 7, 100, BLOCK, BLOCK + 3]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 4))
    arrays = [rng.normal(0, 1, size).astype(np.float32) for _ in range(count + 1)]
    return arrays[0], arrays[1:], commits(draw, count)


@every_rule
@settings(max_examples=12, deadline=None)
@given(history=histories())
def test_in_place_and_fresh_output_agree_and_inputs_stay(
    spec: dict[str, Any], history: tuple[FloatArray, list[FloatArray], list[Commit]]
) -> None:
    rule = make_rule(spec)
    x0, deltas, made = history
    in_place, fresh = x0.copy(), x0.copy()
    one, two = rule.init(in_place), rule.init(fresh)
    for delta, commit in zip(deltas, made, strict=True):
        sent, before, out = delta.copy(), fresh.copy(), np.empty_like(x0)
        rule.update(fresh, delta, two, commit, out)
        np.testing.assert_array_equal(fresh, before)
        np.testing.assert_array_equal(delta, sent)
        rule.update(in_place, delta, one, commit, in_place)
        np.testing.assert_array_equal(in_place, out)
        assert out.dtype == np.float32
        assert np.isfinite(out).all()
        fresh = out
    for state in (one, two):
        for name, value in state.items():
            assert isinstance(value, (int, float, np.ndarray)), name
            if isinstance(value, np.ndarray):
                assert value.dtype == np.float32
                assert value.shape == x0.shape


@every_rule
@pytest.mark.parametrize("size", [0, 5, BLOCK + 1])
def test_a_zero_delta_is_the_identity(spec: dict[str, Any], size: int) -> None:
    options = {"weight_decay": 0.0} if spec["name"] == "adamw" else {}
    rule = make_rule(spec, **options)
    x0 = np.random.default_rng(0).normal(0, 1, size).astype(np.float32)
    x, state = x0.copy(), rule.init(x0)
    for clock in range(3):
        commit = Commit(clock % 2, 2, clock, 0, 5, 160, 0.1)
        rule.update(x, np.zeros_like(x), state, commit, x)
    if rule.blocking and rule.payload == "gradient":
        np.testing.assert_array_equal(x, 0.0)  # the reply is the mean gradient
    else:
        np.testing.assert_array_equal(x, x0)


@every_rule
def test_a_rule_survives_pickle_and_its_config(spec: dict[str, Any]) -> None:
    rule = make_rule(spec)
    assert pickle.loads(pickle.dumps(rule)) == rule
    config = json.loads(json.dumps(rule.config()))
    assert make_rule(rule.name, **config) == rule
    assert make_rule({"name": rule.name, **config}) == rule
    assert rule.bind(1).name == rule.name


@every_rule
def test_a_rule_is_frozen(spec: dict[str, Any]) -> None:
    with pytest.raises(AttributeError):
        make_rule(spec).something = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name",
    sorted({"downpour", "dynsgd", "staleness_aware", "ssp", "hogwild", "single", "geo", "dc_asgd"}),
)
def test_one_worker_is_sequential_training(name: str) -> None:
    """Windows of 4, 4 and a last one of 2 steps: nothing is lost or counted twice."""
    rule = make_rule(name).bind(1)

    class Peer:
        def __init__(self) -> None:
            self.center = np.zeros(3, np.float32)
            self.buffer = np.zeros(3, np.float32)
            self.state = rule.init(self.center)
            self.clock = 0

        def push(self) -> None:
            commit = Commit(0, 1, self.clock, self.clock, 4, 128, 0.1)
            rule.update(self.center, self.buffer, self.state, commit, self.center)
            self.clock += 1

        def pull(self) -> None:
            self.buffer[...] = self.center

        def push_pull(self) -> None:
            self.push()
            self.pull()

    peer, local, base = Peer(), np.zeros(3, np.float32), np.zeros(3, np.float32)
    alone = np.zeros(3, np.float32)
    for window in (4, 4, 2):
        for _ in range(window):
            local -= np.float32(0.1) * (local - 1)
            alone -= np.float32(0.1) * (alone - 1)
        rule.exchange(local, base, peer)
    np.testing.assert_allclose(peer.center, alone, atol=1e-6)
    np.testing.assert_allclose(local, alone, atol=1e-6)


def test_names_are_those_of_the_rules() -> None:
    assert rule_names() == sorted(rule_names())
    for name in rule_names():
        assert make_rule(name).name == name
        assert make_rule(name.upper().replace("_", "-")).name == name


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'dynsgd'") as caught:
        make_rule("dynsdg")
    assert "'downpour'" in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "options", "word"),
    [
        ("bsp", {"foo": 1}, "foo"),
        ("bsp", {"payload": "weights"}, "payload"),
        ("downpour", {"window": 5}, "window"),
        ("ssp", {"staleness": 1.5}, "staleness"),
        ("diloco", {"momentum": 1.0}, "momentum"),
        ("adam", {"learning_rate": -1}, "learning_rate"),
        ("adam", {"beta_2": float("nan")}, "beta_2"),
        (BSP(), {"payload": "delta"}, "payload"),
        (7, {}, "7"),
        ({"nme": "bsp"}, {}, "nme"),
    ],
)
def test_a_wrong_option_is_refused(rule: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make_rule(rule, **options)


def test_classes_and_objects_are_taken() -> None:
    assert make_rule(DynSGD) == DynSGD()
    assert make_rule(BSP, payload="delta") == BSP(payload="delta")
    rule = DynSGD()
    assert make_rule(rule) is rule


class Halving:
    """A user's rule without any base class."""

    default_window = 3

    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor

    def init(self, center: FloatArray) -> State:
        return {"count": 0}

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        state["count"] += 1
        out[...] = center + self.factor * delta


class Subclassed(Rule):
    """A user's rule with the base class."""

    name = "subclassed"

    def update(
        self, center: FloatArray, delta: FloatArray, state: State, commit: Commit, out: FloatArray
    ) -> None:
        out[...] = center - delta


@pytest.mark.parametrize(
    ("given_rule", "want"), [(Halving, 1.5), (Halving(0.25), 1.25), (Subclassed, 0.0)]
)
def test_a_users_own_rule_works(given_rule: Any, want: float) -> None:
    rule = pickle.loads(pickle.dumps(make_rule(given_rule)))
    center, delta = np.ones(4, np.float32), np.ones(4, np.float32)
    state = rule.init(center)
    rule.update(center, delta, state, Commit(0, 1, 0, 0, 1, 1), center)
    np.testing.assert_array_equal(center, want)
    assert rule.may_continue(100, 0)
    assert rule.bind(4) is rule
    assert rule.payload == "delta"
    assert not rule.blocking
    assert rule.name in ("halving", "subclassed")


def test_options_of_a_users_class() -> None:
    rule = make_rule(Halving, factor=2.0)
    assert rule.config() == {"factor": 2.0}
    assert rule.default_window == 3
    with pytest.raises(ConfigError, match="fctor"):
        make_rule(Halving, fctor=2.0)


@every_rule
def test_threads_change_no_bit(spec: dict[str, Any]) -> None:
    rule, size = make_rule(spec), 9 * BLOCK + 1
    rng = np.random.default_rng(0)
    x0, *deltas = (rng.normal(0, 1, size).astype(np.float32) for _ in range(3))
    centers = []
    for threads in (1, 3):
        use_threads(threads)
        try:
            center = x0.copy()
            state = rule.init(center)
            for clock, delta in enumerate(deltas):
                rule.update(center, delta, state, Commit(0, 3, clock, 0, 2, 64, 0.1), center)
        finally:
            use_threads(1)
        centers.append(center)
    np.testing.assert_array_equal(*centers)


def test_an_adapted_rule_overrides_just_what_its_object_has() -> None:
    class Waiting(Halving):
        def may_continue(self, clock: int, slowest_clock: int) -> bool:
            return clock == slowest_clock

    plain, waiting = make_rule(Halving), make_rule(Waiting)
    assert type(plain).may_continue is Rule.may_continue
    assert type(plain).exchange is Rule.exchange
    assert type(waiting).may_continue is not Rule.may_continue
    assert not waiting.may_continue(2, 1)
