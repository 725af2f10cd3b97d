"""Which rule ``mode='allreduce'`` gets, and which combinations are refused."""

from __future__ import annotations

import json
from typing import Any

import keras
import pytest

from sparkdl.codecs import FP16
from sparkdl.collective.rules import DiLoCoExchangeRule, Mean, OneBitAdam, Sliced, make_rule
from sparkdl.config import EPOCH_WINDOW, FitConfig
from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.optimizers.flat import FlatAdam, FlatSGD
from sparkdl.rules import BSP, DiLoCo, Downpour, DynSGD
from sparkdl.spark.fit.choice import choose_exchange, require_family

pytestmark = pytest.mark.keras


def choose(
    rule: Any = None, frequency: Any = "auto", compression: Any = None,
    communicator: str = "auto", optimizer: Any = None,
) -> Any:  # fmt: skip
    optimizer = optimizer or keras.optimizers.Adam()
    config = FitConfig(mode="allreduce", frequency=frequency, communicator=communicator)
    chosen = choose_exchange(config, rule, compression, optimizer)
    return chosen.rule, chosen.window, chosen.wire


@pytest.mark.parametrize(
    ("rule", "frequency", "window"),
    [
        (None, "auto", 1),
        (None, "batch", 1),
        ("mean", 4, 4),
        ("local_sgd", "auto", 8),
        ("local_sgd", "epoch", EPOCH_WINDOW),
        ({"name": "diloco", "momentum": 0.5}, 20, 20),
        (DiLoCoExchangeRule, "auto", 500),
        ("adaptive_local_sgd", "auto", 1),
        ("zero1", 2, 2),
        ("onebit_adam", "auto", 1),
    ],
)
def test_windows(rule: Any, frequency: Any, window: int) -> None:
    assert choose(rule, frequency)[1:] == (window, None)


def test_the_default_is_the_mean() -> None:
    assert choose()[0] == Mean()
    assert choose(compression="fp16")[2] == "float16"
    assert choose("local_sgd", compression="bf16")[2] == "bfloat16"
    assert choose(compression=FP16())[2] == "float16"
    assert choose(compression="none")[2] is None


SGD = keras.optimizers.SGD()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rule": "mean", "frequency": "epoch"}, "one step in an epoch"),
        ({"rule": "sliced", "frequency": "epoch"}, "one step in an epoch"),
        ({"rule": "adaptive_local_sgd", "frequency": 4}, "window itself"),
        ({"compression": "topk"}, "cannot reduce"),
        ({"compression": {"name": "topk"}}, "cannot reduce"),
        ({"compression": "fp61"}, "unknown codec 'fp61'"),
        ({"rule": "powersgd", "compression": "fp16"}, "does not go with rule 'powersgd'"),
        ({"rule": "sliced", "compression": "fp16"}, "does not go with rule 'sliced'"),
        ({"compression": "bf16", "communicator": "horovod"}, "Horovod cannot"),
        ({"rule": "onebit_adam", "optimizer": SGD}, "'SGD'"),
        ({"rule": "sliced", "optimizer": keras.optimizers.Lion()}, "'Lion'"),
        (
            {"rule": "sliced", "optimizer": keras.optimizers.Adam(gradient_accumulation_steps=2)},
            "gradient_accumulation_steps",
        ),
        ({"rule": "onebit_adam", "optimizer": keras.optimizers.Adam(amsgrad=True)}, "amsgrad"),
        ({"rule": "onebit_adam", "optimizer": keras.optimizers.Adam(clipnorm=1.0)}, "clipnorm"),
        ({"rule": {"name": "diloco", "momentum": 2.0}}, "momentum"),
        ({"rule": {"name": "diloco", "beta": 2.0}}, "beta"),
    ],
    ids=lambda value: str(value).partition(" object at ")[0],
)
def test_what_makes_no_sense_is_refused_with_the_reason(
    options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(**options)
    assert reason in str(caught.value)
    assert caught.value.expected


@pytest.mark.parametrize(
    ("mode", "rule", "meant"),
    [
        ("allreduce", "dynsgd", "asynchronous"),
        ("allreduce", "bsp", "synchronous"),
        ("allreduce", "hogwild", "hogwild"),
        ("allreduce", DynSGD(), "asynchronous"),
        ("allreduce", BSP(), "synchronous"),
        ("allreduce", {"name": "aeasgd"}, "asynchronous"),
        ("allreduce", "ensemble", "asynchronous"),
        ("asynchronous", "local_sgd", "allreduce"),
        ("synchronous", "Streaming-DiLoCo", "allreduce"),
        ("synchronous", "zero1", "allreduce"),
        ("hogwild", Mean(), "allreduce"),
        ("synchronous", DiLoCoExchangeRule, "allreduce"),
        ("allreduce", Downpour, "asynchronous"),
    ],
    ids=str,
)
def test_a_rule_of_the_other_family_is_told_its_mode(mode: str, rule: Any, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_family(mode, rule)
    assert caught.value.hint == f"did you mean mode='{meant}'?"


@pytest.mark.parametrize("rule", [None, "diloco", DiLoCo(momentum=0.5), DiLoCo])
def test_names_of_both_families_are_taken_by_each(rule: Any) -> None:
    for mode in ("allreduce", "asynchronous", "synchronous"):
        require_family(mode, rule)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    require_family("allreduce", "nonsense")  # not of the other family either
    with pytest.raises(UnknownNameError, match="nonsense") as caught:
        choose("nonsense")
    assert "'local_sgd'" in str(caught.value)


@pytest.mark.parametrize(
    "rule", [Sliced(FlatSGD(momentum=0.5)), OneBitAdam(FlatAdam(beta_1=0.8)), DiLoCoExchangeRule()]
)
def test_a_rule_is_made_again_from_its_plain_config(rule: Any) -> None:
    config = json.loads(json.dumps({"name": rule.name, **rule.config()}))
    assert make_rule(config) == rule
