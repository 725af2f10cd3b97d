"""Imports go one way: the contracts of pyproject.toml are complete, and hold for imports by name.

import-linter follows import statements; these tests look at what it does not see: modules in no
layer, names of modules in texts (``import_module``, tables of lazy names), and the table in
docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sparkdl

PACKAGE = Path(sparkdl.__file__).parent
REPOSITORY = Path(__file__).parents[2]
FRAMEWORKS = {"keras", "tensorflow", "jax", "torch", "horovod"}
SPARK = {"pyspark", "py4j"}

ROOMS = {
    "sparkdl.ps", "sparkdl.collective", "sparkdl.process", "sparkdl.settings", "sparkdl.training"
}  # fmt: skip
WITHOUT_IMPORTS = {"sparkdl", *ROOMS}
"""Packages whose modules are in several layers; their ``__init__`` imports nothing."""

BY_NAME = {
    ("sparkdl.process.start_lines", "sparkdl.process"),
    ("sparkdl.collective.communicator", "sparkdl.collective.horovod"),
    ("sparkdl.collective.communicator", "sparkdl.collective.builtin"),
    ("sparkdl.collective.communicator", "sparkdl.collective.current"),
    ("sparkdl.collective.horovod", "tensorflow"),
    ("sparkdl.collective.horovod", "horovod"),
    ("sparkdl.tracking.mlflow_sink", "mlflow.keras"),
}
"""The imports by name against the layers or the rules on frameworks; docs/architecture.md tells
why each is there, beside the public names of ``sparkdl`` itself."""


def _modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ["sparkdl", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _contracts() -> list[dict[str, Any]]:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    contracts: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return contracts


LAYERS = [[name.strip() for name in layer.split("|")] for layer in _contracts()[0]["layers"]]


def _layer_of(module: str) -> int | None:
    """The number of a module's layer from above; that of the longest name which holds it."""
    name = module
    while name:
        for number, layer in enumerate(LAYERS):
            if name in layer:
                return number
        name = name.rpartition(".")[0]
    return None


def _imports(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree))


def test_every_module_is_in_a_layer() -> None:
    outside = {module for module in MODULES if _layer_of(module) is None}
    assert outside == WITHOUT_IMPORTS
    for module in ROOMS:
        assert not _imports(ast.parse(MODULES[module].read_text())), module


def test_every_layer_names_a_module() -> None:
    assert [name for layer in LAYERS for name in layer if name not in MODULES] == []


@pytest.mark.parametrize(
    ("contract", "exempt"),
    [
        ("Nothing imports what is for tests", {"sparkdl.testing"}),
        (
            "Only spark, compat, diagnosis, images and linear import pyspark",
            {f"sparkdl.{n}" for n in ("spark", "compat", "diagnosis", "images", "linear")},
        ),
        ("Only learner and layers import a framework", {"sparkdl.learner", "sparkdl.layers"}),
    ],
)
def test_a_contract_has_every_part_of_the_package_as_its_source(
    contract: str, exempt: set[str]
) -> None:
    [found] = [one for one in _contracts() if one["name"] == contract]
    parts = {module for module in MODULES if module.count(".") == 1}
    assert set(found["source_modules"]) == parts - exempt


def test_what_is_below_spark_and_learner_is_in_the_contract_that_says_so() -> None:
    [found] = [one for one in _contracts() if one["name"].startswith("What is below")]
    learner = _layer_of("sparkdl.learner")
    assert learner is not None
    below = {
        ".".join(name.split(".")[:2])
        for number, layer in enumerate(LAYERS)
        for name in layer
        if number >= learner and name != "sparkdl.learner"
    }
    assert below <= set(found["source_modules"])


def test_the_table_of_the_documentation_is_the_contract() -> None:
    text = (REPOSITORY / "docs/architecture.md").read_text()
    section = text.split("## Imports go one way")[1].split("\n## ")[0]
    table = section.split("|---|---|\n")[1].split("\n\n")[0]
    rows = [
        [f"sparkdl.{name}" for name in re.findall(r"`([\w.]+)`", row.split("|")[1])]
        for row in table.splitlines()
    ]
    assert rows == LAYERS


def _other_texts(tree: ast.Module) -> set[int]:
    """Ids of the texts that import nothing: docstrings, and the public home of a class."""
    found = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    homes = (n for n in ast.walk(tree) if isinstance(n, ast.Assign))
    return found | {id(n.value) for n in homes if ast.unparse(n.targets[0]) == "__module__"}


def _names(tree: ast.Module) -> Iterator[str]:
    """Modules that a text of the code names: of this package, or imported by name."""
    others = _other_texts(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if id(node) not in others and name in MODULES and "." in name:
                yield name
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            given = node.args[0]
            if isinstance(given, ast.Constant):
                yield str(given.value)


def _is_allowed(module: str, name: str) -> bool:
    top = name.partition(".")[0]
    if top == "sparkdl":
        upper, lower = _layer_of(module), _layer_of(name)
        if upper is None or lower is None:
            return False
        same = ".".join(module.split(".")[:2]) == ".".join(name.split(".")[:2])
        return upper < lower or (upper == lower and same)
    if top in FRAMEWORKS or name == "mlflow.keras":
        return module.startswith("sparkdl.learner")
    return top not in SPARK or module.startswith(("sparkdl.spark", "sparkdl.compat"))


def test_imports_by_name_go_the_same_way() -> None:
    against = set()
    for module, path in MODULES.items():
        for name in _names(ast.parse(path.read_text())):
            if module != "sparkdl" and not _is_allowed(module, name):
                short = name if name in MODULES or name == "mlflow.keras" else name.split(".")[0]
                against.add((module, short))
    assert against == BY_NAME
