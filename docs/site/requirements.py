"""Prints what the extra ``docs`` needs, for pip; the package itself and its frameworks are not."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
print(*project["optional-dependencies"]["docs"])
