"""Asynchronous training on a simulated clock: a NumPy network, exact and the same on any machine.

Workers take as long for a batch as the clock says, so nothing depends on what else a machine does.
The network is that of ``workload`` (784-128-128-10, Glorot's initial weights, mean cross-entropy).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sparkdl.rules.damping import Damping
from sparkdl.weights import FloatArray

SHAPES = [(784, 128), (128, 128), (128, 10)]
SIZE = sum(a * b + b for a, b in SHAPES)
MOST_LOSS = 16.118  # Keras clips probabilities at 1e-7
EXCHANGE = 0.3
"""Time of an exchange, in batches."""
JITTER = 0.05
"""Standard deviation of the logarithm of a window's time."""

IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]


def layers(flat: FloatArray) -> list[tuple[FloatArray, FloatArray]]:
    """Kernel and bias of each layer, as views of a flat buffer."""
    found, at = [], 0
    for a, b in SHAPES:
        found.append((flat[at : at + a * b].reshape(a, b), flat[at + a * b : at + a * b + b]))
        at += a * b + b
    return found


def initial_weights(seed: int) -> FloatArray:
    """Glorot's uniform kernels, biases of 0."""
    rng = np.random.default_rng([seed, 1])
    flat = np.zeros(SIZE, np.float32)
    for kernel, _ in layers(flat):
        limit = np.sqrt(6 / sum(kernel.shape))
        kernel[...] = rng.uniform(-limit, limit, kernel.shape)
    return flat


def loss_and_gradient(flat: FloatArray, x: FloatArray, y: IntArray, out: FloatArray) -> float:
    """The mean loss of a batch; its gradient is written into ``out``."""
    weights, gradients = layers(flat), layers(out)
    inputs, values = [], x
    for number, (kernel, bias) in enumerate(weights):
        inputs.append(values)
        values = values @ kernel
        values += bias
        if number < len(weights) - 1:
            np.maximum(values, 0, out=values)
    values -= values.max(1, keepdims=True)
    chances = np.exp(values)
    total = chances.sum(1)
    rows = np.arange(len(y))
    loss = np.minimum(np.log(total) - values[rows, y], MOST_LOSS).mean()
    chances /= total[:, None]
    chances[rows, y] -= 1
    error = chances / np.float32(len(y))
    for number in range(len(weights) - 1, -1, -1):
        np.matmul(inputs[number].T, error, out=gradients[number][0])
        gradients[number][1][:] = error.sum(0)
        if number:
            error = (error @ weights[number][0].T) * (inputs[number] > 0)
    return float(loss)


class SGD:
    """Plain gradient descent."""

    def __init__(self, rate: float) -> None:
        self._rate = np.float32(rate)

    def step(self, flat: FloatArray, gradient: FloatArray) -> None:
        """One step, in place."""
        flat -= self._rate * gradient


class Adam:
    """Keras' Adam with its defaults."""

    def __init__(self, rate: float) -> None:
        self._rate, self._steps = rate, 0
        self._mean, self._square = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)

    def step(self, flat: FloatArray, gradient: FloatArray) -> None:
        """One step, in place."""
        self._steps += 1
        self._mean += np.float32(0.1) * (gradient - self._mean)
        self._square += np.float32(0.001) * (gradient * gradient - self._square)
        rate = self._rate * np.sqrt(1 - 0.999**self._steps) / (1 - 0.9**self._steps)
        flat -= np.float32(rate) * self._mean / (np.sqrt(self._square) + np.float32(1e-7))


OPTIMIZERS = {"sgd": SGD, "adam": Adam}


@dataclass(frozen=True)
class Training:
    """What is trained: rows, an optimizer, epochs, and the seed of weights and row order."""

    x: FloatArray
    y: IntArray
    optimizer: str
    rate: float
    epochs: int
    seed: int
    batch: int = 64

    def alone(self) -> list[float]:
        """The mean loss of each epoch of one process, as in Keras' History."""
        flat, gradient = initial_weights(self.seed), np.empty(SIZE, np.float32)
        optimizer = OPTIMIZERS[self.optimizer](self.rate)
        rng = np.random.default_rng([self.seed, 2])
        losses = []
        for _ in range(self.epochs):
            order, total = rng.permutation(len(self.x)), 0.0
            for first in range(0, len(order), self.batch):
                rows = order[first : first + self.batch]
                total += len(rows) * loss_and_gradient(flat, self.x[rows], self.y[rows], gradient)
                optimizer.step(flat, gradient)
            losses.append(total / len(order))
        return losses

    def asynchronous(
        self, workers: int, window: int, *, damping: bool
    ) -> tuple[list[float], float]:
        """The mean loss of each epoch of workers whose changes a server adds up.

        Returns:
            The losses, and the part of the changes that counted (1 without damping).
        """
        center, gradient = initial_weights(self.seed), np.empty(SIZE, np.float32)
        rng = np.random.default_rng([self.seed, 3])
        totals = np.zeros(self.epochs)
        ranks = [_Rank(self, rank, workers, window, center) for rank in range(workers)]
        dampings = [Damping(workers, SIZE) for _ in ranks]
        events: list[tuple[float, int]] = []

        trained = [0] * workers

        def begin(rank: int, now: float) -> None:
            trained[rank] = batches = ranks[rank].train(gradient, totals)
            if batches:
                lasts = (batches + EXCHANGE) * float(np.exp(JITTER * rng.standard_normal()))
                heapq.heappush(events, (now + lasts, rank))

        for rank in range(workers):
            begin(rank, 0.2 * float(rng.random()))
        while events:
            now, number = heapq.heappop(events)
            rank = ranks[number]
            change = rank.local - rank.base
            if damping:
                dampings[number].apply(change, rank.base, trained[number])
            center += change
            rank.local[...] = rank.base[...] = center
            begin(number, now)
        return list(totals / len(self.x)), float(np.mean([d.counted for d in dampings]))


class _Rank:
    """One worker's rows, weights and optimizer."""

    def __init__(
        self, job: Training, rank: int, workers: int, window: int, center: FloatArray
    ) -> None:
        self.local, self.base = center.copy(), center.copy()
        self._job, self._optimizer = job, OPTIMIZERS[job.optimizer](job.rate)
        self._windows = self._cut(np.arange(len(job.x))[rank::workers], window, rank)

    def _cut(self, mine: IntArray, window: int, rank: int) -> Iterator[tuple[int, list[IntArray]]]:
        rng = np.random.default_rng([self._job.seed, 4, rank])
        step = self._job.batch
        for epoch in range(self._job.epochs):
            order = rng.permutation(mine)
            batches = [order[first : first + step] for first in range(0, len(order), step)]
            for first in range(0, len(batches), window):
                yield epoch, batches[first : first + window]

    def train(self, gradient: FloatArray, totals: FloatArray) -> int:
        """Trains one window and adds its losses up; returns its batches, 0 at the end."""
        job = self._job
        epoch, batches = next(self._windows, (0, []))
        for rows in batches:
            loss = loss_and_gradient(self.local, job.x[rows], job.y[rows], gradient)
            totals[epoch] += len(rows) * loss
            self._optimizer.step(self.local, gradient)
        return len(batches)
