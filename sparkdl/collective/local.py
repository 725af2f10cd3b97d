"""Synchronous rules beyond the mean of gradients, as functions over a communicator.

Notation: ``p`` ranks; ``x_i`` weights of rank ``i``; ``x̃`` a center that all ranks hold alike.
Buffers are flat float32 and change in place; every rank calls the same function at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sparkdl.collective.communicator import Communicator
from sparkdl.errors import ConfigError
from sparkdl.weights import FloatArray, Layout


def average_locals(
    communicator: Communicator, snapshot: FloatArray, local: FloatArray, weight: float = 1.0
) -> None:
    """LocalSGD: ``x = s − Σ w_i (s − x_i) / Σ w_i``, for every rank and the snapshot.

    With one step between exchanges and plain SGD this is synchronous SGD.

    Args:
        communicator: Of all ranks.
        snapshot: ``s``, the weights after the last exchange; becomes the new ones.
        local: ``x_i``, this rank's weights; becomes the new ones.
        weight: ``w_i``, such as the rows trained since the last exchange; 0 for none.

    References:
        Stich, Local SGD converges fast and communicates little, 2018.
    """
    np.subtract(snapshot, local, out=local)
    communicator.all_reduce(local, "weighted", weight=weight, out=local)
    np.subtract(snapshot, local, out=local)
    np.copyto(snapshot, local)


def adaptive_window(
    loss: float,
    first_loss: float,
    learning_rate: float,
    first_learning_rate: float,
    first_window: int = 1,
    limit: int = 16,
) -> int:
    """Adaptive LocalSGD: steps to the next exchange, ``clip(⌈√(η₀ L k₀ / (η L₀))⌉, 1, limit)``.

    The loss must be the same on all ranks (their mean), or they exchange at different times.

    >>> adaptive_window(0.5, 2.0, 0.01, 0.1, 4)
    4

    References:
        Wang and Joshi, Adaptive communication strategies for local-update SGD, 2019.
    """
    if not (first_loss > 0 and learning_rate > 0 and math.isfinite(loss)):
        return 1
    ratio = first_learning_rate * max(loss, 0.0) / (learning_rate * first_loss)
    return min(limit, max(1, math.ceil(math.sqrt(ratio * first_window))))


def elastic_average(
    communicator: Communicator, local: FloatArray, center: FloatArray, alpha: float | None = None
) -> None:
    """Synchronous EASGD: ``x_i −= α (x_i − x̃)``; ``x̃ += α Σ (x_i − x̃)``, both from the old values.

    What the ranks give up the center gains: ``Σ x_i + x̃`` does not change.

    Args:
        communicator: Of all ranks.
        local: ``x_i``.
        center: ``x̃``, equal on all ranks before and after.
        alpha: None: ``1/p``.

    References:
        Zhang, Choromanska and LeCun, Deep learning with elastic averaging SGD, 2015.
    """
    rate = np.float32(1.0 / communicator.size if alpha is None else alpha)
    pull = local - center
    pull *= rate
    local -= pull
    center += communicator.all_reduce(pull, out=pull)


def exchange_accumulated(
    communicator: Communicator,
    accumulated: FloatArray,
    center: FloatArray,
    local: FloatArray,
    *,
    mean: bool = True,
) -> None:
    """Synchronous Downpour: ``x̃ += Σ A_i (/p)``; ``x_i = x̃``; ``A_i = 0``.

    Args:
        communicator: Of all ranks.
        accumulated: ``A_i``, this rank's updates since the last exchange.
        center: ``x̃``, equal on all ranks before and after.
        local: ``x_i``.
        mean: Divide by ``p``; a plain sum diverges as ranks are added.
    """
    center += communicator.all_reduce(accumulated, "mean" if mean else "sum", out=accumulated)
    np.copyto(local, center)
    accumulated.fill(0)


def drop_stragglers(communicator: Communicator, gradient: FloatArray, finished: bool) -> FloatArray:
    """The mean over the ranks that finished: ``Σ_{finished} g_i / |finished|``; 0 if none did.

    Args:
        communicator: Of all ranks; one that did not finish takes part with nothing.
        gradient: ``g_i``; becomes the mean.
        finished: Whether this rank's gradient is whole.

    References:
        Dai et al., BigDL: a distributed deep learning framework for big data, 2019.
    """
    return communicator.all_reduce(gradient, "weighted", weight=float(finished), out=gradient)


def step_slices(
    communicator: Communicator,
    gradient: FloatArray,
    weights: FloatArray,
    step: Callable[[FloatArray, FloatArray], None],
    weight: float = 1.0,
) -> None:
    """Each rank steps its own slice: reduce-scatter, optimizer, all-gather.

    Each rank keeps optimizer state for ``1/p`` of the weights only. Equals a whole step wherever
    the optimizer treats elements one by one.

    Args:
        communicator: Of all ranks.
        gradient: This rank's gradient.
        weights: Equal on all ranks before and after.
        step: ``step(weights_slice, gradient_slice)`` changes the slice in place.
        weight: This rank's rows.

    References:
        Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models,
        2020 (stage 1); Dai et al., BigDL, 2019.
    """
    mine = communicator.reduce_scatter(gradient, "weighted", weight=weight)
    size, rank, count = weights.size, communicator.rank, communicator.size
    part = weights[size * rank // count : size * (rank + 1) // count]
    step(part, mine)
    start = 0
    for other in communicator.all_gather(part):
        np.copyto(weights[start : start + other.size], other)
        start += other.size


class Adasum:
    """Adasum: a sum where gradients are orthogonal, a mean where they are parallel.

    Pairwise along a binary tree, per variable:
    ``a ⊕ b = (1 − a·b / 2‖a‖²) a + (1 − a·b / 2‖b‖²) b``. Each of the ``log₂ p`` levels exchanges
    the whole buffer between two ranks.

    Args:
        communicator: Of all ranks, a power of two; its groups are made here.
        layout: Of the buffer; the averaged segment is averaged.

    Raises:
        ConfigError: The number of ranks is no power of two.

    References:
        Maleki et al., Scaling distributed training with adaptive summation, 2021.
    """

    def __init__(self, communicator: Communicator, layout: Layout) -> None:
        rank, size = communicator.rank, communicator.size
        if size & (size - 1):
            raise ConfigError(
                "Adasum cannot pair the ranks",
                expected="a number of ranks that is a power of two",
                received=f"{size} ranks",
            )
        self._layout = layout
        self._communicator = communicator
        distances = [1 << level for level in range(size.bit_length() - 1)]
        self._pairs = [communicator.group(sorted((rank, rank ^ d))) for d in distances]

    def reduce(self, buffer: FloatArray) -> None:
        """Replaces every rank's ``buffer`` by their Adasum, the same on all."""
        trained = buffer[: self._layout.trained_size]
        for pair in self._pairs:
            first, second = pair.all_gather(trained)
            for slot in self._layout.slots:
                if slot.offset < self._layout.trained_size:
                    place = slice(slot.offset, slot.offset + slot.size)
                    _add_adaptively(first[place], second[place], trained[place])
        averaged = buffer[self._layout.trained_size :]
        self._communicator.all_reduce(averaged, "mean", out=averaged)

    def close(self) -> None:
        """Closes the groups."""
        for pair in self._pairs:
            pair.close()


