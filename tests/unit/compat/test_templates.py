"""Functions with ``{{...}}`` in them: what is found, what is drawn, what runs."""

from __future__ import annotations

import math
from typing import Any

import cloudpickle
import pytest

from sparkdl.compat.elephas.hyperparam import Template
from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.tune import Trial

pytestmark = pytest.mark.keras
# names that Hyperas' users import; the function below is never run as it stands
choice = uniform = quniform = loguniform = randint = normal = None
SIZES = [8, 16]


def layer(units: Any, rate: float = 0.0) -> tuple[Any, float]:
    return units, rate


def several(x: int) -> Any:
    first = layer({{choice(SIZES)}}, rate={{uniform(0, 1)}})
    second = layer({{choice([("a", 1), ("b", 2)])}}, rate={{quniform(0, 10, 2.5)}})
    rest = [{{loguniform(-3, 0)}}, {{randint(4)}}, {{normal(5, 0.1)}}]
    return x, first, second, rest


def test_each_trial_has_values_of_its_own() -> None:
    template = Template(several)
    assert [h.name for h in template.holes] == [
        "layer", "rate", "layer_1", "rate_1", "value", "value_1", "value_2",
    ]  # fmt: skip
    seen = []
    for number in range(40):
        trial = Trial(number)
        x, first, second, rest = template.fill(trial)(7)
        assert template.fill(Trial(number))(7) == (x, first, second, rest)  # the same again
        assert set(trial.params) == {h.name for h in template.holes}
        assert x == 7
        assert first[0] in SIZES
        assert 0 <= first[1] <= 1
        assert second[0] in [("a", 1), ("b", 2)]
        assert second[1] in (0, 2.5, 5, 7.5, 10)
        assert math.exp(-3) <= rest[0] <= 1
        assert rest[1] in range(4)
        assert 4 < rest[2] < 6
        seen.append((first, second, tuple(rest)))
    assert len({s[0][1] for s in seen}) == 40
    assert {s[0][0] for s in seen} == {8, 16}
    assert {s[1][0] for s in seen} == {("a", 1), ("b", 2)}


def test_a_function_in_a_function_takes_its_names_along() -> None:
    from math import sqrt as root

    width = 3

    def inner() -> float:
        return root({{choice([width * width])}}) + width

    filled = cloudpickle.loads(cloudpickle.dumps(Template(inner).fill(Trial(0))))
    assert filled() == 6.0


def test_functions_without_hyperparameters_stay_as_they_are() -> None:
    def plain() -> Any:
        return {1, 2}, {"a": {1}}

    assert Template(plain).fill(Trial(0))() == ({1, 2}, {"a": {1}})


def unknown() -> Any:
    return {{poisson(3)}}  # noqa: F821


def named() -> Any:
    return {{uniform(low=0, high=1)}}


def inside(x: int) -> Any:
    return {{uniform(0, x)}}


def test_what_is_no_hyperparameter_says_so() -> None:
    with pytest.raises(UnknownNameError, match="unknown distribution 'poisson'"):
        Template(unknown)
    with pytest.raises(ConfigError, match=r"(?s)expected: \{\{choice.*received: \{\{uniform"):
        Template(named)
    with pytest.raises(ConfigError, match=r"(?s)known outside of the function.*\{\{uniform\(0, x"):
        Template(inside).fill(Trial(0))
    with pytest.raises(ConfigError, match="no function"):
        Template("text")  # type: ignore[arg-type]
    names: dict[str, Any] = {}
    exec("def made(): return 1", names)
    with pytest.raises(ConfigError, match="source of"):
        Template(names["made"])
