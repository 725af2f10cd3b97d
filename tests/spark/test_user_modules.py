"""What the user defines in a module beside the script, which no executor can import."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spark_models import make_mlp

import sparkdl
from sparkdl import Limits, SparkModel

MODULE = """
    from dataclasses import dataclass
    from typing import ClassVar

    from sparkdl.collective.rules import Mean
    from sparkdl.collective.rules.reductions import MeanGradientExchange
    from sparkdl.rules.downpour import Downpour

    FACTOR = 1.0


    @dataclass(frozen=True)
    class Exchanged(Mean):
        name: ClassVar[str] = "exchanged"

        def open(self, communicator, layout):
            return ScaledExchange(communicator, layout)


    class ScaledExchange(MeanGradientExchange):
        def reduce(self, rows):
            self.trained *= FACTOR
            return super().reduce(rows)


    @dataclass(frozen=True)
    class Served(Downpour):
        name: ClassVar[str] = "served"


    def scaled(value):
        return [float(v) * FACTOR for v in value]


    def who():
        import sparkdl
        return sparkdl.communicator().rank, FACTOR
"""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "beside_the_script.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("beside_the_script")
    sys.modules.pop("beside_the_script")


@pytest.mark.parametrize(("mode", "rule"), [("allreduce", "Exchanged"), ("asynchronous", "Served")])
def test_a_rule_of_ones_own(digits_df: Any, beside: Any, mode: str, rule: str) -> None:
    options = (
        {"communicator": "builtin", "limits": Limits(max_restarts=0)} if mode == "allreduce" else {}
    )
    spark_model = SparkModel(
        make_mlp(), mode, num_workers=2, rule=getattr(beside, rule)(), **options
    )
    history = spark_model.fit(digits_df, epochs=3, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]


def test_a_function_of_a_module(spark: Any, beside: Any) -> None:
    told = sparkdl.run(beside.who, num_workers=2, communicator="builtin")
    assert told == [(0, 1.0), (1, 1.0)]
    told = sparkdl.run(lambda: beside.who(), num_workers=2, communicator="builtin")
    assert told == [(0, 1.0), (1, 1.0)]
