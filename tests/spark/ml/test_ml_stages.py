"""The cases of stage_cases.py on two executors; in one process and on Connect: ml_elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage_cases import CASES

QUICK = (
    "case_columns_are_of_sparks_own_types_and_keras_own_numbers",
    "case_a_pipeline_is_saved_and_loaded",
)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
    ids=lambda name: name.removeprefix("case_"),
)
def test_on_executors(name: str, spark: Any, tmp_path: Path) -> None:
    CASES[name](spark, tmp_path)
