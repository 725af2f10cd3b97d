"""What Horovod's operations are given inside a compiled step, with equal ranks in their place."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from sparkdl.learner.steps.tensorflow_exchange import HorovodExchange
from sparkdl.weights import Layout

RANKS = 3


@pytest.fixture
def equal_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod, as if all ranks had the same numbers: sums in the dtype that travels."""

    def grouped_allreduce(tensors: list[Any], **options: Any) -> list[Any]:
        return [tf.add_n([t] * RANKS) for t in tensors]

    module = ModuleType("horovod.tensorflow")
    module.Sum = "sum"  # type: ignore[attr-defined]
    module.grouped_allreduce = grouped_allreduce  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "horovod", ModuleType("horovod"))
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", module)


@pytest.mark.usefixtures("equal_ranks")
def test_what_is_finite_stays_so_in_half_precision_and_an_infinity_stays_one() -> None:
    layout = Layout.of([("a", (5,), "float32")])
    exchange = HorovodExchange(layout, "float16", [slice(0, 5)], checks=False)
    gradient = tf.constant([1e6, -1e6, 2.0, np.inf, np.nan])
    (joined,) = exchange([gradient], tf.constant(1.0), tf.constant(0.0)).values
    np.testing.assert_allclose(joined, [64000, -64000, 2, np.inf, np.nan], rtol=1e-3)
