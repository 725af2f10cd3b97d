"""The arguments of ``fit``, checked before anything else happens."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparkdl.data import DataSpec
from sparkdl.errors import ConfigError, UnknownArgumentError
from sparkdl.process.user_warnings import warn_user
from sparkdl.settings.call_arguments import parameters_of, taken_elsewhere
from sparkdl.settings.values import (
    FLAG,
    PATH,
    UserSettings,
    ValueKind,
    bare,
    checked,
    is_number,
    number_or_text,
    or_none,
    setting,
    shown,
    whole,
)

_KERAS_FIT_REFUSED = {
    "validation_freq": "validation rows are evaluated after each epoch",
    "validation_batch_size": "batch_size is for validation rows, too",
    "x": "pass the data as the first argument",
    "y": "name the label column: label='column'",
}
_OF_A_CALLBACK = (
    "on_epoch_end", "on_epoch_begin", "on_train_begin", "on_train_end", "on_train_batch_begin",
    "on_train_batch_end", "set_model", "set_params",
)  # fmt: skip
"""What is called of each callback; no package of Keras' need be imported to know one."""
_KERAS_FIT_TAKEN = (
    "check_data", "class_weight", "group", "initial_epoch", "steps_per_epoch", "validation_steps",
)  # fmt: skip


def verbosity(verbose: str | int, auto: int = 1) -> int:
    """0, 1 or 2; ``auto`` for ``'auto'``. Raises ConfigError for anything else."""
    if isinstance(verbose, str) and verbose == "auto":
        return auto
    verbose = bare(verbose)
    if not isinstance(verbose, int) or verbose not in (0, 1, 2):
        raise ConfigError(
            "verbose must say how much to print", expected="'auto', 0, 1 or 2",
            received=repr(verbose), hint="0 prints nothing, 1 a progress bar, 2 a line per epoch",
        )  # fmt: skip
    return int(verbose)


def check_verbose(verbose: Any) -> str | int:
    """Returns ``'auto'``, 0, 1 or 2; raises ConfigError for anything else."""
    return "auto" if isinstance(verbose, str) and verbose == "auto" else verbosity(verbose)


def check_share(name: str, value: Any) -> float:
    """Returns ``value`` if it is a share in [0, 1); raises ConfigError."""
    if not is_number(value) or not 0.0 <= value < 1.0:
        raise ConfigError(
            f"{name} must be a share of the rows", expected="0 <= share < 1", received=repr(value)
        )
    return float(value)


def check_class_weight(class_weight: object) -> dict[int, float]:
    """Returns class -> weight in Python's own numbers; raises ConfigError for anything else."""
    if not (
        isinstance(class_weight, Mapping)
        and class_weight
        and all(isinstance(c, numbers.Integral) and int(c) >= 0 for c in class_weight)
        and all(
            isinstance(w, numbers.Real) and 0 <= float(w) < math.inf for w in class_weight.values()
        )
    ):
        raise ConfigError(
            "class_weight must say what the rows of each class weigh",
            expected="a dict: class number -> weight, e.g. {0: 1.0, 1: 5.0}",
            received=shown(class_weight),
            hint="sklearn's compute_class_weight returns an array: dict(enumerate(weights))",
        )
    return {int(number): float(weight) for number, weight in class_weight.items()}


