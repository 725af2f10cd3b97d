"""One run with a parameter server: the process beside the driver, and the workers' recipe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sparkdl.config import AUTO_WINDOW, EPOCH_WINDOW
from sparkdl.coordinator.driver_client import DriverClient, open_driver
from sparkdl.coordinator.settings import Settings
from sparkdl.errors import ConfigError
from sparkdl.learner.ensemble import require_cloneable
from sparkdl.learner.local_optimizer import adopt_optimizer
from sparkdl.progress.commands import Command
from sparkdl.progress.run_progress import RunProgress, progress_of
from sparkdl.ps.client import limits_of
from sparkdl.ps.codecs import Codec
from sparkdl.ps.pulling import pull_center
from sparkdl.ps.rules import Rule, make_rule
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.ps.strategy import ServerStrategy
from sparkdl.run_state import RunState
from sparkdl.spark.driver.cluster import driver_address
from sparkdl.spark.executor.trainer import TrainedRank
from sparkdl.transport.listening import ports_of
from sparkdl.weights import FloatArray, Layout

DEFAULT_RULES = {"asynchronous": "downpour", "hogwild": "hogwild", "synchronous": "bsp"}
# What all workers learn in an epoch would take the center too far if it were added up; ADR 0030.
EPOCH_RULES = {"asynchronous": {"name": "geo"}, "hogwild": {"name": "hogwild", "scale": "mean"}}


@dataclass(frozen=True)
class ServerOptions:
    """What the user says of the server; validated when built."""

    transport: str = "auto"
    port: Any = 0
    bind: str | None = None
    advertised: str | None = None
    start_timeout_s: float = 300.0
    worker_timeout_s: float = 60.0
    codec: Codec | None = None

    def __post_init__(self) -> None:
        ports_of(self.port)
        for name in ("start_timeout_s", "worker_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"{name} is wrong", expected="seconds > 0", received=repr(value))


def choose_rule(mode: str, frequency: str | int, rule: Any) -> tuple[Rule, int]:
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
            expected="rule='hogwild' in mode 'hogwild'",
            received=repr(chosen.name),
            hint="mode='asynchronous' takes every rule that does not wait",
        )
    if chosen.payload == "gradient":
        if frequency not in ("auto", "batch", 1):
            raise ConfigError(
                f"rule {chosen.name!r} takes a gradient at every batch",
                expected="frequency='batch'",
                received=f"frequency={frequency!r}",
                hint="a rule on weight changes (payload='delta') takes longer windows",
            )
        return chosen, 1
    if frequency == "auto":
        return chosen, AUTO_WINDOW if rule is None else chosen.default_window
    if frequency == "epoch":
        return chosen, EPOCH_WINDOW
    return chosen, 1 if frequency == "batch" else int(frequency)


@dataclass(frozen=True)
class ServerRecipe:
    """How the modes with a server run; see :class:`sparkdl.spark.driver.fitting.Recipe`.

    Args:
        options: Of the server.
        rule: How a commit changes the weights.
        window: Batches per exchange.
    """

    options: ServerOptions
    rule: Rule
    window: int
    barrier: bool = False
    max_restarts: int = 0

    @property
    def compression(self) -> dict[str, Any] | None:
        """The codec as plain values."""
        codec = self.options.codec
        return None if codec is None else {"name": codec.name, **codec.config()}

    @property
    def in_step(self) -> bool:
        """Whether all workers train in step, and so must run at the same time."""
        return self.rule.blocking

    def reports_live(self, spark: Any) -> bool:
        """Always: workers that do not reach the server do not train."""
        return True

    @property
    def rule_state(self) -> bytes:
        """Empty: the server's state of a rule ends with the run."""
        return b""

    def resume(self, rule_state: bytes) -> None:
        """Nothing to go on from."""

    def prepare(self, model: Any, num_workers: int) -> None:
        """Gives the model the optimizer that the rule wants, if it wants one.

        Raises:
            ConfigError: The model's optimizer cannot be what the rule wants.
            ModelError: No ensemble can be made of the model.
        """
        if self.rule.independent:
            require_cloneable(model)
        adopt_optimizer(model, self.rule.local_optimizer())

    def start(
        self, layout: Layout, center: FloatArray, num_workers: int, spark: Any, at_once: int
    ) -> contextlib.AbstractContextManager[Future[ServerRun]]:
        """Starts the server in the background."""
        return ServerRun.start(
            self.options, self.rule, layout, center, num_workers, spark, gather=at_once
        )


class ServerRun:
    """The driver's part in a run with a server; see :class:`sparkdl.spark.driver.training.Run`."""

    def __init__(self, server: ServerProcess, strategy: ServerStrategy) -> None:
        self._server, self.strategy = server, strategy
        self._connected: DriverClient | None = None

    @property
    def _driver(self) -> DriverClient:
        """The driver's connection. The first use waits until the server is up."""
        if self._connected is None:
            self._server.wait_ready()
            self._connected = open_driver(
                self._server.endpoint, limits_of(self.strategy.layout), check=self._server.check
            )
        return self._connected

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        options: ServerOptions,
        rule: Rule,
        layout: Layout,
        center: FloatArray,
        num_workers: int,
        spark: Any,
        gather: int = 0,
    ) -> Iterator[Future[ServerRun]]:
        """Starts the server's process in the background; ends it with everything it holds."""
        bind, advertised = options.bind, options.advertised
        if bind is None:
            bind, reachable = driver_address(spark)
            advertised = advertised or reachable
        rule = rule.bind(num_workers)
        config = ServerConfig(
            layout,
            rule,
            num_workers,
            mode=options.transport,  # type: ignore[arg-type]
            port=options.port,
            bind_address=bind,
            advertised_address=advertised,
            settings=Settings(
                num_workers,
                lease_s=options.worker_timeout_s,
                start_timeout_s=options.start_timeout_s,
                gather=gather,
            ),
            codec=None if options.codec is None else options.codec.bind(num_workers),
        )

        def begin() -> ServerRun:
            server = ServerProcess(config, center, wait=False)  # the job may start meanwhile
            strategy = ServerStrategy(
                (server.endpoint,), layout, rule, compression=config.compression()
            )
            return cls(server, strategy)

        with ThreadPoolExecutor(1, thread_name_prefix="sparkdl-server") as pool:
            starting = pool.submit(begin)
            try:
                yield starting
            finally:
                if starting.exception() is None:
                    starting.result().close()

    def close(self) -> None:
        """Ends the server."""
        if self._connected is not None:
            self._connected.close()
        self._server.stop()

    def progress(self, since_epoch: int = 0) -> RunProgress:
        """What the workers report; raises TransportError if the server is gone."""
        self._server.check()
        status = self._driver.status(since_epoch)
        in_step = self.strategy.rule.blocking
        return progress_of(status, self._server.config.num_workers, in_step=in_step)

    def command(self, command: Command) -> None:
        """Passes a command on to the workers."""
        self._driver.control(
            stop=command.stop, learning_rate=command.learning_rate, release=command.release
        )

    def pull(self) -> FloatArray:
        """The present center (a copy)."""
        self._server.check()
        return pull_center(self._driver)

    def optimizer_state(self) -> bytes:
        """The optimizer state that a worker kept at the end of an epoch; empty if none did."""
        self._server.check()
        kept = self._driver.kept()
        return RunState.from_bytes(kept).optimizer if kept else b""

    def checkpoint(self) -> None:
        """None: lost workers are replaced by Spark, and a lost server ends the run."""

    def result(self, trained: Mapping[int, TrainedRank]) -> FloatArray:
        """The trained weights: the center holds them."""
        return self.pull()