def _add_adaptively(a: FloatArray, b: FloatArray, out: FloatArray) -> None:
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    dot = float(wide_a @ wide_b)
    norm_a, norm_b = float(wide_a @ wide_a), float(wide_b @ wide_b)
    factor_a = 1.0 - dot / (2.0 * norm_a) if norm_a > 0 else 1.0
    factor_b = 1.0 - dot / (2.0 * norm_b) if norm_b > 0 else 1.0
    np.copyto(out, factor_a * wide_a + factor_b * wide_b, casting="same_kind")


class PowerSGD:
    """PowerSGD: matrices travel as two thin factors, with error feedback.

    Per matrix, with ``M = G + e``: ``P = mean(M Q)``, orthogonalized; ``Q = mean(Mᵀ P)``;
    ``Ĝ = P Qᵀ``; ``e = M − Ĝ``. Variables of more than two dimensions are matrices of their last
    dimension; where the factors would not be smaller, and for vectors, the plain mean is taken.

    Args:
        communicator: Of all ranks.
        layout: Of the buffer; the averaged segment is averaged.
        rank: Columns of the factors.
        seed: Of the first ``Q``, equal on all ranks.

    References:
        Vogels, Karimireddy and Jaggi, PowerSGD: practical low-rank gradient compression, 2019.
    """

    def __init__(
        self, communicator: Communicator, layout: Layout, rank: int = 1, seed: int = 0
    ) -> None:
        if rank < 1:
            raise ConfigError(
                "PowerSGD cannot compress", expected="a rank of at least 1", received=f"rank={rank}"
            )
        self._communicator = communicator
        random = np.random.default_rng(seed)
        self._places: list[tuple[slice, tuple[int, int]]] = []
        self._factors: list[FloatArray] = []
        self._errors: list[FloatArray] = []
        self._plain = np.ones(layout.size, bool)
        for slot in layout.slots:
            if len(slot.shape) < 2 or slot.offset >= layout.trained_size or not slot.size:
                continue
            columns = slot.shape[-1]
            rows = slot.size // columns
            width = min(rank, rows, columns)
            if width * (rows + columns) >= slot.size and width < min(rows, columns):
                continue
            place = slice(slot.offset, slot.offset + slot.size)
            self._places.append((place, (rows, columns)))
            self._factors.append(random.standard_normal((columns, width)).astype(np.float32))
            self._errors.append(np.zeros((rows, columns), np.float32))
            self._plain[place] = False

    @property
    def sent_elements(self) -> int:
        """Elements that one exchange reduces, instead of the layout's size."""
        thin = sum(
            int(q.shape[1]) * (rows + int(q.shape[0]))
            for q, (_, (rows, _)) in zip(self._factors, self._places, strict=True)
        )
        return int(np.count_nonzero(self._plain)) + thin

    def reduce(self, buffer: FloatArray) -> None:
        """Replaces every rank's ``buffer`` by the (approximate) mean, the same on all."""
        matrices: list[Any] = [
            buffer[place].reshape(shape) + error
            for (place, shape), error in zip(self._places, self._errors, strict=True)
        ]
        lefts = [m @ q for m, q in zip(matrices, self._factors, strict=True)]
        plain = buffer[self._plain]
        *means, plain = self._mean([*lefts, plain])
        buffer[self._plain] = plain
        lefts = [np.linalg.qr(left)[0].astype(np.float32) for left in means]
        rights = self._mean([m.T @ p for m, p in zip(matrices, lefts, strict=True)])
        for i, (place, shape) in enumerate(self._places):
            approximation = lefts[i] @ rights[i].T
            np.subtract(matrices[i], approximation, out=self._errors[i])
            buffer[place] = approximation.reshape(shape[0] * shape[1])
        self._factors = rights

    def _mean(self, arrays: list[FloatArray]) -> list[FloatArray]:
        """The ranks' means of several arrays, which travel as one."""
        if not arrays:
            return []
        joined = np.concatenate([a.reshape(-1) for a in arrays])
        self._communicator.all_reduce(joined, "mean", out=joined)
        ends = np.cumsum([a.size for a in arrays])[:-1]
        parts = np.split(joined, ends.tolist())
        return [p.reshape(a.shape) for p, a in zip(parts, arrays, strict=True)]
