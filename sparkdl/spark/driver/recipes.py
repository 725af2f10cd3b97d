"""From the arguments of ``SparkModel`` to how its workers exchange updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparkdl.collective.rules import make_rule as make_exchange_rule
from sparkdl.collective.rules import rule_names as exchange_names
from sparkdl.config import MODES, parse_frequency, require_int, require_name
from sparkdl.errors import ConfigError, ModelError
from sparkdl.ps.rules import make_rule, rule_names
from sparkdl.spark.driver.allreduce_rules import require_family
from sparkdl.spark.driver.allreduce_run import COMMUNICATORS, AllReduceRecipe, choose_allreduce
from sparkdl.spark.driver.compression import choose_codec
from sparkdl.spark.driver.server_run import ServerOptions, ServerRecipe, choose_rule

DEFAULT_RESTARTS = 3


def choose_recipe(
    mode: str,
    frequency: str | int,
    rule: Any,
    communicator: str,
    compression: Any,
    max_restarts: int | None,
    options: ServerOptions,
    model: Any,
) -> ServerRecipe | AllReduceRecipe:
    """The recipe for what the user asked; arguments that have no effect are refused.

    Raises:
        ConfigError: A combination that makes no sense; says why.
        UnknownNameError: No such mode, rule, communicator or codec.
    """
    require_name("mode", mode, MODES)
    require_name("communicator", communicator, COMMUNICATORS)
    frequency = parse_frequency(frequency)
    if max_restarts is not None:
        require_int("max_restarts", max_restarts, 0)
    if mode == "allreduce":
        if options.transport != "auto":
            raise ConfigError(
                "parameter_server_mode has no effect in mode 'allreduce'",
                expected="parameter_server_mode='auto', its default",
                received=repr(options.transport),
                hint="communicator='builtin' or 'horovod' says how gradients travel",
            )
        restarts = DEFAULT_RESTARTS if max_restarts is None else max_restarts
        return choose_allreduce(
            frequency, rule, communicator, compression, restarts, options, model
        )
    if communicator != "auto":
        raise ConfigError(
            "communicator has no effect in a mode with a server",
            expected=f"communicator='auto', its default, in mode {mode!r}",
            received=repr(communicator),
            hint="mode='allreduce' uses it",
        )
    if max_restarts is not None:
        raise ConfigError(
            "max_restarts has no effect in a mode with a server",
            expected=f"max_restarts=None in mode {mode!r}",
            received=str(max_restarts),
            hint="there Spark replaces a lost worker meanwhile: spark.task.maxFailures",
        )
    require_family(mode, rule)
    chosen, window = choose_rule(mode, frequency, rule)
    codec = choose_codec(compression, chosen, window, options.transport, model.optimizer)
    return ServerRecipe(replace(options, codec=codec), chosen, window)


def restore_rule(mode: str, saved: Mapping[str, Any]) -> Any:
    """A rule from what ``get_config`` said of it.

    Args:
        mode: Modes with a server have other rules than ``'allreduce'``, some of the same name.
        saved: ``name`` and the constructor's arguments.

    Raises:
        ModelError: It is a rule of the user's own, which only the user can make.
    """
    options = dict(saved)
    name = options.pop("name")
    names = exchange_names() if mode == "allreduce" else rule_names()
    if name not in names:
        raise ModelError(
            f"the model was trained with a rule of your own, {name!r}",
            expected="one of " + ", ".join(map(repr, names)),
            received=repr(name),
            hint="load_spark_model(path, rule=your rule)",
        )
    return (make_exchange_rule if mode == "allreduce" else make_rule)(name, **options)
