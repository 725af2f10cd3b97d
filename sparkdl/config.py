"""Settings that the driver decides on: frozen objects, checked when they are made, picklable.

:class:`FitConfig` holds what the user asked of a ``SparkModel``; :class:`LoopSettings` what one
call of ``fit`` tells each worker's loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from sparkdl.errors import ConfigError, ModelError, UnknownNameError
from sparkdl.network import Encrypt, Network, PortSpec, require_encryptable
from sparkdl.values import (
    bare_numbers,
    is_finite_number,
    is_number,
    require_flag,
    require_int,
    require_name,
    require_seconds,
    shown,
)

MODES = ("asynchronous", "hogwild", "synchronous", "allreduce")
TRANSPORTS = ("auto", "shm", "socket", "http")
COMMUNICATORS = ("auto", "horovod", "builtin")
FREQUENCIES = ("auto", "batch", "epoch")
ON_NAN = ("raise", "skip", "ignore")
EPOCH_WINDOW = 0
"""A window of 0 batches stands for a whole epoch."""
AUTO_WINDOW = -1
"""A number that suits the workers and their rows; see ``sparkdl.worker.auto_window``."""
DEFAULT_RESTARTS = 3
COLUMNS = "columns"
"""The name of the last fit's columns among the settings of a model file."""
CLASS_NAME = "class_name"
"""The name of the model's class there, where it is one of ``sparkdl.compat``."""
_BESIDE = frozenset({COLUMNS, CLASS_NAME})
_MAX_SEED = 2**63 - 1
"""The largest whole number of the JVM, which draws the rows to validate on."""
NETWORK_SETTINGS = (
    "port", "server_bind", "server_address", "worker_port", "worker_bind", "encrypt",
)  # fmt: skip
"""The driver's address, the way of the run's token to the workers, and the like. A model file
has no say in them: whoever wrote the file could otherwise lead workers to a server of his own."""

UseGpu = Literal["auto"] | bool


