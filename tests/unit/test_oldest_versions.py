"""``make test-oldest`` runs with the lower bounds of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINS = {
    name.lower(): version
    for name, version in re.findall(
        r"^([\w.-]+)==(\S+)$", (ROOT / "tests" / "constraints-oldest.txt").read_text(), re.MULTILINE
    )
}


@pytest.mark.parametrize(
    "promise",
    [*PROJECT["dependencies"], *EXTRAS["tensorflow"], *EXTRAS["tune"], *EXTRAS["images"]],
)
def test_the_oldest_that_is_promised_is_what_is_tested(promise: str) -> None:
    found = re.fullmatch(r"([\w-]+)>=([\d.]+)(,<[\d.]+)?", promise)
    assert found is not None
    name, bound = found[1], [int(part) for part in found[2].split(".")]
    pinned = [int(part) for part in PINS[name].split(".")]
    assert pinned[: len(bound)] == bound
    assert not any(pinned[len(bound) :])


def test_tensorflow_for_cpus_is_the_same() -> None:
    assert PINS["tensorflow-cpu"] == PINS["tensorflow"]
