"""From what a user writes as ``rule=`` to a rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.ps.rules.adag import Adag
from sparkdl.ps.rules.adapted import AdaptedRule
from sparkdl.ps.rules.base import Rule
from sparkdl.ps.rules.bsp import BSP
from sparkdl.ps.rules.downpour import Downpour, DownpourAdagrad
from sparkdl.ps.rules.dynsgd import DynSGD, Experimental, StalenessAware
from sparkdl.ps.rules.hogwild import Hogwild

_RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        Downpour,
        DownpourAdagrad,
        Adag,
        DynSGD,
        StalenessAware,
        Experimental,
        BSP,
        Hogwild,
    )
}


def rule_names() -> list[str]:
    """The names that ``rule=`` takes, sorted."""
    return sorted(_RULES)


def make_rule(rule: Any, **options: Any) -> Rule:
    """The rule that ``rule`` and ``options`` stand for.

    Args:
        rule: A name (``'dynsgd'``), a :class:`Rule` (kept as it is), a class of rules, or any
            class or object with an ``update`` method like ``Rule.update`` (``init`` is optional).
        **options: Constructor arguments, for a name or a class.

    Returns:
        A frozen rule.

    Raises:
        UnknownNameError: No rule has that name; lists those known.
        ConfigError: An option that the rule does not have, or a value it cannot take.

    Example:
        >>> make_rule('bsp', payload='delta')
        BSP(payload='delta')
    """
    if isinstance(rule, str):
        name = rule.strip().lower().replace("-", "_")
        if name not in _RULES:
            raise UnknownNameError("rule", rule, rule_names())
        return _as_rule(_construct(_RULES[name], name, options))
    if inspect.isclass(rule):
        return _as_rule(_construct(rule, rule.__name__, options))
    if options:
        raise ConfigError(
            f"options were given beside a finished rule {rule!r}",
            expected="options only with a name or a class",
            received=", ".join(sorted(options)),
            hint="pass the options to the rule's constructor",
        )
    return _as_rule(rule)


def _as_rule(rule: Any) -> Rule:
    if isinstance(rule, Rule):
        return rule
    if callable(getattr(rule, "update", None)):
        return AdaptedRule(rule)
    raise ConfigError(
        "cannot make a rule",
        expected="a name, a Rule, or an object with update(center, delta, state, commit, out)",
        received=repr(rule),
        hint="known names: " + ", ".join(rule_names()),
    )


def _construct(make: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Any:
    try:
        bound = inspect.signature(make).bind(**options)
    except TypeError as error:
        known = list(inspect.signature(make).parameters)
        raise ConfigError(
            f"rule {name!r}: {error}",
            expected="options " + ", ".join(known) if known else "no options",
            received=", ".join(f"{k}={v!r}" for k, v in options.items()) or "none",
            hint="see the docstring of the rule",
        ) from error
    return make(*bound.args, **bound.kwargs)