@dataclass(frozen=True)
class FitConfig:
    """The arguments of a ``SparkModel``, as plain values; see there.

    Args:
        mode: How workers train together, one of :data:`MODES`.
        frequency: ``'auto'``, ``'batch'``, ``'epoch'``, or batches between two exchanges.
        parameter_server_mode: The way to the parameter server, one of :data:`TRANSPORTS`.
        num_workers: Workers; None for as many as there are task slots.
        batch_size: Rows per step and worker.
        port: The parameter server's; see :func:`sparkdl.network.ports_of`.
        rule: Name and options of the rule that was chosen; None before the choice.
        communicator: What all-reduce goes through, one of :data:`COMMUNICATORS`.
        compression: The codec that was chosen: a name, or its name and options; None for none.
        use_gpu: ``'auto'``, True or False.
        server_bind: Address that the server listens on; None for the narrowest that works.
        server_address: Address that workers connect to; None for the one that it listens on.
        repartition: Spread the rows over the workers; False takes the partitions as they are.
        memory_budget_mb: A partition larger than this many MiB is spilled to disk.
        seed: Seed of the row order and of the validation split.
        start_timeout_s: How long a synchronous run waits for all of its workers to start.
        worker_timeout_s: A worker that was silent for longer counts as dead.
        max_restarts: How often a lost stage of ``mode='allreduce'`` begins again; None for
            :data:`DEFAULT_RESTARTS`.
        on_nan: What becomes of a worker's update that is not finite, one of :data:`ON_NAN`.
        worker_port: In ``'allreduce'`` the workers' own ports, as ``port``.
        worker_bind: In ``'allreduce'`` the address or network that workers listen on.
        encrypt: Whether what leaves a host is encrypted: ``'auto'``, True or False.
        pad: Arrays of different length are padded with this number, or input name -> number; None:
            they are refused.
        resources: Of each task of the training stage: ``'cpus'``, ``'gpu'`` or another resource of
            Spark -> amount; None for the application's.

    Raises:
        ConfigError: A value that is not of its kind, or a combination in which one has no effect.
        UnknownNameError: No such mode, transport or communicator.
    """

    mode: str = "asynchronous"
    frequency: str | int = "auto"
    parameter_server_mode: str = "auto"
    num_workers: int | None = None
    batch_size: int = 32
    port: PortSpec = 0
    rule: Mapping[str, Any] | None = None
    communicator: str = "auto"
    compression: Mapping[str, Any] | str | None = None
    use_gpu: UseGpu = "auto"
    server_bind: str | None = None
    server_address: str | None = None
    repartition: bool = True
    memory_budget_mb: int = 2048
    seed: int = 0
    start_timeout_s: float = 300.0
    worker_timeout_s: float = 60.0
    max_restarts: int | None = None
    on_nan: str = "raise"
    worker_port: PortSpec = 0
    worker_bind: str | None = None
    encrypt: Encrypt = "auto"
    pad: float | Mapping[str, float] | None = None
    resources: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        require_name("mode", self.mode, MODES, _argument_of(self.mode))
        require_name("parameter_server_mode", self.parameter_server_mode, TRANSPORTS)
        require_name("communicator", self.communicator, COMMUNICATORS)
        require_name("on_nan", self.on_nan, ON_NAN)
        _ = self.network
        check_pad(self.pad)
        check_resources(self.resources)
        check_use_gpu(self.use_gpu)
        plain: dict[str, Any] = {  # NumPy's numbers cannot be written as JSON
            "frequency": parse_frequency(self.frequency),
            "batch_size": require_int("batch_size", self.batch_size, 1),
            "repartition": require_flag("repartition", self.repartition),
            "memory_budget_mb": require_int("memory_budget_mb", self.memory_budget_mb, 1),
            "seed": require_int("seed", self.seed, 0, _MAX_SEED),
            "start_timeout_s": require_seconds("start_timeout_s", self.start_timeout_s),
            "worker_timeout_s": require_seconds("worker_timeout_s", self.worker_timeout_s),
        }
        if self.num_workers is not None:
            plain["num_workers"] = require_int("num_workers", self.num_workers, 1)
        if self.max_restarts is not None:
            plain["max_restarts"] = require_int("max_restarts", self.max_restarts, 0)
        for name in ("pad", "resources"):  # what the caller does with his dict has no effect here
            plain[name] = bare_numbers(getattr(self, name))
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        self._refuse_what_has_no_effect()

    def _refuse_what_has_no_effect(self) -> None:
        if not self.with_server:
            if self.parameter_server_mode != "auto":
                raise ConfigError(
                    "parameter_server_mode has no effect in mode 'allreduce'",
                    expected="parameter_server_mode='auto', its default",
                    received=repr(self.parameter_server_mode),
                    hint="communicator='builtin' or 'horovod' says how gradients travel",
                )
            if self.on_nan == "skip" and self.communicator == "horovod":
                raise ConfigError(
                    "Horovod sends updates from inside the compiled step, so none can be refused",
                    expected="on_nan='raise' or 'ignore' with communicator='horovod'",
                    received="on_nan='skip'",
                    hint="communicator='builtin' can",
                )
            if self.encrypt is True:
                require_encryptable(self.communicator)
            return
        if self.communicator != "auto":
            raise ConfigError(
                "communicator has no effect in a mode with a server",
                expected=f"communicator='auto', its default, in mode {self.mode!r}",
                received=repr(self.communicator),
                hint="mode='allreduce' uses it",
            )
        for name in ("worker_port", "worker_bind"):
            if getattr(self, name) != getattr(FitConfig, name):
                raise ConfigError(
                    f"{name} has no effect in a mode with a server",
                    expected=f"{name}={getattr(FitConfig, name)!r}, its default",
                    received=repr(getattr(self, name)),
                    hint="there workers accept no connections; port and server_bind are the "
                    "server's",
                )
        if self.max_restarts is not None:
            raise ConfigError(
                "max_restarts has no effect in a mode with a server",
                expected=f"max_restarts=None in mode {self.mode!r}",
                received=str(self.max_restarts),
                hint="there Spark replaces a lost worker meanwhile: spark.task.maxFailures",
            )

    @property
    def network(self) -> Network:
        """The :data:`NETWORK_SETTINGS`, checked."""
        return Network(**{name: getattr(self, name) for name in NETWORK_SETTINGS})

    @property
    def with_server(self) -> bool:
        """Whether workers exchange through a parameter server; else with each other."""
        return self.mode != "allreduce"

    @property
    def restarts(self) -> int:
        """How often a lost stage begins again; 0 in the modes in which Spark replaces workers."""
        if self.with_server:
            return 0
        return DEFAULT_RESTARTS if self.max_restarts is None else self.max_restarts

    def to_dict(self) -> dict[str, Any]:
        """Every setting by the name of ``SparkModel``'s argument; :mod:`json` can write it."""
        return {**asdict(self), "max_restarts": None if self.with_server else self.restarts}

    def to_file(self) -> dict[str, Any]:
        """Every setting as it was asked for, without :data:`NETWORK_SETTINGS`, which are not the
        model's."""
        return without_network(asdict(self))