@dataclass(frozen=True)
class FitArguments(UserSettings):
    """The arguments of one ``fit``, beside data, columns and callbacks.

    Args:
        epochs: Passes over the data; where it goes on from a given epoch, the epoch to stop at.
        batch_size: Rows per step and worker; None for the model's.
        verbose: 0, 1, 2 or ``'auto'``.
        validation_split: Share of the rows held out for validation.
        shuffle: New row order in each epoch.
        checkpoint_dir: Folder of the checkpoints; None for none.
        resume: Go on from the last checkpoint.
        initial_epoch: Epoch to begin with, as in Keras' own ``fit``.
        check_data: Refuse NaN and infinity before training.
        class_weight: Class -> weight of its rows.
        steps_per_epoch: Batches in an epoch of each worker; None for all of its rows, once.
        validation_steps: Validation batches of each worker, at most; None for all.

    Raises:
        ConfigError: An argument that is not of its kind.
    """

    epochs: int = setting(1, whole(1))
    batch_size: int | None = setting(None, or_none(whole(1)))
    verbose: str | int = setting("auto", checked(check_verbose, number_or_text))
    validation_split: float = setting(0.0, ValueKind(check_share, float))
    shuffle: bool = setting(True, FLAG)
    checkpoint_dir: str | None = setting(None, or_none(PATH))
    resume: bool = setting(False, FLAG)
    initial_epoch: int = setting(0, whole(0))
    check_data: bool = setting(False, FLAG)
    class_weight: dict[int, float] | None = setting(None, or_none(checked(check_class_weight)))
    steps_per_epoch: int | None = setting(None, or_none(whole(1)))
    validation_steps: int | None = setting(None, or_none(whole(1)))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume and self.checkpoint_dir is None:
            raise ConfigError(
                "resume needs a place to resume from", expected="checkpoint_dir=...",
                received="None", hint="the folder that an earlier fit wrote its checkpoints to",
            )  # fmt: skip

    def check_spec(self, spec: DataSpec) -> None:
        """Refuses what has no effect on these data, or no meaning.

        Raises:
            ConfigError: ``class_weight`` for several outputs, beside sample weights, or for a
                class that the model has not; ``validation_steps`` without validation rows.
        """
        if self.validation_steps is not None and spec.role_column is None:
            raise ConfigError(
                "validation_steps has no effect without validation rows",
                expected="validation_data or validation_split",
                received=f"validation_steps={self.validation_steps}",
            )
        if self.class_weight is None:
            return
        if len(spec.labels) != 1 or spec.weights:
            raise ConfigError(
                "class_weight is for one output, and for rows without other weights",
                expected="one label, and no sample_weight, as in Keras",
                received=f"labels {sorted(spec.labels)}"
                + (", and sample weights" if spec.weights else ""),
                hint="a column of sample weights can be the product of both: "
                "sample_weight={'output': 'column'}",
            )
        ((_, label),) = spec.labels.items()
        one_hot = label.shape[-1] if label.shape and label.shape[-1] != 1 else None
        classes = label.num_classes or one_hot
        beyond = [c for c in self.class_weight if classes is not None and c >= classes]
        if beyond:
            raise ConfigError(
                "class_weight names a class that the model does not have",
                expected=f"classes 0 to {(classes or 0) - 1}", received=f"class {beyond[0]}",
            )  # fmt: skip

    def within(self, most_epochs: int | None) -> FitArguments:
        """The same with ``keras.config.max_epochs()`` epochs at most."""
        if most_epochs is None or self.epochs <= most_epochs:
            return self
        warn_user(f"keras.config.set_max_epochs limits this fit to {most_epochs} epochs")
        return replace(self, epochs=most_epochs)

    def last_epoch(self, first_epoch: int) -> int:
        """The epoch to stop at, for a fit that begins with ``first_epoch``."""
        return self.epochs if self.resume or self.initial_epoch else first_epoch + self.epochs


