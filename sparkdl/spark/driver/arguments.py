"""The arguments of ``fit``, checked before anything else happens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from sparkdl.config import require_int, shown
from sparkdl.errors import ConfigError, UnknownArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_KERAS_FIT_REFUSED = {
    "steps_per_epoch": "every row is trained once per epoch; take df.limit(n) for fewer",
    "validation_steps": "all validation rows are evaluated",
    "class_weight": "add a column of sample weights and pass sample_weight='column'",
    "x": "pass the data as the first argument",
    "y": "name the label column: label='column'",
}
_KERAS_FIT_TAKEN = ("check_data", "initial_epoch")


@dataclass(frozen=True)
class FitArguments:
    """What the user asked of one ``fit``, beside data, columns and callbacks.

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

    Raises:
        ConfigError: An argument that is not of its kind.
    """

    epochs: int = 1
    batch_size: int | None = None
    verbose: str | int = "auto"
    validation_split: float = 0.0
    shuffle: bool = True
    checkpoint_dir: str | None = None
    resume: bool = False
    initial_epoch: int = 0
    check_data: bool = False

    def __post_init__(self) -> None:
        require_int("epochs", self.epochs, 1)
        require_int("initial_epoch", self.initial_epoch, 0)
        if self.batch_size is not None:
            require_int("batch_size", self.batch_size, 1)
        verbosity(self.verbose)
        check_share("validation_split", self.validation_split)
        if self.resume and self.checkpoint_dir is None:
            raise ConfigError(
                "resume needs a place to resume from",
                expected="checkpoint_dir=...",
                received="None",
                hint="the folder that an earlier fit wrote its checkpoints to",
            )

    def last_epoch(self, first_epoch: int) -> int:
        """The epoch to stop at, for a fit that begins with ``first_epoch``."""
        goes_on = self.resume or self.initial_epoch
        return self.epochs if goes_on else first_epoch + self.epochs


def check_keras_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Keras' own ``fit`` that :meth:`SparkModel.fit` takes, too.

    Raises:
        ConfigError: Another argument; the hint says what to do instead.
    """
    for name, value in arguments.items():
        if name not in _KERAS_FIT_TAKEN:
            raise ConfigError(
                f"fit does not take {name!r}",
                expected="the arguments of fit, and " + ", ".join(_KERAS_FIT_TAKEN),
                received=f"{name}={shown(value)}",
                hint=_KERAS_FIT_REFUSED.get(name, "see help(SparkModel.fit)"),
            )
    return dict(arguments)


def lists_its_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """A function that answers an argument it does not take with the list of those it takes.

    Raises:
        UnknownArgumentError: From calls of the function; a ``TypeError``, as Python's own.
    """
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in parameters:
                raise UnknownArgumentError("argument", name, known)
        return function(*args, **kwargs)

    return checked


def refuse_labels_apart(method: str, name: str, value: Any) -> None:
    """Refuses labels that are an argument of their own: ``fit(x, y)``.

    Args:
        method: What was called.
        name: Its second argument.
        value: Its value.

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


def check_callbacks(callbacks: Any) -> None:
    """Refuses what Keras would fail on in the middle of a fit.

    Raises:
        ConfigError: A class instead of a callback, or something that is no callback.
    """
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in given:
        if isinstance(callback, type):
            raise ConfigError(
                "a class stands where a callback belongs",
                expected="callbacks, which are objects",
                received=f"the class {callback.__name__}",
                hint=f"callbacks=[{callback.__name__}(...)]",
            )
        if callback is not None and not hasattr(callback, "on_epoch_end"):
            raise ConfigError(
                "callbacks has something that is no callback",
                expected="objects of keras.callbacks.Callback",
                received=shown(callback),
                hint="keras.callbacks.LambdaCallback(on_epoch_end=function) makes one",
            )


def verbosity(verbose: str | int, auto: int = 1) -> int:
    """0, 1 or 2; ``auto`` for ``'auto'``. Raises ConfigError for anything else."""
    if verbose == "auto":
        return auto
    if verbose not in (0, 1, 2):
        raise ConfigError(
            "verbose must say how much to print",
            expected="'auto', 0, 1 or 2",
            received=repr(verbose),
            hint="0 prints nothing, 1 a progress bar, 2 a line per epoch",
        )
    return int(verbose)


def check_share(name: str, value: Any) -> float:
    """Returns ``value`` if it is a share in [0, 1); raises ConfigError."""
    number = isinstance(value, (int, float)) and value is not False
    if not number or not 0.0 <= value < 1.0:
        raise ConfigError(
            f"{name} must be a share of the rows", expected="0 <= share < 1", received=repr(value)
        )
    return float(value)
