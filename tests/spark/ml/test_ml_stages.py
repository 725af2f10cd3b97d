"""The cases of stage_cases.py on two executors; in one process and on Connect: ml_elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage_cases import CASES

MARKS = {
    "case_features_of_every_kind": pytest.mark.slow,
    "case_more_partitions_than_rows": pytest.mark.slow,
    "case_a_pipeline_is_saved_and_loaded": pytest.mark.oldest,
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES],
    ids=lambda name: name.removeprefix("case_"),
)
def test_on_executors(name: str, spark: Any, tmp_path: Path) -> None:
    CASES[name](spark, tmp_path)
