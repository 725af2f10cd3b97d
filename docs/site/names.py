"""Every name of the package as its source has it, and what a reference in a docstring means.

Docstrings name other parts as ``:class:`Rule```, ``:meth:`sparkdl.SparkModel.fit``` and so on. A
target is looked for where it stands: in the class, in the module, in the module's package, among
the public names; then as a whole name. Nothing of the package is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc|obj):`(~?)([^`]+?)(?:\(\))?`")
OTHERS = {"keras", "pyspark", "numpy", "pyarrow", "tensorflow", "torch", "jax", "mlflow", "pandas"}


@dataclass
class Scope:
    """A module or a class: its own names, and where the names that it imports come from."""

    members: set[str] = field(default_factory=set)
    imports: dict[str, str] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reference:
    """A reference in a docstring.

    Args:
        module: In which module.
        within: In which class, or empty.
        target: What it names.
        line: Of the docstring.
    """

    module: str
    within: str
    target: str
    line: int


@cache
def scopes() -> dict[str, Scope]:
    """The scopes of the package by dotted name."""
    found: dict[str, Scope] = {}
    for path in sorted((ROOT / "sparkdl").rglob("*.py")):
        _read(module_name(path), ast.parse(path.read_text()), found)
    package = found["sparkdl"]
    for node in ast.parse((ROOT / "sparkdl/__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES":
            for name, home in ast.literal_eval(node.value).items():
                module, _, attribute = home.partition(":")
                package.imports[name] = f"{module}.{attribute or name}"
    return found


def module_name(path: Path) -> str:
    """Of a file of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read(name: str, tree: ast.Module | ast.ClassDef, found: dict[str, Scope]) -> None:
    scope = found[name] = Scope()
    for node in ast.walk(tree) if isinstance(tree, ast.Module) else ():
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                scope.imports.setdefault(alias.asname or alias.name, f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                scope.imports.setdefault(alias.asname or alias.name, alias.name)
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef):
            scope.members.add(node.name)
            _read(f"{name}.{node.name}", node, found)
            found[f"{name}.{node.name}"].bases = [ast.unparse(base) for base in node.bases]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            scope.members.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                scope.members |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    if isinstance(tree, ast.ClassDef):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                scope.members.add(node.attr)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def find(name: str, depth: int = 0) -> str | None:
    """The name under which something is defined; None if there is no such thing."""
    known = scopes()
    if name in known:
        return name
    if name.split(".")[0] != "sparkdl":
        return name if _exists_elsewhere(name) else None
    owner, _, last = name.rpartition(".")
    owner = find(owner, depth + 1) or "" if owner and depth < 8 else ""
    scope = known.get(owner)
    if scope is None:
        return None
    if last in scope.members:
        return f"{owner}.{last}"
    if last in scope.imports:
        return find(scope.imports[last], depth + 1) if depth < 8 else None
    for base in scope.bases:
        inherited = resolve(base, owner.rpartition(".")[0])
        if inherited and (found := find(f"{inherited}.{last}", depth + 1) if depth < 8 else None):
            return found
    return None


def resolve(target: str, module: str, within: str = "") -> str | None:
    """What a reference means, as the name under which it is defined; None: nothing."""
    target = target.split("[")[0].strip()
    package = module.rpartition(".")[0]
    places = [f"{module}.{within}" if within else "", module, package, "sparkdl", ""]
    for place in dict.fromkeys(places):
        if found := find(f"{place}.{target}" if place else target):
            return found
    return None


def _exists_elsewhere(name: str) -> bool:
    first = name.split(".")[0]
    if first in OTHERS:
        return True
    if first not in sys.stdlib_module_names and first not in dir(__builtins__):
        return False
    return "." in name or importlib.util.find_spec(first) is not None or first[0].isupper()


def references() -> Iterator[Reference]:
    """All references of the package's docstrings, also of those below assignments."""
    for path in sorted((ROOT / "sparkdl").rglob("*.py")):
        module, tree = module_name(path), ast.parse(path.read_text())
        yield from _references(module, "", tree)


def _references(module: str, within: str, tree: ast.AST) -> Iterator[Reference]:
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, ast.ClassDef) else ""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for found in ROLE.finditer(str(node.value.value)):
                yield Reference(module, within, found[2], node.lineno)
        yield from _references(module, ".".join(filter(None, [within, inner])), node)


def _listed(value: ast.expr, tree: ast.Module) -> list[str]:
    """The texts of a list; of ``[*TABLE]`` the keys of that dict of the module."""
    if isinstance(value, ast.List) and isinstance(value.elts[0], ast.Starred):
        table = ast.unparse(value.elts[0].value)
        found = (
            n.value
            for n in tree.body
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == table
        )
        return list(ast.literal_eval(next(found)))
    return list(ast.literal_eval(value))


def public_names(module: str) -> list[str]:
    """What a module offers: its ``__all__``, or else its public classes and functions."""
    path = ROOT / (module.replace(".", "/") + ".py")
    if not path.exists():
        path = ROOT / module.replace(".", "/") / "__init__.py"
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = _listed(node.value, tree)
            return [f"{module}.{name}" for name in names]
    defined = (n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef))
    return [f"{module}.{name}" for name in defined if not name.startswith("_")]
