"""docs/pipelines.md and the README's pipeline run as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import functions as F

ROOT = Path(__file__).resolve().parents[3]


def blocks(text: str, folder: Path) -> str:
    """The page's Python, which saves below ``folder``: a JVM keeps the directory it began in."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    return re.sub(r'(save|load)\("([^"/:]+)"\)', rf'\1("{folder}/\2")', code)


def test_the_page_about_pipelines(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"spark": spark, "__name__": "__main__"}
    exec(blocks((ROOT / "docs" / "pipelines.md").read_text(), tmp_path), names)
    assert names["tuned"].avgMetrics[1] > 0.8


def test_the_pipeline_of_the_readme(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stage_cases import builder, table

    monkeypatch.chdir(tmp_path)
    section = (ROOT / "README.md").read_text().split("## Pipelines of Spark ML")[1]
    frame = table(spark, "array").select("features", F.col("label").cast("int"))
    names: dict[str, Any] = {"df": frame, "model": builder(), "spark": spark}
    exec(blocks(section.split("\n## ")[0], tmp_path), names)
    stage = names["pipeline_model"].stages[-1]
    assert np.isfinite(stage.history["loss"]).all()
