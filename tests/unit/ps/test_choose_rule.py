"""Which rule and window a mode gets, and which combinations are refused."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdl.codecs import DGC
from sparkdl.config import AUTO_WINDOW, EPOCH_WINDOW, FitConfig
from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.ps.choice import choose_codec, choose_rule, choose_server_exchange
from sparkdl.rules import StalenessAware, make_rule


@pytest.mark.parametrize(
    ("mode", "frequency", "name", "payload", "window"),
    [
        ("asynchronous", "auto", "downpour", "delta", AUTO_WINDOW),
        ("asynchronous", "batch", "downpour", "delta", 1),
        ("asynchronous", "epoch", "geo", "delta", EPOCH_WINDOW),
        ("asynchronous", 7, "downpour", "delta", 7),
        ("hogwild", "auto", "hogwild", "delta", AUTO_WINDOW),
        ("hogwild", "epoch", "hogwild", "delta", EPOCH_WINDOW),
        ("synchronous", "auto", "bsp", "gradient", 1),
        ("synchronous", "batch", "bsp", "gradient", 1),
        ("synchronous", "epoch", "bsp", "delta", EPOCH_WINDOW),
        ("synchronous", 4, "bsp", "delta", 4),
    ],
)
def test_defaults(mode: str, frequency: Any, name: str, payload: str, window: int) -> None:
    rule, chosen = choose_rule(mode, frequency, None)
    assert (rule.name, rule.payload, chosen) == (name, payload, window)


def test_whole_epochs_are_averaged_not_added_up() -> None:
    averaged, added = (choose_rule("hogwild", f, None)[0] for f in ("epoch", "auto"))
    assert (averaged.config()["scale"], averaged.damps) == ("mean", False)
    assert (added.config()["scale"], added.damps) == ("sum", True)
    assert choose_rule("asynchronous", "epoch", "downpour")[0].name == "downpour"


def test_changes_that_add_up_are_damped_unless_the_user_says_no() -> None:
    assert choose_rule("asynchronous", "auto", None)[0].damps
    given = {"name": "downpour", "damping": False}
    assert not choose_rule("asynchronous", "auto", given)[0].damps
    assert not any(make_rule(name).damps for name in ("geo", "dynsgd", "adag", "bsp"))


def test_a_rule_brings_its_own_window() -> None:
    rule, window = choose_rule("asynchronous", "auto", StalenessAware())
    assert window == rule.default_window == 5


@pytest.mark.parametrize(
    ("mode", "frequency", "rule"),
    [
        ("asynchronous", "auto", "bsp"),
        ("synchronous", "auto", "downpour"),
        ("hogwild", "auto", "dynsgd"),
        ("synchronous", 5, "bsp"),
        ("synchronous", "auto", "ensemble"),
        ("asynchronous", 5, "adam"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(mode: str, frequency: Any, rule: str) -> None:
    with pytest.raises(ConfigError):
        choose_rule(mode, frequency, rule)


def test_gradients_of_a_scaled_loss_are_not_for_an_optimizer_at_the_server() -> None:
    class LossScaleOptimizer:
        inner_optimizer = None

    asynchronous = FitConfig(mode="asynchronous", frequency="batch")
    with pytest.raises(ConfigError, match="the loss is scaled"):
        choose_server_exchange(asynchronous, "adam", None, LossScaleOptimizer())
    assert choose_server_exchange(asynchronous, "downpour", None, LossScaleOptimizer())
    in_step = FitConfig(mode="synchronous")
    assert choose_server_exchange(in_step, None, None, LossScaleOptimizer())


class _Optimizer:
    """Stands for a compiled optimizer: its class's name and momentum are all that is asked."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum


SGD = type("SGD", (_Optimizer,), {})
Adam = type("Adam", (_Optimizer,), {})


@pytest.mark.parametrize(
    ("compression", "mode", "rule", "frequency", "transport", "optimizer", "reason"),
    [
        ("fp16", "asynchronous", None, "auto", "shm", SGD(0.0), "shared memory"),
        ("fp16", "asynchronous", "ensemble", "auto", "auto", SGD(0.0), "never exchange"),
        ("topk", "asynchronous", None, "epoch", "auto", SGD(0.0), "one exchange per epoch"),
        ("onebit", "synchronous", "averaging", "auto", "auto", SGD(0.0), "exchange per epoch"),
        ("dgc", "asynchronous", "downpour", "auto", "auto", SGD(0.0), "for gradients"),
        ("dgc", "asynchronous", "adam", "auto", "auto", SGD(0.0), "rule 'adam'"),
        ("dgc", "synchronous", None, "auto", "auto", SGD(0.9), "without momentum"),
        ("dgc", "synchronous", None, "auto", "auto", Adam(0.0), "Adam"),
        ({"name": "topk", "ratio": 2}, "asynchronous", None, "auto", "auto", SGD(0.0), "ratio"),
        ("zip", "asynchronous", None, "auto", "auto", SGD(0.0), "'fp16'"),
    ],
)
def test_compression_that_makes_no_sense_is_refused(
    compression: Any, mode: str, rule: Any, frequency: Any, transport: str, optimizer: Any,
    reason: str,
) -> None:  # fmt: skip
    chosen, window = choose_rule(mode, frequency, rule)
    with pytest.raises(ConfigError, match=reason):
        choose_codec(compression, chosen, window, transport, optimizer)


@pytest.mark.parametrize(
    ("compression", "mode", "rule", "optimizer"),
    [
        (None, "asynchronous", None, Adam(0.0)),
        ("none", "asynchronous", None, Adam(0.0)),
        ("fp16", "synchronous", "averaging", Adam(0.0)),
        ("topk", "hogwild", None, Adam(0.0)),
        ("int8", "synchronous", None, Adam(0.0)),
        ("dgc", "synchronous", None, SGD(0.0)),
        ("dgc", "asynchronous", "sgd", Adam(0.0)),
        (DGC(momentum=0.0), "asynchronous", None, Adam(0.0)),
    ],
)
def test_compression_that_makes_sense(
    compression: Any, mode: str, rule: Any, optimizer: Any
) -> None:
    chosen, window = choose_rule(mode, "auto", rule)
    codec = choose_codec(compression, chosen, window, "auto", optimizer)
    assert (codec is None) == (compression in (None, "none"))


def test_unknown_rules_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="'dynsgd'"):
        choose_rule("asynchronous", "auto", "dynsdg")
