"""Checks of options: what is allowed, and what the message says of a value that is not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from sparkdl.errors import ConfigError
from sparkdl.settings import values

CASES: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
    ("require_positive", {}, [1, 0.5], [0, -1, math.nan, math.inf, True, "1", None]),
    ("require_positive", {"or_none": True}, [1, None], [0, "1"]),
    ("require_not_negative", {}, [0, 2.5], [-0.1, math.nan, False, None]),
    ("require_fraction", {}, [0, 0.99], [1, -0.1, math.nan, None]),
    ("require_share", {}, [1, 0.01], [0, 1.01, None]),
    ("require_whole", {}, [-3, 0], [1.0, True, None]),
    ("require_whole", {"least": 1}, [1, 9], [0, 1.5]),
    ("require_whole", {"least": 1, "or_none": True}, [1, None], [0]),
    ("require_one_of", {"known": ("sum", "mean")}, ["sum"], ["max", None]),
]


@pytest.mark.parametrize(("check", "arguments", "allowed", "refused"), CASES)
def test_values_are_allowed_or_refused(
    check: str, arguments: dict[str, Any], allowed: list[Any], refused: list[Any]
) -> None:
    for value in allowed:
        getattr(values, check)("diloco", "momentum", value, **arguments)
    for value in refused:
        with pytest.raises(ConfigError, match="'diloco'") as caught:
            getattr(values, check)("diloco", "momentum", value, **arguments)
        assert "'momentum'" in caught.value.what
        assert caught.value.expected
        assert caught.value.received == f"momentum={value!r}"


@dataclass(frozen=True)
class Halved(values.Options):
    """A rule, codec or optimizer whose options are checked where it says so."""

    share: float = values.option(0.5, values.require_share)
    label: str = "any"
    name: ClassVar[str] = "halved"


def test_an_option_is_checked_by_what_it_is_declared_with() -> None:
    assert Halved().config() == {"share": 0.5, "label": "any"}
    assert type(replace(Halved(), share=np.float32(0.25)).config()["share"]) is float
    told = "'halved' cannot take this value for its option 'share'"
    for wrong in (2.0, None, "0.5"):
        with pytest.raises(ConfigError, match=told):
            Halved(share=wrong)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Quartered(Halved):
    """A class that changes what an option may be."""

    share: float = values.option(0.25, values.require_fraction)


def test_a_subclass_declares_an_option_anew() -> None:
    assert Quartered(share=0.0).share == 0.0
    with pytest.raises(ConfigError, match=r"a number in \[0, 1\)"):
        Quartered(share=1.0)
