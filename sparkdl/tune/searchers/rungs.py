"""Rungs: the epochs after which trials are compared, and the brackets of several ladders."""

from __future__ import annotations

import math


def make_rungs(number: int, divisor: float, max_epochs: int) -> list[int]:
    """The epochs of each rung, each ``divisor`` times the one before.

    >>> make_rungs(3, 3, 9), make_rungs(4, 2, 10)
    ([1, 3, 9], [1, 2, 5, 10])
    """
    return [max(int(max_epochs / divisor ** (number - 1 - r)), 1) for r in range(number)]


def trials_of_brackets(max_trials: int, divisor: float, rungs: list[int]) -> list[int]:
    """How many trials each bracket begins with, so that each trains about as many epochs.

    >>> trials_of_brackets(50, 3, [4, 3]), trials_of_brackets(100, 4, [4, 3, 2])
    ([35, 15], [70, 22, 8])
    """
    weights = [divisor ** (number - 1) / number for number in rungs]
    trials = [max(int(max_trials * w / sum(weights)), 1) for w in weights]
    trials[0] += max(max_trials - sum(trials), 0)
    return trials


def rungs_that_differ(max_rungs: int, divisor: float, max_epochs: int, max_trials: int) -> int:
    """``max_rungs``, or fewer where epochs or trials do not suffice."""
    room = min(math.log(max_epochs, divisor), math.log(max_trials, divisor))
    return max(1, min(max_rungs, int(room + 1e-9) + 1))


def epochs_of_rungs(trials: list[int], epochs: list[int]) -> int:
    """The epochs of all trials, where rung ``i`` has ``trials[i]`` trials until ``epochs[i]``.

    >>> epochs_of_rungs([9, 3, 1], [1, 3, 9])
    21
    """
    before = [0, *epochs[:-1]]
    return sum(n * (end - begin) for n, begin, end in zip(trials, before, epochs, strict=True))
