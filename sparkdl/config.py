"""Settings that the driver decides on: frozen objects, checked when they are made, picklable.

:class:`FitConfig` holds what the user asked of a ``SparkModel``; :class:`LoopSettings` what one
call of ``fit`` tells each worker's loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from sparkdl.errors import ConfigError, ModelError, UnknownNameError
from sparkdl.settings.network import Network, require_encryptable
from sparkdl.settings.values import (
    FLAG,
    SECONDS,
    UserSettings,
    bare_numbers,
    checked,
    instance,
    is_finite_number,
    is_number,
    number_or_text,
    one_of,
    or_none,
    refuse_changed,
    require_int,
    setting,
    shown,
    whole,
)

MODES = ("asynchronous", "hogwild", "synchronous", "allreduce")
TRANSPORTS = ("auto", "shm", "socket", "http")
COMMUNICATORS = ["auto", "horovod", "builtin"]
"""Names; :func:`sparkdl.collective.communicator.register` adds a user's own."""
FREQUENCIES = ("auto", "batch", "epoch")
ON_NAN = ("raise", "skip", "ignore")
EPOCH_WINDOW = 0
"""A window of 0 batches stands for a whole epoch."""
AUTO_WINDOW = -1
"""A number that suits the workers and their rows; see ``sparkdl.worker.auto_window``."""
COLUMNS = "columns"
"""The name of the last fit's columns among the settings of a model file."""
CLASS_NAME = "class_name"
"""The name of the model's class there, where it is one of ``sparkdl.compat``."""
_BESIDE = frozenset({COLUMNS, CLASS_NAME})
_MAX_SEED = 2**63 - 1
"""The largest whole number of the JVM, which draws the rows to validate on."""
_NETWORK = ("port", "network")

UseGpu = Literal["auto"] | bool


@dataclass(frozen=True)
class Limits(UserSettings):
    """The memory, the times and the restarts of a ``SparkModel`` or of ``run``.

    Each of the two refuses what it has no use for. Of a model they are saved with it.

    Args:
        memory_budget_mb: Rows of a worker beyond this many MiB are kept on its disk.
        start_timeout_s: How long workers that begin together wait for all of them to start.
        worker_timeout_s: For ``SparkModel``: a worker that was silent for longer counts as dead.
        max_restarts: For ``SparkModel``: how often training begins again from the last whole epoch
            after workers were lost (``mode='allreduce'``), or from the last checkpoint after a
            parameter server was (with ``checkpoint_dir``).
        collective_timeout_s: For ``run``: the longest one collective operation may take; the error
            names the missing ranks.
        stall_timeout_s: For ``run`` with ``data``: a function that asks for no rows for this time,
            while there are some, is given up with an error that says where it stands; it runs in a
            thread of its own for that. ``feed.terminate()`` says that it wants no more rows. Where
            others wait for one rank, an error of theirs may come first. None: it may take any time.

    Raises:
        ConfigError: A value that is not of its kind.
    """

    memory_budget_mb: int = setting(2048, whole(1))
    start_timeout_s: float = setting(300.0, SECONDS)
    worker_timeout_s: float = setting(60.0, SECONDS)
    max_restarts: int = setting(3, whole(0))
    collective_timeout_s: float = setting(600.0, SECONDS)
    stall_timeout_s: float | None = setting(600.0, or_none(SECONDS))


LIMITS_OF_FIT = ("memory_budget_mb", "start_timeout_s", "worker_timeout_s", "max_restarts")
LIMITS_OF_RUN = ("memory_budget_mb", "start_timeout_s", "collective_timeout_s", "stall_timeout_s")


def parse_frequency(frequency: object) -> str | int:
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
            "use_gpu must say whether to train on GPUs", expected="'auto', True or False",
            received=shown(use_gpu),
            hint="'auto' takes the GPUs that Spark gives to a task, if it gives any",
        )  # fmt: skip
    return use_gpu  # type: ignore[no-any-return]


def check_pad(pad: object) -> float | dict[str, float] | None:
    """Returns None, a number to pad with or a copy of input name -> number; raises ConfigError."""
    values = list(pad.values()) if isinstance(pad, Mapping) else [pad]
    named = not isinstance(pad, Mapping) or all(isinstance(name, str) for name in pad)
    if pad is None or (named and values and all(is_finite_number(value) for value in values)):
        return bare_numbers(pad)  # type: ignore[no-any-return]
    raise ConfigError(
        "pad must say what stands behind the end of a shorter array",
        expected="a number, or input name -> number", received=shown(pad),
        hint="pad=0 is what Embedding(mask_zero=True) and Masking() mask",
    )  # fmt: skip


