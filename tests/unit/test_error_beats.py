"""Every error of this library says what was expected and what was received."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from sparkdl import errors

PACKAGE = Path(errors.__file__).parent

TELL_THEMSELVES = {"UnknownArgumentError", "UnknownNameError", "RanksLost", "WorkerError"}
"""Classes that make both of their arguments (a name and the known ones), or that carry another
error: a worker's, which has its own beats, or a process' end."""


def _kinds(trees: dict[Path, ast.Module]) -> set[str]:
    """Names of SparkDLError and of all classes below it, those outside of errors.py too."""
    classes = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    kinds = {"SparkDLError"}
    while True:
        more = {n.name for n in classes if kinds & {_last_name(base) for base in n.bases}}
        if more <= kinds:
            return kinds
        kinds |= more


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _made(tree: ast.Module, kinds: set[str]) -> Iterator[ast.Call]:
    """The places where an error is made, to be raised here, kept, or sent to another process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func) in kinds:
            yield node


def test_every_error_says_what_was_expected_and_what_was_received() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    kinds = _kinds(trees)
    assert {"ConfigError", "WaitTimeoutError", "BusyError"} <= kinds
    silent = []
    for path, tree in trees.items():
        for call in _made(tree, kinds - TELL_THEMSELVES):
            given = {keyword.arg for keyword in call.keywords}
            if None not in given and not {"expected", "received"} <= given:
                silent.append(f"{path.relative_to(PACKAGE)}:{call.lineno} {ast.unparse(call)[:80]}")
    assert silent == []


def test_what_is_not_implemented_is_an_abstract_method() -> None:
    """A bare NotImplementedError would reach users without a word of what to do instead."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            raised = [n for n in ast.walk(node) if isinstance(n, ast.Raise) and n.exc is not None]
            bare = [n for n in raised if "NotImplementedError" in ast.unparse(n.exc or n)]
            body = [n for n in node.body if not isinstance(n, ast.Expr)]
            if bare and body != bare:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}")
    assert found == []
