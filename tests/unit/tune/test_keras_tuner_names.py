"""Keras Tuner's ``build(hp)`` on a trial of ours."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdl import tune
from sparkdl.errors import ConfigError
from sparkdl.tune.suggestions import HyperParameters, Space


def test_each_name_asks_the_trial() -> None:
    def build(hp: Any) -> Any:
        found = (
            hp.Int("units", 16, 64, step=16, default=32), hp.Int("depth", 1, 100, sampling="log"),
            hp.Float("drop", 0.0, 0.5, step=0.1), hp.Float("rate", 1e-4, 1e-1, sampling="log"),
            hp.Choice("kind", ["relu", "tanh"], ordered=False), hp.Boolean("norm"),
            hp.Fixed("seed", 7),
        )  # fmt: skip
        assert hp.get("units") == found[0]
        return found

    trials = [tune.Trial(n, seed=3) for n in range(40)]
    made: list[Any] = [tune.from_keras_tuner(build)(trial) for trial in trials]
    assert {m[0] for m in made} == {16, 32, 48, 64}
    assert {m[4] for m in made} == {"relu", "tanh"}
    assert {m[5] for m in made} == {False, True}
    assert {m[6] for m in made} == {7}
    assert trials[0].spaces["rate"] == Space("float", 1e-4, 1e-1, None, True)
    assert trials[0].spaces["depth"].log
    assert list(trials[0].params.values()) == list(made[0])


def test_an_object_that_builds_is_taken_as_a_function_is() -> None:
    """As ``keras_tuner.HyperModel``; one that wants to fit by itself is refused."""

    class Model:
        def build(self, hp: Any) -> Any:
            return hp.Int("units", 16, 16)

    class Fitting(Model):
        def fit(self, hp: Any, model: Any) -> Any: ...

    build: Any = tune.from_keras_tuner(Model())  # type: ignore[arg-type]
    assert build(tune.Trial(0, seed=3)) == 16
    for strange in (Fitting(), 7):
        with pytest.raises(ConfigError, match="what builds a model"):
            tune.from_keras_tuner(strange)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ask",
    [
        lambda hp: hp.Float("x", 0.1, 1.0, sampling="reverse_log"),
        lambda hp: hp.Int("x", 1, 10, step=2, sampling="log"),
        lambda hp: hp.get("x"),
    ],
)
def test_what_has_no_counterpart_is_refused(ask: Any) -> None:
    with pytest.raises(ConfigError, match="'x'"):
        ask(HyperParameters(tune.Trial(0)))