def check_keras_arguments(owner: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Keras' own ``fit`` that :meth:`SparkModel.fit` takes, too.

    Args:
        owner: The class whose ``fit`` was called.
        arguments: The arguments that ``fit`` does not name.

    Raises:
        UnknownArgumentError: Another argument; the hint says what to do instead.
    """
    for name in arguments:
        if name not in _KERAS_FIT_TAKEN:
            named = [n for n in parameters_of(owner, "fit") if n != "keras_fit_arguments"]
            raise UnknownArgumentError(
                "argument of fit", name, [*named, *_KERAS_FIT_TAKEN],
                hint=_KERAS_FIT_REFUSED.get(name, "") or taken_elsewhere(owner, "fit", name),
            )  # fmt: skip
    return dict(arguments)


def refuse_labels_apart(method: str, name: str, value: Any) -> None:
    """Refuses labels that are an argument of their own: ``fit(x, y)``.

    Args:
        name: The second argument of the method.

    Raises:
        ConfigError: The value is data.
    """
    kind = type(value)  # a Column of Spark has every attribute, its class has not
    is_array = hasattr(kind, "shape") and value.shape != ()
    if isinstance(value, (list, tuple)) or is_array or hasattr(kind, "schema"):
        raise ConfigError(
            f"{method} takes features and labels as one argument",
            expected=f"{method}((x, y)), or {method}(df, features='column', label='column')",
            received=f"data as the second argument, {name}: {shown(value)}",
            hint=f"put both into a tuple: {method}((x, y), ...)",
        )


def check_callbacks(callbacks: object, *, validates: bool = False) -> list[Any]:
    """The callbacks in a list, without what is None, which Keras would fail on.

    Args:
        callbacks: One, several, or None.
        validates: Epochs end with an evaluation of validation rows.

    Raises:
        ConfigError: A class instead of a callback, something that is no callback, or a callback of
            Keras that acts after a number of batches, in validation, or on the epoch to begin with.
    """
    several = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    given = [callback for callback in several if callback is not None]
    for callback in given:
        if isinstance(callback, type):
            raise ConfigError(
                "a class stands where a callback belongs", expected="callbacks, which are objects",
                received=f"the class {callback.__name__}",
                hint=f"callbacks=[{callback.__name__}(...)]",
            )  # fmt: skip
        missing = [name for name in _OF_A_CALLBACK if not hasattr(callback, name)]
        if missing:
            raise ConfigError(
                "callbacks has something that is no callback",
                expected="objects of keras.callbacks.Callback, or of a subclass",
                received=f"{shown(callback)}, which has no {missing[0]}",
                hint="keras.callbacks.LambdaCallback(on_epoch_end=function) makes one; "
                "class Own(keras.callbacks.Callback) has all methods",
            )
        _check_keras_callback(callback, validates)
    return given


def _check_keras_callback(callback: object, validates: bool) -> None:
    """Refuses a callback of Keras that the driver cannot serve: it sees ends of epochs."""
    kinds = {c.__name__ for c in type(callback).__mro__ if c.__module__.startswith("keras.")}
    settings = vars(callback) if kinds else {}
    if "BackupAndRestore" in kinds:
        raise ConfigError(
            "BackupAndRestore cannot set the epoch that a fit of sparkdl begins with",
            expected="fit's own checkpoints",
            received="BackupAndRestore, after which all epochs would be trained again",
            hint="fit(data, checkpoint_dir='a folder', resume=True)",
        )
    frequency = settings.get("save_freq", "epoch")
    if frequency != "epoch" and kinds & {"ModelCheckpoint", "OrbaxCheckpoint"}:
        raise ConfigError(
            f"{type(callback).__name__} cannot save after a number of batches",
            expected="save_freq='epoch': the driver has the workers' weights when an epoch ends",
            received=f"save_freq={frequency!r}",
            hint="fit(data, steps_per_epoch=...) makes shorter epochs",
        )
    if "TensorBoard" in kinds:
        _check_tensorboard(settings)
    on_epoch = settings.get("swap_on_epoch")
    if "SwapEMAWeights" in kinds and (validates or not on_epoch):
        raise ConfigError(
            "SwapEMAWeights cannot swap the weights for validation, which the workers do",
            expected="swap_on_epoch=True, and no rows to validate on",
            received="rows to validate on" if on_epoch else "swap_on_epoch=False",
            hint="without the callback, use_ema=True makes the averages the weights when fit ends",
        )


def _check_tensorboard(settings: Mapping[str, Any]) -> None:
    frequency = settings.get("update_freq", "epoch")
    if frequency != "epoch":
        raise ConfigError(
            "TensorBoard cannot write after a number of batches",
            expected="update_freq='epoch': the driver does not see every batch",
            received=f"update_freq={frequency!r}",
            hint="fit(data, steps_per_epoch=...) makes shorter epochs",
        )
    if settings.get("_start_batch") or settings.get("_stop_batch"):
        raise ConfigError(
            "TensorBoard cannot profile batches, which the workers train",
            expected="profile_batch=0",
            received=f"batches {settings['_start_batch']} to {settings['_stop_batch']}",
            hint="sparkdl.tracking.Timeline(path) writes what the workers did, and when",
        )
