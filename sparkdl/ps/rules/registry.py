"""From what a user writes as ``rule=`` to a rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.ps.rules.adag import Adag
from sparkdl.ps.rules.adapted import adapt
from sparkdl.ps.rules.averaging import Averaging, Ensemble, Single
from sparkdl.ps.rules.bsp import BSP
from sparkdl.ps.rules.compensated import DCASGD, GapAware
from sparkdl.ps.rules.diloco import AsyncDiLoCo, DiLoCo
from sparkdl.ps.rules.downpour import Downpour, DownpourAdagrad
from sparkdl.ps.rules.dynsgd import DynSGD, Experimental, StalenessAware
from sparkdl.ps.rules.elastic import AEASGD, EAMSGD
from sparkdl.ps.rules.geo import GeoSGD
from sparkdl.ps.rules.hogwild import Hogwild
from sparkdl.ps.rules.keras_config import from_keras_config
from sparkdl.ps.rules.optimizer import SGD, Adagrad, Adam, AdamW, RMSprop
from sparkdl.ps.rules.rule import Rule
from sparkdl.ps.rules.ssp import SSP

_RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        Downpour,
        DownpourAdagrad,
        Adag,
        DynSGD,
        StalenessAware,
        Experimental,
        AEASGD,
        EAMSGD,
        SSP,
        BSP,
        DCASGD,
        GapAware,
        Hogwild,
        GeoSGD,
        DiLoCo,
        AsyncDiLoCo,
        Averaging,
        Ensemble,
        Single,
        SGD,
        Adagrad,
        RMSprop,
        Adam,
        AdamW,
    )
}


def rule_names() -> list[str]:
    """The names that ``rule=`` takes, sorted."""
    return sorted(_RULES)


def make_rule(rule: Any, **options: Any) -> Rule:
    """The rule that ``rule`` and ``options`` stand for.

    Args:
        rule: A name (``'dynsgd'``), a :class:`Rule` (kept as it is), a class of rules, or any
            class or object with an ``update`` method like ``Rule.update`` (``init`` is optional),
            a dict ``{'name': ..., **options}``, or a Keras optimizer as ``{'class_name': ...,
            'config': {...}}`` (it then runs on the server).
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
    if isinstance(rule, Mapping):
        return _from_mapping(rule, options)
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


def _from_mapping(rule: Mapping[str, Any], options: Mapping[str, Any]) -> Rule:
    if "class_name" in rule and not options:
        return from_keras_config(rule)
    if isinstance(rule.get("name"), str):
        rest = {key: value for key, value in rule.items() if key != "name"}
        return make_rule(rule["name"], **{**rest, **options})
    raise ConfigError(
        "cannot make a rule of a dict",
        expected="{'name': ..., **options}, or {'class_name': ..., 'config': {...}} on its own",
        received=f"keys {sorted(map(str, rule))}, options {sorted(options)}",
        hint="known names: " + ", ".join(rule_names()),
    )


def _as_rule(rule: Any) -> Rule:
    if isinstance(rule, Rule):
        return rule
    if callable(getattr(rule, "update", None)):
        return adapt(rule)
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
