"""Checks of options: what is allowed, and what the message says of a value that is not."""

from __future__ import annotations

import math
from typing import Any

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
