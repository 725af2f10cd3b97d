"""What ``run`` says of arguments about rows."""

from __future__ import annotations

from typing import Any

import pytest

import sparkdl
from sparkdl import Feeding, Limits
from sparkdl.errors import ConfigError, UnknownNameError


@pytest.mark.parametrize(
    "given", [{"epochs": 2}, {"shuffle": True}, {"feeding": Feeding(seed=3)},
              {"feeding": Feeding(uneven="pad")}, {"limits": Limits(memory_budget_mb=64)}],
)  # fmt: skip
def test_what_has_no_effect_without_data_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="and has none"):
        sparkdl.run(print, **given)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="uneven"):
        Feeding(uneven="split")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="epochs"):
        sparkdl.run(print, epochs=0)
