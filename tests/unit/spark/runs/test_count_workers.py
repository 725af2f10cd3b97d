"""How many workers a fit has, and how many of them must have a slot at the same time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.config import FitConfig
from sparkdl.errors import ResourceError
from sparkdl.ps.choice import choose_server_exchange
from sparkdl.spark.fit.plan import count_workers
from sparkdl.spark.runs import capacity

pytestmark = pytest.mark.keras


@pytest.mark.parametrize(
    ("mode", "rule", "told"),
    [
        ("synchronous", None, "mode 'synchronous' needs all"),
        ("asynchronous", "ssp", "rule 'ssp' needs all"),
        ("asynchronous", None, ""),
        ("hogwild", None, ""),
    ],
)
def test_workers_that_wait_for_others_need_a_slot_each(
    monkeypatch: pytest.MonkeyPatch, mode: str, rule: str | None, told: str
) -> None:
    monkeypatch.setattr(capacity, "count_slots", lambda spark, profile=None: 2)
    config = FitConfig(mode=mode, num_workers=8)
    exchange = choose_server_exchange(config, rule, None, None)
    conf = SimpleNamespace(get=lambda name, default=None: default)
    context = SimpleNamespace(master="local[2]", getConf=lambda: conf)
    spark = SimpleNamespace(sparkContext=context, conf=conf)
    source: Any = SimpleNamespace(spark=spark, files=())
    if told:
        with pytest.raises(ResourceError, match=told):
            count_workers(config, exchange, source)
    else:
        assert count_workers(config, exchange, source) == (8, 2)
    assert exchange.all_at_once is bool(told)
