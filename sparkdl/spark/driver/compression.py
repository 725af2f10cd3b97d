"""Which codec a run gets, and which combinations make no sense."""

from __future__ import annotations

from typing import Any

from sparkdl.config import EPOCH_WINDOW
from sparkdl.errors import ConfigError
from sparkdl.ps.codecs import DGC, Codec, make_codec
from sparkdl.ps.rules import Rule


def choose_codec(
    compression: Any, rule: Rule, window: int, transport: str, optimizer: Any
) -> Codec | None:
    """The codec that ``compression`` stands for, if it goes with the rest; None for none.

    Args:
        compression: None, a name, a codec, a class of codecs, or ``{'name': ..., **options}``.
        rule: The run's.
        window: Batches per exchange.
        transport: What the user chose: ``'auto'``, ``'http'``, ``'socket'`` or ``'shm'``.
        optimizer: Of the compiled model.

    Raises:
        ConfigError: The combination would do nothing, or train wrong; says why.
        UnknownNameError: No such codec.
    """
    codec = make_codec(compression)
    if not codec.lossy:
        return None
    if rule.independent:
        raise ConfigError(
            f"compression has no effect with rule {rule.name!r}",
            expected="compression=None",
            received=repr(codec),
            hint="its workers never exchange anything",
        )
    if transport == "shm" and not codec.shapes_training:
        raise ConfigError(
            "compression has no effect on shared memory",
            expected="parameter_server_mode='auto', 'socket' or 'http', or compression=None",
            received=f"parameter_server_mode='shm', compression={codec!r}",
            hint="'auto' compresses where the bytes cross a network, and only there",
        )
    if window == EPOCH_WINDOW and codec.feedback:
        raise ConfigError(
            f"codec {codec.name!r} does not go with one exchange per epoch",
            expected="a codec that keeps nothing back ('fp16', 'bf16'), or a shorter window",
            received=f"{codec!r} with rule {rule.name!r}",
            hint=f"what {codec.name} keeps back is sent with the next exchange: an epoch too late, "
            "and after the last epoch never; frequency=8, say, exchanges often enough",
        )
    if isinstance(codec, DGC) and codec.momentum:
        _require_no_other_momentum(codec, rule, optimizer)
    return codec


def _require_no_other_momentum(codec: DGC, rule: Rule, optimizer: Any) -> None:
    """DGC is momentum SGD with rare messages: it needs gradients, and nobody else's momentum."""
    if rule.payload != "gradient":
        raise ConfigError(
            "codec 'dgc' has a momentum of its own, which is for gradients",
            expected="a rule on gradients: rule='sgd', or mode='synchronous'",
            received=f"rule {rule.name!r}, whose workers send the change of the weights",
            hint="compression='topk' goes with every rule; so does DGC(momentum=0)",
        )
    who = f"rule {rule.name!r}"
    plain = rule.name in ("sgd", "dc_asgd", "gap_aware") and not getattr(rule, "momentum", 0)
    if rule.blocking:
        who = f"the model's optimizer, {type(optimizer).__name__}"
        plain = type(optimizer).__name__ == "SGD" and not optimizer.momentum
    if not plain:
        raise ConfigError(
            "codec 'dgc' has a momentum of its own",
            expected="plain gradient descent where its gradients are applied: SGD without momentum",
            received=who + ", which is not that",
            hint="the codec's momentum takes its place; or DGC(momentum=0), or 'topk'",
        )
