"""From settings to the recipe of a mode."""

from __future__ import annotations

from sparkdl.config import FitConfig
from sparkdl.ps.choice import ServerExchange
from sparkdl.spark.driver.allreduce_run import AllReduceRecipe
from sparkdl.spark.driver.choice import ChosenExchange
from sparkdl.spark.driver.server_run import ServerOptions, ServerRecipe


def recipe_of(config: FitConfig, exchange: ChosenExchange) -> ServerRecipe | AllReduceRecipe:
    """The recipe for checked settings."""
    options = ServerOptions(
        config.parameter_server_mode, config.port, config.server_bind, config.server_address,
        config.start_timeout_s, config.worker_timeout_s,
        exchange.codec if isinstance(exchange, ServerExchange) else None,
    )  # fmt: skip
    if isinstance(exchange, ServerExchange):
        return ServerRecipe(options, exchange.rule, exchange.window)
    return AllReduceRecipe(
        config.communicator, exchange.wire, options, config.restarts, exchange.rule,
        exchange.window,
    )  # fmt: skip
