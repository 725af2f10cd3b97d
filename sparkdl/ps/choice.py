"""Which rule, window and codec a run with a server gets, and which do not go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkdl.codecs import DGC, Codec, make_codec
from sparkdl.config import AUTO_WINDOW, EPOCH_WINDOW, FitConfig
from sparkdl.errors import ConfigError
from sparkdl.rules import DCASGD, SGD, GapAware, Rule, make_rule

DEFAULT_RULES = {"asynchronous": "downpour", "hogwild": "hogwild", "synchronous": "bsp"}
# What all workers learn in an epoch would take the center too far if it were added up; ADR 0030.
EPOCH_RULES = {"asynchronous": {"name": "geo"}, "hogwild": {"name": "hogwild", "scale": "mean"}}


@dataclass(frozen=True)
class ServerExchange:
    """The rule, the window and the codec of workers and their parameter server.

    Args:
        rule: How a commit changes the center.
        window: Batches between two exchanges; see :class:`sparkdl.config.LoopSettings`.
        codec: What commits travel as; None for float32.
    """

    rule: Rule
    window: int
    codec: Codec | None = None

    @property
    def in_step(self) -> bool:
        """Whether all workers take each step together."""
        return self.rule.blocking

    @property
    def joins_gradients(self) -> bool:
        """Whether each step of a worker takes the mean of all workers' gradients."""
        return self.rule.blocking and self.rule.payload == "gradient"

    @property
    def all_at_once(self) -> bool:
        """Whether workers wait for others in some way, so that all must run at the same time."""
        return self.rule.blocking or self.rule.gated

    @property
    def independent(self) -> bool:
        """Whether each worker trains a model of its own, and the models never meet."""
        return self.rule.independent

    @property
    def compression(self) -> dict[str, Any] | None:
        """The codec as plain values."""
        return None if self.codec is None else {"name": self.codec.name, **self.codec.config()}


def choose_server_exchange(
    config: FitConfig, rule: object, compression: object, optimizer: object
) -> ServerExchange:
    """The exchange for what the user asked.

    Args:
        config: With a mode that has a server.
        rule: As :func:`sparkdl.rules.make_rule` takes it; None for the mode's default.
        compression: As :func:`choose_codec` takes it.

    Raises:
        ConfigError: A combination that makes no sense; says why.
        UnknownNameError: No such rule or codec.
    """
    chosen, window = choose_rule(config.mode, config.frequency, rule)
    if chosen.payload == "gradient" and not chosen.blocking:
        _require_plain_gradients(chosen, optimizer)
    if config.network.num_servers != 1 or config.network.servers == "executors":
        _require_splitting(chosen)
    codec = choose_codec(compression, chosen, window, config.parameter_server_mode, optimizer)
    return ServerExchange(chosen, window, codec)


def _require_splitting(rule: Rule) -> None:
    """Refuses a rule that several servers cannot run: each sees only a range of the weights."""
    if rule.independent:
        raise ConfigError(
            f"several servers have no effect with rule {rule.name!r}",
            expected="one server beside the driver",
            received=f"rule={rule.name!r}, whose workers never exchange anything",
        )
    if not rule.splits:
        raise ConfigError(
            f"rule {rule.name!r} may need all weights at once",
            expected="a rule that treats each weight by itself, and says so in the class with its "
            "update: elementwise = True",
            received=f"{type(rule).__name__}.update without it, and servers that hold ranges",
            hint="one server beside the driver, if the rule takes a norm or another sum over all "
            "weights",
        )


def _require_plain_gradients(rule: Rule, optimizer: object) -> None:
    """The server's optimizer takes the gradients as they are; in mixed precision they are scaled,
    and only the model's own optimizer knows by how much."""
    if hasattr(optimizer, "inner_optimizer"):
        raise ConfigError(
            f"rule {rule.name!r} has an optimizer at the server, and the loss is scaled",
            expected="a model compiled with auto_scale_loss=False, or another rule",
            received=f"rule={rule.name!r} and a {type(optimizer).__name__}",
            hint="rule='downpour' and mode='synchronous' step with the model's own optimizer",
        )


def choose_rule(mode: str, frequency: str | int, rule: object) -> tuple[Rule, int]:
    """The rule and the window (batches per exchange) for what the user asked.

    Raises:
        ConfigError: The rule does not work in that mode.
        UnknownNameError: No such rule.
    """
    chosen: Rule
    if rule is None and mode == "synchronous":
        payload = "gradient" if frequency in ("auto", "batch", 1) else "delta"
        chosen = make_rule("bsp", payload=payload)
    elif rule is None and frequency == "epoch":
        chosen = make_rule(EPOCH_RULES[mode])
    else:
        chosen = make_rule(DEFAULT_RULES[mode] if rule is None else rule)
    if chosen.blocking != (mode == "synchronous"):
        waits = "waits for all workers" if chosen.blocking else "does not wait for the others"
        raise ConfigError(
            f"rule {chosen.name!r} does not go with mode {mode!r}",
            expected="a rule that waits for all" if mode == "synchronous" else "one that does not",
            received=f"{chosen.name!r}, which {waits}",
            hint=f"mode={'synchronous' if chosen.blocking else 'asynchronous'!r}",
        )
    if mode == "hogwild" and not chosen.lock_free:
        raise ConfigError(
            f"rule {chosen.name!r} needs the server's lock",
            expected="rule='hogwild' in mode 'hogwild'", received=repr(chosen.name),
            hint="mode='asynchronous' takes every rule that does not wait",
        )  # fmt: skip
    if chosen.payload == "gradient":
        if frequency not in ("auto", "batch", 1):
            raise ConfigError(
                f"rule {chosen.name!r} takes a gradient at every batch",
                expected="frequency='batch'", received=f"frequency={frequency!r}",
                hint="a rule on weight changes (payload='delta') takes longer windows",
            )  # fmt: skip
        return chosen, 1
    if frequency == "auto":
        return chosen, AUTO_WINDOW if rule is None else chosen.default_window
    if frequency == "epoch":
        return chosen, EPOCH_WINDOW
    return chosen, 1 if frequency == "batch" else int(frequency)


def choose_codec(
    compression: object, rule: Rule, window: int, transport: str, optimizer: object
) -> Codec | None:
    """The codec that ``compression`` stands for, if it goes with the rest; None for none.

    Args:
        compression: None, a name, a codec, a class of codecs, or ``{'name': ..., **options}``.
        window: Batches per exchange.
        transport: What the user chose: ``'auto'``, ``'http'``, ``'socket'`` or ``'shm'``.

    Raises:
        ConfigError: The combination would do nothing, or train wrong; says why.
        UnknownNameError: No such codec.
    """
    codec = make_codec(compression)
    if not codec.lossy:
        return None
    if rule.independent:
        raise ConfigError(
            f"compression has no effect with rule {rule.name!r}", expected="compression=None",
            received=repr(codec), hint="its workers never exchange anything",
        )  # fmt: skip
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
    plain = isinstance(rule, (DCASGD, GapAware)) or (isinstance(rule, SGD) and not rule.momentum)
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
