"""What the doctor says about the memory of a model, with sizes known by arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.config import FitConfig
from sparkdl.diagnosis.host_checks import FRAMEWORK_BYTES
from sparkdl.diagnosis.model_memory import check_model, needs_of, row_bytes
from sparkdl.layers import ServedEmbedding
from sparkdl.settings.network import Network
from sparkdl.tables.service import TableSpec
from sparkdl.tables.store import RowStore

MB = 1 << 20


def model(optimizer: Any = "adam", **table: Any) -> Any:
    x = keras.Input((4,), dtype="int64")
    rows = keras.layers.Flatten()(ServedEmbedding(16, table="ads", optimizer="adagrad", **table)(x))
    made = keras.Model(x, keras.layers.Dense(65536, use_bias=False)(rows))  # 64 x 65536: 16 MiB
    made.compile(optimizer, "mse")
    return made


def facts(free: int, network: str = "a", limit: int | None = None) -> dict[str, Any]:
    return {"memory": {"free": free, "limit": limit}, "network": network, "host": network}


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [("sgd", 0), (keras.optimizers.SGD(0.1, momentum=0.9), 1), ("adam", 2)],
)
def test_slots_are_those_of_the_optimizer(optimizer: Any, slots: int) -> None:
    made = model(optimizer)
    needs = needs_of(made, FitConfig(mode="allreduce", num_workers=2))
    assert (needs.slots, needs.servers, needs.workers) == (slots, 0, 2)
    assert needs.worker - FRAMEWORK_BYTES == pytest.approx((3 + slots) * 16 * MB, abs=1000)


def test_large_weights_lie_once_in_an_executor_that_predicts() -> None:
    small = needs_of(model(), FitConfig(mode="allreduce"))
    assert small.predicting(4) == pytest.approx(4 * (FRAMEWORK_BYTES + 16 * MB), abs=4000)
    large = replace(small, weights=400 * MB)
    assert large.predicting(4) == 4 * FRAMEWORK_BYTES + 400 * MB


def test_servers_hold_their_range_and_a_buffer_for_each_worker() -> None:
    config = FitConfig(mode="asynchronous", num_workers=4, network=Network(num_servers=2))
    needs = needs_of(model(), config)
    assert needs.server == pytest.approx(200 * MB + 8 * MB * 6, abs=1000)


def test_rows_of_a_table_take_what_a_store_takes() -> None:
    store = RowStore(16, "adagrad", "zeros", name="ads")
    rows = 300_000
    store.push(np.arange(rows), np.ones((rows, 16), np.float32), 0.1)
    size = row_bytes(TableSpec("ads", store.settings))
    assert size == 4 * 32 + 8 + 18.5
    assert store.nbytes / rows == pytest.approx(size, rel=0.5)  # between two growths


def test_what_fits_and_what_does_not() -> None:
    config = FitConfig(mode="allreduce", num_workers=2)
    made = model()
    enough = {"1": facts(8 << 30), "2": facts(8 << 30, "b")}
    checks = check_model(made, config, facts(8 << 30), enough)
    assert [c.status for c in checks] == ["ok", "ok"]
    assert "for four workers of an executor" in checks[0].found
    assert "'ads' 154 bytes a row" in checks[1].found
    assert "in 2 workers" in checks[1].found
    small = {"1": facts(3 << 30), "2": facts(3 << 30)}  # two on one machine
    checks = check_model(made, config, facts(8 << 30), small)
    assert checks[0].status == "error"
    assert "1.5 GiB at an executor" in checks[0].found
    bounded = model(max_rows=10**9)
    checks = check_model(bounded, config, facts(8 << 30), enough)
    assert checks[1].status == "error"
    assert "max_rows" in checks[1].expected
    servers = FitConfig(mode="asynchronous", num_workers=2, network=Network(num_servers=2))
    checks = check_model(made, servers, facts(8 << 30), enough)
    assert "with 2 servers" in checks[0].found
    assert "rows in 2 servers" in checks[1].found
    assert check_model(made, servers, facts(1 << 30), enough)[0].status == "error"
