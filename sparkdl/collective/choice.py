"""Which rule and window ``mode='allreduce'`` gets, and which do not go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkdl.collective.rules import ExchangeRule, Mean, make_rule
from sparkdl.config import EPOCH_WINDOW, FitConfig
from sparkdl.errors import ConfigError

WIRES = {"fp16": "float16", "bf16": "bfloat16"}
"""What ``compression=`` takes in this mode, and the dtype that it stands for."""


@dataclass(frozen=True)
class AllReduceExchange:
    """What workers exchange with each other, and when.

    Args:
        rule: How the ranks' gradients or weights become one.
        window: Batches between two exchanges; see :class:`sparkdl.config.LoopSettings`.
        compression: A key of :data:`WIRES`; None for float32.
    """

    rule: ExchangeRule
    window: int
    compression: str | None = None
    in_step: bool = True
    all_at_once: bool = True
    independent: bool = False

    @property
    def joins_gradients(self) -> bool:
        """Whether each step of a rank takes the mean of all ranks' gradients."""
        return type(self.rule) is Mean

    @property
    def wire(self) -> str | None:
        """The dtype that values travel as; None for float32."""
        return None if self.compression is None else WIRES[self.compression]


def choose_all_reduce_exchange(
    config: FitConfig, rule: Any, compression: Any, optimizer: Any
) -> AllReduceExchange:
    """The exchange for what the user asked.

    Args:
        config: With ``mode='allreduce'``.
        rule: As :func:`sparkdl.collective.rules.make_rule` takes it; None for the mean of the
            gradients.
        compression: None, ``'fp16'`` or ``'bf16'``.
        optimizer: Of the compiled Keras model.

    Raises:
        ConfigError: A combination that makes no sense; says why.
        UnknownNameError: No such rule.
    """
    chosen = make_rule("mean" if rule is None else rule)
    chosen.bind(1, optimizer_config(optimizer))
    _check_compression(chosen, compression, config.communicator)
    return AllReduceExchange(chosen, _window(chosen, config.frequency), compression)


def optimizer_config(optimizer: Any) -> dict[str, Any]:
    """A Keras optimizer as ``ExchangeRule.bind`` takes it."""
    return {"class_name": type(optimizer).__name__, "config": optimizer.get_config()}


def _window(rule: ExchangeRule, frequency: str | int) -> int:
    if frequency == "auto":
        return rule.default_window
    if rule.own_window:
        raise ConfigError(
            f"rule {rule.name!r} chooses its window itself",
            expected="frequency='auto'",
            received=f"frequency={frequency!r}",
            hint="rule='local_sgd' takes a fixed one",
        )
    if frequency == "epoch":
        if rule.exchanges != "weights":
            raise ConfigError(
                f"rule {rule.name!r} would take one step in an epoch",
                expected="frequency='batch', or the number of batches to accumulate",
                received="frequency='epoch'",
                hint="rules on weights exchange once an epoch: rule='local_sgd', say",
            )
        return EPOCH_WINDOW
    return 1 if frequency == "batch" else int(frequency)


def _check_compression(rule: ExchangeRule, compression: Any, communicator: str) -> None:
    if compression is None:
        return
    if not isinstance(compression, str) or compression not in WIRES:
        raise ConfigError(
            "mode 'allreduce' cannot reduce what this codec makes",
            expected="compression=None, 'fp16' or 'bf16'",
            received=repr(compression),
            hint="rule='powersgd' and rule='onebit_adam' compress in mode 'allreduce'; "
            "sparse and quantized codecs work in the modes with a server",
        )
    if not rule.takes_halves:
        raise ConfigError(
            f"compression does not go with rule {rule.name!r}",
            expected="compression=None",
            received=f"compression={compression!r}",
            hint="it does with rules that send plain sums or means: 'mean', 'sum', 'local_sgd', "
            "'adaptive_local_sgd', 'downpour', 'diloco'",
        )
    if compression == "bf16" and communicator == "horovod":
        raise ConfigError(
            "Horovod cannot reduce bfloat16",
            expected="compression=None or 'fp16' with Horovod",
            received="compression='bf16'",
            hint="communicator='builtin' can",
        )
