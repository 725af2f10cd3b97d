"""Warnings of ``fit``: workers that take turns, were in each other's way, or learned nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparkdl.learner.signature import loss_name
from sparkdl.process.user_warnings import warn_user
from sparkdl.training.phases import Usage

if TYPE_CHECKING:
    import keras

MUCH_DAMPED = 0.7
"""Below this part of changes that count, more than two asynchronous workers learn worse than one
process (ADR 0061)."""

NO_BETTER = 0.99
"""From this part of the loss of guessing on, a model has learned nothing from its inputs."""

MANY_WORKERS = 8
MUCH_EXCHANGED = 0.5
"""From this number of workers on, a larger part of their time in exchanges is the server's load."""

FEW_STEPS = 1000
"""Fewer steps of each of many workers are too few to make up for their stale changes: eight had
1.6 times the loss of one process with 352 steps, and 1.17 times with 781."""

FAR_OFF_CENTER, HIGH_OFF_CENTER = 0.6, 0.8
"""Inputs further from mean 0 (MNIST's pixels have 0.41, numbers uniform in [0, 1) 0.75) slow
workers down where less than this part of their changes counts."""


_COLUMNS_SHOWN = 5


def warn_of_mixed_validation(num_workers: int, at_once: int) -> None:
    """Says what validation is of where workers that do not wait for each other take turns.

    Args:
        at_once: How many workers can run at the same time; 0 if it is not known.
    """
    if 0 < at_once < num_workers:
        warn_user(
            f"{num_workers} workers take turns on {at_once} task slots, and each evaluates its "
            "validation rows in its turn: val_loss and the metrics beside it are a mean over "
            "weights of different age, also in the last epoch, and not those of the trained model; "
            f"num_workers={at_once} gives those, and so does evaluate(validation_data) after fit"
        )


def described(name: str, columns: Sequence[str]) -> str:
    """An input and the columns that it is made of, for a sentence.

    >>> described('pixels', ['image'])
    "input 'pixels' (column 'image')"
    """
    shown = ", ".join(map(repr, columns[:_COLUMNS_SHOWN]))
    shown += ", ..." if len(columns) > _COLUMNS_SHOWN else ""
    return f"input {name!r} (column{'s' * (len(columns) > 1)} {shown})"


def warn_of_damping(
    counted: float, num_workers: int, steps: int, off_center: float, furthest: str
) -> None:
    """Says where workers whose changes are added up learn worse than one process, and what helps.

    The figures are those of ``benchmarks/high_rates.py``.

    Args:
        counted: The part of their changes that counted; see :mod:`sparkdl.rules.damping`.
        num_workers: Workers that trained at the same time.
        steps: Steps of each worker, in all epochs.
        off_center: See :func:`sparkdl.data.rows.off_center`; of the input where it is
            highest; 0 where the model centers.
        furthest: The name of that input.
    """
    if num_workers > 2 and counted < MUCH_DAMPED:
        warn_user(
            f"the learning rate is high for {num_workers} workers that do not wait for each other: "
            f"their changes added up to too much, so {counted:.0%} of them counted "
            "(summary.counted), and the loss may be higher than that of one process; a lower "
            "learning rate, inputs with mean 0, fewer workers or mode='synchronous' learn better"
        )
    elif num_workers >= MANY_WORKERS and steps < FEW_STEPS:
        warn_user(
            f"{steps} steps of each of {num_workers} workers that do not wait for each other are "
            "few: eight workers with 352 steps had 1.1 to 4.3 times the loss of one process in all "
            "of eleven problems, most of it with Adam; more epochs, fewer workers or "
            "mode='allreduce' learn better"
        )
    elif num_workers > 1 and off_center > FAR_OFF_CENTER and counted < HIGH_OFF_CENTER:
        warn_user(
            f"{furthest} is not centered (its mean makes up {off_center:.0%} of its mean "
            f"square), and the learning rate is high for that: {counted:.0%} of the changes of "
            f"{num_workers} workers that do not wait for each other counted (summary.counted). Two "
            "workers had 1.1 to 1.23 times the loss of one process in three such problems, and at "
            "most 1.05 with centered inputs: subtract the mean (keras.layers.Normalization does), "
            "or take a lower learning rate"
        )


