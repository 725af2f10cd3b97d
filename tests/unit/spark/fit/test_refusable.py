"""Where ``on_nan='skip'`` can leave an update out, and where every worker's is needed."""

from __future__ import annotations

import pytest

from sparkdl.collective.choice import AllReduceExchange
from sparkdl.collective.rules import make_rule as make_exchange_rule
from sparkdl.config import EPOCH_WINDOW, ON_NAN
from sparkdl.errors import ConfigError
from sparkdl.ps.choice import ServerExchange
from sparkdl.rules import make_rule
from sparkdl.spark.fit.choice import ChosenExchange, require_refusable

CAN = [
    AllReduceExchange(make_exchange_rule("mean"), 1),
    AllReduceExchange(make_exchange_rule("mean"), 1, "fp16"),
    ServerExchange(make_rule("downpour"), 16),
    ServerExchange(make_rule("hogwild"), 16),
    ServerExchange(make_rule("bsp"), 1),
]
CANNOT = [
    AllReduceExchange(make_exchange_rule("mean"), 4),
    AllReduceExchange(make_exchange_rule("sum"), 1),
    AllReduceExchange(make_exchange_rule("local_sgd"), 8),
    AllReduceExchange(make_exchange_rule("local_sgd"), EPOCH_WINDOW),
    AllReduceExchange(make_exchange_rule("zero1"), 1),
    ServerExchange(make_rule("ensemble"), EPOCH_WINDOW),
]


@pytest.mark.parametrize("exchange", CAN)
def test_an_update_that_is_one_of_many_can_be_left_out(exchange: ChosenExchange) -> None:
    for on_nan in ON_NAN:
        require_refusable(on_nan, exchange)


@pytest.mark.parametrize("exchange", CANNOT)
def test_one_that_the_rule_needs_cannot(exchange: ChosenExchange) -> None:
    for on_nan in ("raise", "ignore"):
        require_refusable(on_nan, exchange)
    with pytest.raises(
        ConfigError, match=rf"(?s){exchange.rule.name!r} needs every.*'raise' or 'ignore'.*'skip'"
    ):
        require_refusable("skip", exchange)
