"""docs/pipelines.md runs as printed (test_notebooks.py runs the README)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

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