def warn_of_server_load(usage: Mapping[int, Usage], window: int, num_workers: int) -> None:
    """Says what to do where many workers spent most of their time at the one server.

    Args:
        usage: Rank -> what its time went into.
        window: Batches between two exchanges; below 1: an epoch's.
        num_workers: Workers that trained at the same time.
    """
    exchanged = sum(u.seconds.get("exchange", 0.0) for u in usage.values())
    computed = sum(u.seconds.get("compute", 0.0) for u in usage.values())
    busy = exchanged + computed
    if num_workers >= MANY_WORKERS and window > 0 and exchanged > MUCH_EXCHANGED * busy:
        warn_user(
            f"{num_workers} workers at a time exchanged with the server for "
            f"{exchanged / busy:.0%} of the time that they trained (summary.usage): it is one "
            f"process, and every exchange passes through it; frequency={4 * window} asks less "
            "often, compression='fp16' sends less over a network, and mode='allreduce' needs no "
            "server"
        )


def warn_of_no_learning(losses: Sequence[float], guessing: float | None, num_workers: int) -> bool:
    """Says what to do where workers that do not wait for each other have not learned anything.

    Their changes can drive a network to where its answers no longer depend on the inputs, and it
    stays there: with eight workers and Adam at 0.01 before the damping has seen anything.

    Args:
        losses: The mean loss of each epoch, all workers together.
        guessing: See :func:`guessing_loss`; None if it is not known.
        num_workers: Workers that trained at the same time.

    Returns:
        Whether it is so.
    """
    if num_workers < 2 or len(losses) < 2 or guessing is None:
        return False
    learned_nothing = losses[-1] >= NO_BETTER * guessing
    if learned_nothing:
        warn_user(
            f"the model has not learned: after {len(losses)} epochs its loss is {losses[-1]:.4g}, "
            f"and answering every row with how frequent each class is has {guessing:.4g}; "
            f"{num_workers} workers that do not wait for each other need a lower learning rate, or "
            "fewer workers, or mode='synchronous'"
        )
    return learned_nothing


_ONE_CLASS = ("sparsecategoricalcrossentropy", "categoricalcrossentropy")


def guessing_loss(model: keras.Model, label_mean: Sequence[float]) -> float | None:
    """The cross-entropy of answering every row with the mean label: the labels' entropy, in nats.

    Args:
        model: A compiled ``keras.Model`` with one output.
        label_mean: See :func:`sparkdl.data.rows.label_mean`.

    Returns:
        The loss; None if the model's loss is no cross-entropy of Keras, the mean is empty, or all
        labels are the same, so that there is nothing to learn.
    """
    mean = np.asarray(label_mean, np.float64)
    if not mean.size or not bool(((mean >= 0) & (mean <= 1)).all()):
        return None
    loss = model.loss
    if isinstance(loss, (dict, list, tuple)):
        loss, *others = loss.values() if isinstance(loss, dict) else loss
        if others:
            return None
    name, _ = loss_name(loss)
    if name in _ONE_CLASS and np.isclose(mean.sum(), 1, atol=1e-3):
        entropy = _surprise(mean).sum()
    elif name == "binarycrossentropy":
        entropy = (_surprise(mean) + _surprise(1 - mean)).mean()
    else:
        return None
    return float(entropy) if entropy > 0 else None


def _surprise(p: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return -p * np.log(np.where(p > 0, p, 1.0))


_LAYERS = ("Normalization", "BatchNormalization", "LayerNormalization", "GroupNormalization")


def normalizes(model: keras.Model) -> bool:
    """Whether a layer subtracts a mean or adds an offset, wherever in the model."""
    for layer in model._flatten_layers(include_self=False):
        if type(layer).__name__ in _LAYERS:
            return True
        if type(layer).__name__ == "Rescaling" and getattr(layer, "offset", 0.0) != 0.0:
            return True
    return False
