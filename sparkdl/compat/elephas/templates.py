"""Functions with ``{{uniform(0, 1)}}`` in them, as Hyperas writes hyper-parameters.

To Python ``{{...}}`` is a set in a set, which is never evaluated here: each one becomes a name
whose value is drawn for each trial.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from types import FunctionType
from typing import Any

from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.tune import Trial
from sparkdl.tune.suggestions import Value

_DRAWN = "_sparkdl_drawn"
"""What a template is called in the function that runs: name -> the drawn value."""


def _normal(trial: Trial, name: str, mu: float, sigma: float) -> float:
    share = min(max(trial.suggest_float(name, 0.0, 1.0), 1e-12), 1 - 1e-12)
    return NormalDist(mu, sigma).inv_cdf(share)


Draw = Callable[..., float]
DISTRIBUTIONS: dict[str, Draw] = {
    "randint": lambda trial, name, upper: trial.suggest_int(name, 0, upper - 1),
    "uniform": Trial.suggest_float,
    "loguniform": lambda trial, name, low, high: math.exp(trial.suggest_float(name, low, high)),
    "normal": _normal,
    "lognormal": lambda trial, name, mu, sigma: math.exp(_normal(trial, name, mu, sigma)),
}
"""Hyperopt's, each also with a ``q`` before its name (``quniform(low, high, q)``: multiples of q);
the bounds of ``loguniform`` are logarithms. Beside them there is ``choice(options)``."""
_NAMES = ("choice", *DISTRIBUTIONS, *(f"q{n}" for n in DISTRIBUTIONS if n != "randint"))


@dataclass(frozen=True)
class Hole:
    """One hyper-parameter of a function.

    Args:
        name: After the keyword or the call that it is an argument of, as Hyperas names it.
        arguments: Arguments of the distribution, as code.
    """

    name: str
    distribution: str
    arguments: ast.List


class Template:
    """A function with hyper-parameters in it.

    Args:
        function: Python must be able to find its source.

    Raises:
        ConfigError: It has no source, or a hyper-parameter that is not one of Hyperas'.
        UnknownNameError: No such distribution.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not isinstance(function, FunctionType):
            raise ConfigError(
                "this is no function", expected="def model(...): ...", received=repr(function)
            )
        self._function = function
        found = inspect.getclosurevars(function)
        self._names: Mapping[str, Any] = {**function.__globals__, **found.nonlocals}
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, SyntaxError) as error:
            raise ConfigError(
                f"the source of {function.__name__!r} cannot be read",
                expected="a function with def in a file or a notebook's cell",
                received=f"{type(error).__name__}: {error}",
            ) from error
        definition = next((n for n in tree.body if isinstance(n, ast.FunctionDef)), None)
        if definition is None:
            raise ConfigError(
                "the function has no name that it could be compiled by",
                expected="a function with def", received=ast.unparse(tree)[:200],
                hint="def model(...): return ...",
            )  # fmt: skip
        definition.decorator_list = []
        self._definition = definition
        finder = _Finder()
        self._tree = ast.fix_missing_locations(finder.visit(tree))
        self.holes: list[Hole] = finder.holes

    def fill(self, trial: Trial) -> Callable[..., Any]:
        """The function with a trial's values; it can be sent to executors.

        Raises:
            ConfigError: The arguments of a distribution do not fit.
        """
        drawn = {hole.name: self._draw(hole, trial) for hole in self.holes}
        names = {**self._names, _DRAWN: drawn}
        exec(compile(self._tree, f"<{self._definition.name} of a trial>", "exec"), names)
        filled: Callable[..., Any] = names[self._definition.name]
        filled.__module__ = "__main__"  # pickled by value
        return filled

    def _draw(self, hole: Hole, trial: Trial) -> Value:
        code = ast.fix_missing_locations(ast.Expression(hole.arguments))
        try:
            arguments = eval(compile(code, f"<{hole.name}>", "eval"), dict(self._names))
            if hole.distribution == "choice":
                (options,) = arguments
                return trial.suggest_categorical(hole.name, range(len(options)))
            name = hole.distribution
            if name not in DISTRIBUTIONS:
                *arguments, step = arguments
                value = DISTRIBUTIONS[name[1:]](trial, hole.name, *arguments)
                return float(round(value / step) * step)
            return DISTRIBUTIONS[name](trial, hole.name, *arguments)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the hyper-parameter {hole.name!r} cannot be drawn",
                expected="choice(options), uniform(low, high), normal(mu, sigma), ..., of names "
                "that are known outside of the function",
                received=f"{{{{{hole.distribution}({ast.unparse(hole.arguments)[1:-1]})}}}}: "
                f"{type(error).__name__}: {error}",
            ) from error


class _Finder(ast.NodeTransformer):
    """Replaces ``{{...}}`` and notes what was there."""

    def __init__(self) -> None:
        self.holes: list[Hole] = []
        self._owner = "value"

    def visit_Call(self, node: ast.Call) -> ast.AST:
        before, self._owner = self._owner, _last_name(node.func)
        result = self.generic_visit(node)
        self._owner = before
        return result

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        before, self._owner = self._owner, node.arg or self._owner
        result = self.generic_visit(node)
        self._owner = before
        return result

    def visit_Set(self, node: ast.Set) -> ast.AST:
        inner = node.elts[0]
        if len(node.elts) != 1 or not isinstance(inner, ast.Set):
            return self.generic_visit(node)
        call = inner.elts[0]
        if len(inner.elts) != 1 or not isinstance(call, ast.Call) or call.keywords:
            raise ConfigError(
                "this is no hyper-parameter",
                expected="{{choice([...])}}, {{uniform(low, high)}}, ... without names of "
                "arguments",
                received=ast.unparse(node),
            )
        distribution = _last_name(call.func)
        if distribution not in _NAMES:
            raise UnknownNameError("distribution", distribution, _NAMES)
        name = self._free_name()
        read = ast.Load()
        self.holes.append(Hole(name, distribution, ast.List(call.args, read)))
        value: ast.expr = ast.Subscript(ast.Name(_DRAWN, read), ast.Constant(name), read)
        if distribution == "choice":  # the options may be any objects: only their number is drawn
            value = ast.Subscript(call.args[0], value, read)
        return value

    def _free_name(self) -> str:
        taken = {hole.name for hole in self.holes}
        names = (self._owner, *(f"{self._owner}_{n}" for n in range(1, len(taken) + 2)))
        return next(name for name in names if name not in taken)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "value")
