"""Which rule and window ``mode='allreduce'`` gets, and which do not go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkdl.codecs import SUM_DTYPES, Codec, make_codec
from sparkdl.collective.arithmetic import require_not_bfloat16
from sparkdl.collective.rules import ExchangeRule, Mean, make_rule
from sparkdl.config import EPOCH_WINDOW, FitConfig
from sparkdl.errors import ConfigError


@dataclass(frozen=True)
class AllReduceExchange:
    """The rule and the window by which workers exchange with each other.

    Args:
        rule: How the ranks' gradients or weights become one.
        window: Batches between two exchanges; see :class:`sparkdl.config.LoopSettings`.
        compression: A key of :data:`sparkdl.codecs.SUM_DTYPES`; None for float32.
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
        return None if self.compression is None else SUM_DTYPES[self.compression]


def choose_all_reduce_exchange(
    config: FitConfig, rule: object, compression: object, optimizer: object
) -> AllReduceExchange:
    """The exchange for what the user asked.

    Args:
        config: With ``mode='allreduce'``.
        rule: As :func:`sparkdl.collective.rules.make_rule` takes it; None for the mean of the
            gradients.
        compression: As :func:`sparkdl.codecs.make_codec` takes it; one of
            :data:`sparkdl.codecs.SUM_DTYPES`.

    Raises:
        ConfigError: A combination that makes no sense; says why.
        UnknownNameError: No such rule.
    """
    chosen = make_rule("mean" if rule is None else rule)
    chosen.bind(1, optimizer_config(optimizer))
    codec = make_codec(compression)
    if codec.lossy:
        _check_codec(chosen, codec, config.communicator)
    window = _window(chosen, config.frequency)
    return AllReduceExchange(chosen, window, codec.name if codec.lossy else None)


def optimizer_config(optimizer: Any) -> dict[str, Any]:
    """A Keras optimizer as ``ExchangeRule.bind`` takes it.

    With the variables that are excluded from weight decay, which Keras keeps outside of the
    configuration; a class of the user's own is named with its module.
    """
    of_keras = type(optimizer).__module__.partition(".")[0] == "keras"
    name = ("" if of_keras else f"{type(optimizer).__module__}.") + type(optimizer).__name__
    excluded = getattr(optimizer, "_exclude_from_weight_decay", ())
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    config = optimizer.get_config()
    if hasattr(optimizer, "inner_optimizer"):
        config["inner_optimizer"] = optimizer_config(optimizer.inner_optimizer)
    if excluded or pattern is not None:
        config["exclude_from_weight_decay"] = pattern.pattern if pattern else len(excluded)
    return {"class_name": name, "config": config}


def _window(rule: ExchangeRule, frequency: str | int) -> int:
    if frequency == "auto":
        return rule.default_window
    if rule.own_window:
        raise ConfigError(
            f"rule {rule.name!r} chooses its window itself", expected="frequency='auto'",
            received=f"frequency={frequency!r}", hint="rule='local_sgd' takes a fixed one",
        )  # fmt: skip
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


def _check_codec(rule: ExchangeRule, codec: Codec, communicator: str) -> None:
    if codec.sum_dtype is None:
        raise ConfigError(
            "mode 'allreduce' cannot reduce what this codec makes",
            expected="compression=None" + "".join(f", {n!r}" for n in SUM_DTYPES if n != "none"),
            received=repr(codec),
            hint="rule='powersgd' and rule='onebit_adam' compress in mode 'allreduce'; "
            "sparse and quantized codecs work in the modes with a server",
        )
    if not rule.takes_halves:
        raise ConfigError(
            f"compression does not go with rule {rule.name!r}",
            expected="compression=None",
            received=f"compression={codec.name!r}",
            hint="it does with rules that send plain sums or means: 'mean', 'sum', 'local_sgd', "
            "'adaptive_local_sgd', 'diloco'",
        )
    if communicator == "horovod":
        require_not_bfloat16(codec.sum_dtype)