def without_network(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``SparkModel`` without :data:`NETWORK_SETTINGS`: for a file, or from one."""
    return {name: value for name, value in arguments.items() if name not in NETWORK_SETTINGS}


def arguments_from_file(settings: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The arguments of ``SparkModel`` in the settings of a model file.

    :data:`NETWORK_SETTINGS`, which earlier versions wrote, are left out.

    Args:
        settings: What :meth:`FitConfig.to_file` returned when the file was written.
        path: Of the file, for the message.

    Raises:
        ModelError: Settings that this version does not have, or no mode or rule as it was written.
    """
    strange = sorted(set(settings) - {field.name for field in fields(FitConfig)} - _BESIDE)
    if strange:
        raise ModelError(
            f"{path!r} was written by another version of sparkdl",
            expected="settings that this version has",
            received=", ".join(strange),
            hint="keras.models.load_model reads the model itself",
        )
    mode, rule = settings.get("mode"), settings.get("rule")
    named = isinstance(rule, dict) and isinstance(rule.get("name"), str)
    if settings and not (isinstance(mode, str) and (rule is None or named)):
        raise ModelError(
            f"{path!r} has malformed settings",
            expected="mode: a name; rule: null, or an object with its name and its arguments",
            received=f"mode: {shown(mode)}; rule: {shown(rule)}",
            hint="keras.models.load_model reads the model itself",
        )
    return {k: v for k, v in without_network(settings).items() if k not in _BESIDE}


def columns_from_file(settings: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The ``features`` and ``label`` of the last fit in the settings of a model file, if there.

    Args:
        settings: What was written, with the columns as :data:`COLUMNS`.
        path: Of the file, for the message.

    Raises:
        ModelError: They do not name columns.
    """
    columns = settings.get(COLUMNS, {})
    if not isinstance(columns, dict) or not all(
        (name in ("features", "label") and _names_columns(value))
        or (name == "label" and value is None)
        for name, value in columns.items()
    ):
        raise ModelError(
            f"{path!r} does not say which columns the model was trained on",
            expected="features and label: a name, several, or input name -> either; label: or null",
            received=shown(columns),
            hint="keras.models.load_model reads the model itself",
        )
    return columns


def _names_columns(value: Any) -> bool:
    """Whether a value of a file is a column's name, several, or a name -> either."""
    if isinstance(value, dict):
        return all(isinstance(v, (str, list)) and _names_columns(v) for v in value.values())
    if isinstance(value, list):
        return all(isinstance(name, str) for name in value)
    return isinstance(value, str)


@dataclass(frozen=True)
class LoopSettings:
    """The settings of a worker's loop, beside its data, model and synchronizer.

    Args:
        epochs: Epoch number to stop at (exclusive).
        first_epoch: Epoch number to begin with.
        batch_size: Rows per step and worker.
        window: Batches between two exchanges; ``EPOCH_WINDOW`` for one exchange per epoch,
            ``AUTO_WINDOW`` for a number that suits the worker's rows.
        shuffle: New row order each epoch.
        seed: Seed of the row order.
        report_interval_s: Least time between two live reports of the metrics.
        wait_for_driver: At the end of an epoch wait until the driver's callbacks have run.
        keep_state: At the end of an epoch leave the state for the driver's checkpoints.
        follow_schedule: Tell learning-rate schedules the steps of all workers together.
        check_data: Refuse NaN and infinity before training.
        steps_per_epoch: Batches in an epoch of each worker; None for all of its rows, once.
        validation_steps: Validation batches of each worker, at most; None for all.
        class_weight: Class -> weight of its rows; None for none.
        memory_budget_bytes: A partition beyond this is spilled to disk.
        spill_dir: Where; None is the executor's temporary directory.
        keep_spans: Return each phase of the rank with its times, for a timeline.
        at_once: Workers that train at the same time; 0 for all. Others take turns.
    """

    epochs: int
    first_epoch: int = 0
    batch_size: int = 32
    window: int = 8
    shuffle: bool = True
    seed: int = 0
    report_interval_s: float = 0.2
    wait_for_driver: bool = False
    keep_state: bool = False
    follow_schedule: bool = True
    check_data: bool = False
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    class_weight: Mapping[int, float] | None = None
    memory_budget_bytes: int = 2 << 30
    spill_dir: str | None = None
    keep_spans: bool = False
    at_once: int = 0

    def __post_init__(self) -> None:
        require_int("epochs", self.epochs, 0)
        require_int("batch_size", self.batch_size, 1)
        require_int("window", self.window, AUTO_WINDOW)
        require_int("memory_budget_bytes", self.memory_budget_bytes, 1)


def check_pad(pad: Any) -> None:
    """Refuses what is no number to pad with, nor input name -> number."""
    values = list(pad.values()) if isinstance(pad, Mapping) else [pad]
    named = not isinstance(pad, Mapping) or all(isinstance(name, str) for name in pad)
    if pad is None or (named and values and all(is_finite_number(value) for value in values)):
        return
    raise ConfigError(
        "pad must say what stands behind the end of a shorter array",
        expected="a number, or input name -> number",
        received=shown(pad),
        hint="pad=0 is what Embedding(mask_zero=True) and Masking() mask",
    )


def check_resources(resources: Any) -> None:
    """Refuses what does not say how much of each resource a task asks for."""
    if resources is None:
        return
    named = isinstance(resources, Mapping) and all(isinstance(name, str) for name in resources)
    amounts = resources.values() if named else ()
    if named and resources and all(is_finite_number(a) and a > 0 for a in amounts):
        return
    raise ConfigError(
        "resources must say what each task of the training stage asks of its executor",
        expected="resource -> amount above 0, such as {'cpus': 4, 'gpu': 1}",
        received=shown(resources),
        hint="the names are those of spark.task.resource.<name>.amount, and 'cpus'",
    )


def _argument_of(mode: Any) -> str:
    """A hint for a ``mode`` that is a communicator or a transport."""
    if not isinstance(mode, str) or mode == "auto":
        return ""
    if mode in COMMUNICATORS:
        return f"mode='allreduce', communicator={mode!r}"
    if mode in TRANSPORTS:
        return f"mode='asynchronous', parameter_server_mode={mode!r}"
    return ""


def parse_frequency(frequency: Any) -> str | int:
    """``'auto'``, ``'batch'``, ``'epoch'`` or a number of batches >= 1."""
    if is_number(frequency):
        return require_int("frequency", frequency, 1)
    if not isinstance(frequency, str) or frequency not in FREQUENCIES:
        raise UnknownNameError("frequency", frequency, [*FREQUENCIES, "a number of batches"])
    return str(frequency)


def check_use_gpu(use_gpu: Any) -> UseGpu:
    """Returns ``use_gpu`` if it is ``'auto'``, True or False; raises ConfigError."""
    if use_gpu not in ("auto", True, False):
        raise ConfigError(
            "use_gpu must say whether to train on GPUs",
            expected="'auto', True or False",
            received=shown(use_gpu),
            hint="'auto' takes the GPUs that Spark gives to a task, if it gives any",
        )
    return use_gpu  # type: ignore[no-any-return]
