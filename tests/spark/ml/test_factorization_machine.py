"""The example of a factorization machine, on few rows."""

from __future__ import annotations

from typing import Any

import factorization_machine


def test_pairs_are_learnt_by_a_machine_and_not_by_a_linear_model(spark: Any) -> None:
    found = factorization_machine.compare(spark, 12_000, 2)
    assert found["linear"] < 0.65
    assert found["factorization machine"] > 0.8
