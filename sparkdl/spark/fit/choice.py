"""From the arguments of ``SparkModel`` to what its workers exchange."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from sparkdl.collective.choice import AllReduceExchange, choose_all_reduce_exchange
from sparkdl.collective.rules import EXCHANGE_RULES, ExchangeRule, Mean
from sparkdl.collective.rules import make_rule as make_exchange_rule
from sparkdl.collective.rules import rule_names as exchange_names
from sparkdl.config import FitConfig
from sparkdl.errors import ConfigError, ModelError, SparkDLError
from sparkdl.ps.choice import ServerExchange, choose_server_exchange
from sparkdl.rules import RULES, Rule, make_rule, rule_names

ChosenExchange = ServerExchange | AllReduceExchange


def choose_exchange(
    config: FitConfig, rule: object, compression: object, optimizer: object
) -> ChosenExchange:
    """The exchange that fits what the user asked.

    Args:
        rule: A name, a rule, a class of rules, a dict, or None for the mode's default.
        compression: A name, a codec, a class of codecs, a dict, or None for float32.

    Raises:
        ConfigError: A combination that makes no sense; says why.
        UnknownNameError: No such rule or codec.
    """
    require_family(config.mode, rule)
    choose = choose_server_exchange if config.with_server else choose_all_reduce_exchange
    return choose(config, rule, compression, optimizer)


def require_refusable(on_nan: str, exchange: ChosenExchange) -> None:
    """Refuses ``on_nan='skip'`` where a worker's update cannot be left out.

    Raises:
        ConfigError: The rule of ``exchange`` wants one of each worker.
    """
    if isinstance(exchange, AllReduceExchange):
        fits = type(exchange.rule) is Mean and exchange.window == 1
    else:
        fits = not exchange.independent
    if on_nan == "skip" and not fits:
        raise ConfigError(
            f"rule {exchange.rule.name!r} needs every worker's update, so none can be refused",
            expected="on_nan='raise' or 'ignore' with this rule", received="on_nan='skip'",
            hint="the default rule of each mode can leave updates out",
        )  # fmt: skip


def require_family(mode: str, rule: object) -> None:
    """Refuses a rule of the other family: with a server, or without one.

    Raises:
        ConfigError: Names the mode in which ``rule`` works.
    """
    name = _name_of(rule)
    if mode == "allreduce":
        with_server = _is_a(rule, Rule) and not _is_a(rule, ExchangeRule)
        if (with_server or name in RULES) and name not in EXCHANGE_RULES:
            server_mode = _server_mode(rule)
            raise ConfigError(
                f"rule {name!r} works through a parameter server",
                expected="a rule of mode 'allreduce': " + ", ".join(exchange_names()),
                received=f"rule={name!r}, mode='allreduce'",
                hint=f"did you mean mode={server_mode!r}?",
            )
    elif _is_a(rule, ExchangeRule) or (name in EXCHANGE_RULES and name not in RULES):
        raise ConfigError(
            f"rule {name!r} works between workers, without a server",
            expected="a rule of the modes with a server: " + ", ".join(rule_names()),
            received=f"rule={name!r}, mode={mode!r}", hint="did you mean mode='allreduce'?",
        )  # fmt: skip


def restore_rule(mode: str, saved: Mapping[str, Any]) -> Rule | ExchangeRule:
    """A rule from what ``get_config`` said of it.

    Args:
        mode: Modes with a server have other rules than ``'allreduce'``, some of the same name.

    Raises:
        ModelError: It is a rule of the user's own, which only the user can make, or its arguments
            are malformed.
    """
    options = dict(saved)
    name = options.pop("name")
    names = exchange_names() if mode == "allreduce" else rule_names()
    if name not in names:
        raise ModelError(
            f"the model was trained with a rule of your own, {name!r}",
            expected="one of " + ", ".join(map(repr, names)), received=repr(name),
            hint="load_spark_model(path, rule=your rule)",
        )  # fmt: skip
    try:
        if mode == "allreduce":
            return make_exchange_rule(name, **options)
        return make_rule(name, **options)
    except SparkDLError:
        raise
    except Exception as error:  # of Keras, for example, of whose optimizer it has the settings
        raise ModelError(
            f"the rule {name!r}, with which the model was trained, has malformed arguments",
            expected="those that it was saved with",
            received=f"{type(error).__name__}: {str(error)[:200]}",
            hint="load_spark_model(path, rule=the rule)",
        ) from error


def is_default_rule(
    mode: str, frequency: str | int, saved: Mapping[str, Any], optimizer: object
) -> bool:
    """Whether a rule, as plain values, is the one of its mode where the user names none."""
    rule = choose_exchange(FitConfig(mode=mode, frequency=frequency), None, None, optimizer).rule
    return dict(saved) == {"name": rule.name, **rule.config()}


def _name_of(rule: object) -> str:
    if isinstance(rule, Mapping):
        rule = rule.get("name", rule.get("class_name", ""))
    if isinstance(rule, str):
        return rule.strip().lower().replace("-", "_")
    return str(getattr(rule, "name", "") or getattr(rule, "__name__", ""))


def _is_a(rule: object, kind: type) -> bool:
    return isinstance(rule, kind) or (inspect.isclass(rule) and issubclass(rule, kind))


def _server_mode(rule: object) -> str:
    made = make_rule(rule)
    if made.lock_free:
        return "hogwild"
    return "synchronous" if made.blocking else "asynchronous"
