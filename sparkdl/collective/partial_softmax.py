"""Model-parallel softmax over classes: each rank holds the centers of its own classes only.

For classifiers whose last layer is too large for one rank (faces, products).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparkdl.collective.arithmetic import shard_edges
from sparkdl.collective.communicator import Communicator
from sparkdl.errors import ConfigError, DataError
from sparkdl.options import require_positive, require_share, require_whole

Array = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

_EDGE = 1.0 - 1e-7


@dataclass(frozen=True)
class Margin:
    """The own class's logit, ``scale · (cos(m1 · θ + m2) − m3)``; others have ``scale · cos θ``.

    ArcFace is ``Margin(m2=0.5)``, CosFace ``Margin(m3=0.4)``, a plain cosine softmax ``Margin()``.

    Args:
        m1: Factor of the angle.
        m2: Added to the angle, in radians.
        m3: Taken off the cosine.
        scale: Length of the logits.

    References:
        Deng et al., ArcFace: additive angular margin loss for deep face recognition, 2019; Wang et
        al., CosFace: large margin cosine loss for deep face recognition, 2018.
    """

    m1: float = 1.0
    m2: float = 0.0
    m3: float = 0.0
    scale: float = 64.0

    def __post_init__(self) -> None:
        require_positive("margin", "m1", self.m1)
        require_positive("margin", "scale", self.scale)

    def of(self, cosine: Wide) -> tuple[Wide, Wide]:
        """The logit of the own class, and its derivative by the cosine."""
        angle = np.arccos(np.clip(cosine, -_EDGE, _EDGE))
        inner = self.m1 * angle + self.m2
        value = self.scale * (np.cos(inner) - self.m3)
        return value, self.scale * self.m1 * np.sin(inner) / np.sin(angle)


@dataclass(frozen=True)
class SoftmaxStep:
    """The loss of a step and its gradients.

    Args:
        loss: Mean over all ranks' rows; the same on all ranks.
        features: Gradient of the loss for this rank's features, ``(rows, width)``.
        classes: Rows of ``PartialSoftmax.centers`` that took part, in order.
        centers: Gradient of the loss for those, ``(len(classes), width)``.
    """

    loss: float
    features: Array
    classes: Numbers
    centers: Array


class PartialSoftmax:
    """Softmax cross-entropy over the cosines of features and class centers, classes in slices.

    Rank ``r`` of ``p`` holds classes ``[C·r//p, C·(r+1)//p)``. Every rank gets all features and
    labels, and computes the logits of its classes. The ranks reduce the largest logits, the sums of
    exponentials, the logits of the rows' own classes, and the gradients of the features. With
    ``sample`` below 1 each rank uses all classes that occur in the step, and random others up to
    that share of its classes.

    Computes in float64. All ranks call it at the same time; a rank may have no rows.

    Args:
        communicator: Of all ranks.
        num_classes: C, over all ranks.
        width: Length of a feature vector.
        margin: The own class's logit.
        sample: Share of a rank's classes that take part in a step, in (0, 1].
        seed: Of the first centers and of the sampling.

    References:
        An et al., Partial FC: training 10 million identities on a single machine, 2021.
    """

    def __init__(
        self,
        communicator: Communicator,
        num_classes: int,
        width: int,
        margin: Margin | None = None,
        *,
        sample: float = 1.0,
        seed: int = 0,
    ) -> None:
        require_whole("partial softmax", "num_classes", num_classes, 1)
        require_whole("partial softmax", "width", width, 1)
        require_share("partial softmax", "sample", sample)
        self._communicator = communicator
        self._margin = Margin() if margin is None else margin
        self._sample, self._num_classes = sample, num_classes
        edges = shard_edges(num_classes, communicator.size)
        self.first, self.stop = edges[communicator.rank], edges[communicator.rank + 1]
        self._random = np.random.default_rng([seed, communicator.rank])
        size = (self.stop - self.first, width)
        self.centers: Array = self._random.normal(0.0, 0.01, size).astype(np.float32)
        """This rank's class centers, ``(classes, width)``; change them in place."""

    def step(self, features: Array, labels: npt.ArrayLike) -> SoftmaxStep:
        """Loss and gradients of one batch of all ranks.

        Args:
            features: This rank's, float32 ``(rows, width)``; none is ``(0, width)``.
            labels: Class numbers, ``(rows,)``.

        Raises:
            ConfigError: The shapes do not fit (on this rank).
            DataError: A label is no class (on all ranks alike), or no rank has rows.
        """
        mine = np.ascontiguousarray(features, np.float32)
        own_labels = np.asarray(labels, np.int64)
        width = self.centers.shape[1]
        if mine.ndim != 2 or mine.shape[1] != width or own_labels.shape != mine.shape[:1]:
            raise ConfigError(
                "features and labels do not fit the partial softmax",
                expected=f"features (rows, {width}) and labels (rows,)",
                received=f"features {mine.shape} and labels {own_labels.shape}",
            )
        gathered: list[Numbers] = self._communicator.all_gather(own_labels)
        x, y = self._gathered(mine), np.concatenate(gathered)
        self._check_labels(y)

        classes, position = self._choose(y)
        here = position >= 0
        unit_x, length_x = _unit(x)
        unit_w, length_w = _unit(self.centers[classes].astype(np.float64))
        cosine = unit_x @ unit_w.T
        logits = self._margin.scale * cosine
        slope = np.full_like(cosine, self._margin.scale)
        at = (np.flatnonzero(here), position[here])
        logits[at], slope[at] = self._margin.of(cosine[at])

        largest = self._reduce(logits.max(axis=1, initial=-math.inf), "max")
        powers = np.exp(logits - largest[:, None])
        own = np.zeros(len(x))
        own[here] = logits[at]
        total, own = self._reduce(np.stack([powers.sum(axis=1), own]), "sum")
        loss = float(np.mean(np.log(total) + largest - own))

        probability = powers / total[:, None]
        probability[at] -= 1.0
        slope *= probability / len(x)
        back_x = _through_unit(slope @ unit_w, unit_x, length_x)
        back_w = _through_unit(slope.T @ unit_x, unit_w, length_w)
        back_x = self._reduce(back_x, "sum")
        start = sum(len(part) for part in gathered[: self._communicator.rank])
        own_rows = back_x[start : start + len(mine)].astype(np.float32)
        return SoftmaxStep(loss, own_rows, classes, back_w.astype(np.float32))

    def _choose(self, labels: Numbers) -> tuple[Numbers, Numbers]:
        """This step's classes (rows of the centers), and each label's place in them or −1."""
        count = self.stop - self.first
        local = labels - self.first
        inside = (local >= 0) & (local < count)
        positives = np.unique(local[inside])
        wanted = max(len(positives), math.ceil(self._sample * count))
        if wanted == count:
            classes = np.arange(count)
        else:
            rest = np.setdiff1d(np.arange(count), positives, assume_unique=True)
            drawn = self._random.choice(rest, wanted - len(positives), replace=False)
            classes = np.sort(np.concatenate([positives, drawn]))
        position = np.full(len(labels), -1, np.int64)
        position[inside] = np.searchsorted(classes, local[inside])
        return classes, position

    def _check_labels(self, labels: Numbers) -> None:
        if not len(labels):
            raise DataError(
                "a partial softmax step without rows", expected="rows on one rank at least",
                received="none on all ranks",
            )  # fmt: skip
        wrong = labels[(labels < 0) | (labels >= self._num_classes)]
        if len(wrong):
            raise DataError(
                "a label of the partial softmax is no class",
                expected=f"numbers from 0 to {self._num_classes - 1}",
                received=str(int(wrong[0])),
            )

    def _gathered(self, features: Array) -> Wide:
        return np.concatenate(self._communicator.all_gather(features)).astype(np.float64)

    def _reduce(self, array: Wide, op: str) -> Wide:
        return self._communicator.all_reduce(array, op, out=array)


def _unit(vectors: Wide) -> tuple[Wide, Wide]:
    """Rows of length 1, and their lengths (a row of zeros stays one)."""
    length = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors / length, length


def _through_unit(gradient: Wide, unit: Wide, length: Wide) -> Wide:
    """The gradient before the division by the length: its part across the vector."""
    along = np.sum(gradient * unit, axis=1, keepdims=True)
    result: Wide = (gradient - along * unit) / length
    return result
