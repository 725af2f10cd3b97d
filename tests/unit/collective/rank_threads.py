"""Ranks as threads of this process, for the tests of what they do together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sparkdl.collective.current import SoloCommunicator
from sparkdl.collective.rules import Part
from sparkdl.testing.inproc import connect_threads
from sparkdl.weights import FloatArray


def on_ranks(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """What ``work(communicator)`` returns on each rank; one rank is the world of one."""
    if size == 1:
        with SoloCommunicator() as alone:
            return [work(alone)]
    communicators = connect_threads(size)
    results: list[Any] = [None] * size
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(communicators[rank])
        except Exception as error:
            errors.append(error)
            communicators[rank].close()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(t.is_alive() for t in threads), "a rank hangs"
    for communicator in communicators:
        communicator.close()
    if errors:
        raise errors[0]
    return results


def vector(seed: int, size: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def part(values: np.ndarray, rows: int) -> Part:
    """A batch whose gradient and statistics are known."""

    def compute(out: np.ndarray) -> None:
        out[:] = values

    return compute, rows


def take_step(exchange: Any, weights: FloatArray, rows: int, rate: float | None) -> bool:
    """A step of an exchange that takes the optimizer's place; ``weights`` change in place."""

    def within(place: slice) -> Iterator[tuple[slice, FloatArray]]:
        middle = (place.start + place.stop) // 2
        for piece in (slice(place.start, middle), slice(middle, place.stop)):
            if piece.stop > piece.start:
                yield piece, weights[piece].copy()

    trained: bool = exchange.step(within, rows, rate)
    if trained:
        np.copyto(weights, exchange.buffer)
    return trained