def check_resources(resources: Any) -> dict[str, float]:
    """Returns a copy of how much of each resource a task asks for; raises ConfigError."""
    named = isinstance(resources, Mapping) and all(isinstance(name, str) for name in resources)
    amounts = resources.values() if named else ()
    if named and resources and all(is_finite_number(a) and a > 0 for a in amounts):
        return bare_numbers(resources)  # type: ignore[no-any-return]
    raise ConfigError(
        "resources must say what each task of the training stage asks of its executor",
        expected="resource -> amount above 0, such as {'cpus': 4, 'gpu': 1}",
        received=shown(resources),
        hint="the names are those of spark.task.resource.<name>.amount, and 'cpus'",
    )


def _argument_of(mode: object) -> str:
    """A hint for a ``mode`` that is a communicator or a transport."""
    if not isinstance(mode, str) or mode == "auto":
        return ""
    if mode in COMMUNICATORS:
        return f"mode='allreduce', communicator={mode!r}"
    return f"mode='asynchronous', parameter_server_mode={mode!r}" if mode in TRANSPORTS else ""


ANY = checked(lambda value: value)
"""Checked where a rule or a codec is made of it."""


@dataclass(frozen=True)
class FitConfig(UserSettings):
    """The arguments of a ``SparkModel``, as plain values; see there.

    Args:
        mode: How workers train together.
        frequency: ``'auto'``, ``'batch'``, ``'epoch'`` or batches between two exchanges.
        parameter_server_mode: The way to the parameter server.
        num_workers: Workers; None for as many as there are task slots.
        batch_size: Rows per step and worker.
        rule: How an exchange changes the weights: a name, or a name and options; None for the
            mode's default.
        communicator: What ``mode='allreduce'`` goes through.
        compression: The codec of what travels: a name, or a name and options; None for float32.
        use_gpu: ``'auto'`` (the GPUs that Spark gives to a task), True (fail without) or False.
        repartition: Spread the rows over the workers; False takes the partitions as they are.
        seed: Seed of the row order and of the validation split.
        on_nan: What happens to a worker's update that is not finite.
        pad: For arrays of different length: a number, or input name -> number, that each batch is
            padded with to its longest row; None: such arrays are refused.
        resources: What each task of the training stage asks of its executor: resource -> amount,
            such as ``{'cpus': 4, 'gpu': 1}``; None for the application's settings.
        network: Where the driver and the workers listen, and whether they encrypt.
        limits: Memory, times and restarts.

    Raises:
        ConfigError: A value that is not of its kind, or a combination in which one has no effect.
        UnknownNameError: No such mode, transport or communicator.
    """

    mode: str = setting("asynchronous", one_of(MODES, _argument_of))
    frequency: str | int = setting("auto", checked(parse_frequency, number_or_text))
    parameter_server_mode: str = setting("auto", one_of(TRANSPORTS))
    num_workers: int | None = setting(None, or_none(whole(1)))
    batch_size: int = setting(32, whole(1))
    rule: Mapping[str, Any] | None = setting(None, or_none(ANY))
    communicator: str = setting("auto", one_of(COMMUNICATORS))
    compression: Mapping[str, Any] | str | None = setting(None, or_none(ANY))
    use_gpu: UseGpu = setting("auto", checked(check_use_gpu))
    repartition: bool = setting(True, FLAG)
    seed: int = setting(0, whole(0, _MAX_SEED))
    on_nan: str = setting("raise", one_of(ON_NAN))
    pad: float | Mapping[str, float] | None = setting(None, or_none(checked(check_pad)))
    resources: Mapping[str, float] | None = setting(None, or_none(checked(check_resources)))
    network: Network = setting(Network(), instance(Network))
    limits: Limits = setting(Limits(), instance(Limits))

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_changed(self.limits, "SparkModel", LIMITS_OF_FIT)
        self._refuse_what_has_no_effect()

    def _refuse_what_has_no_effect(self) -> None:
        if not self.with_server:
            for name in ("num_servers", "servers"):
                if name in self.network.changed():
                    raise ConfigError(
                        f"{name} has no effect in mode 'allreduce'",
                        expected=f"a Network without {name}: the workers need no server",
                        received=f"Network({name}={getattr(self.network, name)!r})",
                        hint="mode='asynchronous', 'hogwild' or 'synchronous' has servers",
                    )
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
                    received="on_nan='skip'", hint="communicator='builtin' can",
                )  # fmt: skip
            if self.network.encrypt is True:
                require_encryptable(self.communicator)
            return
        if self.communicator != "auto":
            raise ConfigError(
                "communicator has no effect in a mode with a server",
                expected=f"communicator='auto', its default, in mode {self.mode!r}",
                received=repr(self.communicator), hint="mode='allreduce' uses it",
            )  # fmt: skip
        for name in ("worker_port", "worker_bind"):
            if name in self.network.changed() and self.network.servers == "driver":
                raise ConfigError(
                    f"{name} has no effect in a mode with a server",
                    expected=f"a Network without {name} in mode {self.mode!r}",
                    received=f"Network({name}={getattr(self.network, name)!r})",
                    hint="there workers accept no connections; port and server_bind are the "
                    "server's; servers='executors' has use for it",
                )

    @property
    def with_server(self) -> bool:
        """Whether workers exchange through a parameter server; else with each other."""
        return self.mode != "allreduce"

    @property
    def server_slots(self) -> int:
        """Task slots that parameter servers take; with ``num_servers='auto'`` at least one."""
        if self.network.servers != "executors" or not self.with_server:
            return 0
        return 1 if self.network.num_servers == "auto" else int(self.network.num_servers)

    @property
    def restarts(self) -> int:
        """How often training begins again after workers of an all-reduce, or a server, were lost.

        In the modes with a server Spark replaces lost workers meanwhile.
        """
        return self.limits.max_restarts

    def to_dict(self) -> dict[str, Any]:
        """Every setting by the name of ``SparkModel``'s argument, with the fields of ``network``
        and ``limits`` as dicts; :mod:`json` can write it."""
        limits = {name: getattr(self.limits, name) for name in LIMITS_OF_FIT}
        return {**asdict(self), "limits": limits}

    def to_file(self) -> dict[str, Any]:
        """Every setting but those of the network, which are not the model's."""
        return without_network(self.to_dict())


