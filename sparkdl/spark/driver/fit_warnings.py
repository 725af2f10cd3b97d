"""What ``fit`` warns of: workers that take turns, and those that were in each other's way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkdl.phases import Usage
from sparkdl.user_warnings import warn_user

MUCH_DAMPED = 0.7
"""Below this part of changes that count, more than two asynchronous workers learn worse than one
process (ADR 0061)."""

NO_BETTER = 0.99
"""From this part of the loss of guessing on, a model has learned nothing from its inputs."""

MANY_WORKERS = 8
MUCH_EXCHANGED = 0.5
"""From so many workers on, more than this part of their time in exchanges is the server's load."""


def warn_of_mixed_validation(num_workers: int, at_once: int) -> None:
    """Says what validation is of where workers that do not wait for each other take turns.

    Args:
        num_workers: Workers that validate.
        at_once: How many of them can run at the same time; 0 if it is not known.
    """
    if 0 < at_once < num_workers:
        warn_user(
            f"{num_workers} workers take turns on {at_once} task slots, and each evaluates its "
            "validation rows in its turn: val_loss and the metrics beside it are a mean over "
            "weights of different age, also in the last epoch, and not those of the trained model; "
            f"num_workers={at_once} gives those, and so does evaluate(validation_data) after fit"
        )


def warn_of_damping(counted: float, num_workers: int) -> None:
    """Says what to do where the changes of the workers added up to too much.

    Args:
        counted: The part of them that counted; see :mod:`sparkdl.ps.damping`.
        num_workers: Whose changes they are.
    """
    if num_workers > 2 and counted < MUCH_DAMPED:
        warn_user(
            f"the learning rate is high for {num_workers} workers that do not wait for each other: "
            f"their changes added up to too much, so {counted:.0%} of them counted "
            "(summary.counted), and the loss may be higher than that of one process; a lower "
            "learning rate, inputs with mean 0, fewer workers or mode='synchronous' learn better"
        )


def warn_of_server_load(usage: Mapping[int, Usage], window: int) -> None:
    """Says what to do where many workers spent most of their time at the one server.

    Args:
        usage: Rank -> what its time went into.
        window: Batches between two exchanges; below 1: an epoch's.
    """
    exchanged = sum(u.seconds.get("exchange", 0.0) for u in usage.values())
    computed = sum(u.seconds.get("compute", 0.0) for u in usage.values())
    busy = exchanged + computed
    if len(usage) >= MANY_WORKERS and window > 0 and exchanged > MUCH_EXCHANGED * busy:
        warn_user(
            f"{len(usage)} workers exchanged with the server for {exchanged / busy:.0%} of the "
            f"time that they trained (summary.usage): it is one process, and every exchange passes "
            f"through it; frequency={4 * window} asks less often, compression='fp16' sends less "
            "over a network, and mode='allreduce' needs no server"
        )


def warn_of_no_learning(losses: Sequence[float], guessing: float | None, num_workers: int) -> None:
    """Says what to do where workers that do not wait for each other have not learned anything.

    Their changes can drive a network to where its answers no longer depend on the inputs, and it
    stays there: with eight workers and Adam at 0.01 before the damping has seen anything.

    Args:
        losses: The mean loss of each epoch, all workers together.
        guessing: See :func:`sparkdl.learner.guessing.guessing_loss`; None if it is not known.
        num_workers: Workers that trained at the same time.
    """
    if num_workers < 2 or len(losses) < 2 or guessing is None:
        return
    if losses[-1] >= NO_BETTER * guessing:
        warn_user(
            f"the model has not learned: after {len(losses)} epochs its loss is {losses[-1]:.4g}, "
            f"and answering every row with how frequent each class is has {guessing:.4g}; "
            f"{num_workers} workers that do not wait for each other need a lower learning rate, or "
            "fewer workers, or mode='synchronous'"
        )