def without_network(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``SparkModel`` without those that say where it listens and whether it encrypts:
    for a file, or from one. Whoever wrote a file could otherwise lead workers to a server of his
    own."""
    return {name: value for name, value in arguments.items() if name not in _NETWORK}


def arguments_from_file(settings: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The arguments of ``SparkModel`` in the settings of a model file.

    Args:
        settings: What :meth:`FitConfig.to_file` returned when the file was written.
        path: Path of the file, for the message.

    Raises:
        ModelError: Settings that this version does not have, or no mode or rule as it was written.
    """
    limits = settings.get("limits", {})
    known = {field.name for field in fields(FitConfig)} | _BESIDE
    strange = sorted(set(settings) - known - set(_NETWORK))
    strange += sorted(set(limits) - set(LIMITS_OF_FIT)) if isinstance(limits, dict) else ["limits"]
    if strange:
        raise ModelError(
            f"{path!r} was written by another version of sparkdl",
            expected="settings that this version has", received=", ".join(strange),
            hint="keras.models.load_model reads the model itself",
        )  # fmt: skip
    mode, rule = settings.get("mode"), settings.get("rule")
    named = isinstance(rule, dict) and isinstance(rule.get("name"), str)
    if settings and not (isinstance(mode, str) and (rule is None or named)):
        raise ModelError(
            f"{path!r} has malformed settings",
            expected="mode: a name; rule: null, or an object with its name and its arguments",
            received=f"mode: {shown(mode)}; rule: {shown(rule)}",
            hint="keras.models.load_model reads the model itself",
        )
    try:
        kept = Limits(**limits)
    except ConfigError as error:
        raise ModelError(
            f"{path!r} has malformed settings: {error.what}", expected=error.expected,
            received=error.received,
        ) from error  # fmt: skip
    arguments = {k: v for k, v in without_network(settings).items() if k not in _BESIDE}
    return {**arguments, "limits": kept}


def columns_from_file(settings: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The ``features`` and ``label`` of the last fit in the settings of a model file, if there.

    Args:
        settings: What was written, with the columns as :data:`COLUMNS`.
        path: Path of the file, for the message.

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
            received=shown(columns), hint="keras.models.load_model reads the model itself",
        )  # fmt: skip
    return columns


def _names_columns(value: object) -> bool:
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
        keep_state: At the end of each epoch leave the state for the driver's checkpoints.
        follow_schedule: Tell learning-rate schedules the steps of all workers together.
        check_data: Refuse NaN and infinity before training.
        steps_per_epoch: Batches in an epoch of each worker; None for all of its rows, once.
        most_steps: Batches in an epoch of a worker, at most; None for any number.
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
    most_steps: int | None = None
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

    def steps_of(self, rows: int) -> int | None:
        """Batches in an epoch of a worker that has ``rows``; None for all of these, once."""
        if self.most_steps is None or self.steps_per_epoch is not None:
            return least_of(self.steps_per_epoch, self.most_steps)
        return self.most_steps if rows > self.most_steps * self.batch_size else None

    @property
    def held_out_steps(self) -> int | None:
        """Validation batches of each worker, at most; None for all."""
        return least_of(self.validation_steps, self.most_steps)


def least_of(*limits: int | None) -> int | None:
    """The least of some limits; None where there is none."""
    return min((limit for limit in limits if limit is not None), default=None)
