"""The classes of a large softmax, whose centers are rows of a table: loss, gradients, best classes.

The logits of all classes are never held. Two passes go over the centers in chunks: the first finds
each row's largest logit and the sum of their exponentials, the second computes a chunk's logits
once more, its part of the features' gradient, and the step of its centers, whose gradient is gone
after it. (A softmax over ranks by parts: Deng et al., ArcFace, 2019; An et al., Partial FC, 2021.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.tables.hashing import Ids
from sparkdl.tables.index import Slots, owner
from sparkdl.tables.store import RowStore
from sparkdl.weights import FloatArray, is_finite

_LEAST_NORM = np.float32(1e-12)
_BLOCK = 1 << 16

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Margin:
    """``scale (cos(m1 t + m2) - m3)``: the logit of a row's own class at the angle t.

    Those of the other classes are ``scale cos(t)``. Features and centers are normalized. Without
    an easy margin, as in insightface: beyond ``m1 t + m2 = pi`` the logit rises again.

    Args:
        m1: Factor of the angle.
        m2: Angle that is added, in radians.
        m3: Number that is taken from the cosine.
        scale: Factor of all logits.
        gradient: ``'true'``: that of the logit, as in PLSC. ``'straight_through'``: the logit's
            slope is taken as ``scale``, as insightface's ArcFace does.

    Raises:
        ConfigError: A number is not finite, or ``m1`` or ``scale`` is not above 0.
    """

    m1: float = 1.0
    m2: float = 0.0
    m3: float = 0.0
    scale: float = 64.0
    gradient: Literal["true", "straight_through"] = "true"

    def __post_init__(self) -> None:
        numbers = (self.m1, self.m2, self.m3, self.scale)
        sound = all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers)
        kinds = ("true", "straight_through")
        if not sound or self.m1 <= 0 or self.scale <= 0 or self.gradient not in kinds:
            raise ConfigError(
                "this is no margin of a classifier",
                expected="finite numbers, m1 and scale above 0, gradient one of " + str(kinds),
                received=str(self.settings),
            )

    @property
    def settings(self) -> dict[str, object]:
        """The arguments, as JSON has them."""
        return asdict(self)

    def logit(self, cosine: Doubles) -> Doubles:
        """The logit of a row's own class."""
        angle = np.arccos(self._inside(cosine))
        found: Doubles = self.scale * (np.cos(self.m1 * angle + self.m2) - self.m3)
        return found

    def slope(self, cosine: Doubles) -> Doubles:
        """The derivative of :meth:`logit` by the cosine, or what is taken for it."""
        if self.gradient == "straight_through":
            return np.full_like(cosine, self.scale)
        inside = self._inside(cosine)
        sine = np.sin(self.m1 * np.arccos(inside) + self.m2)
        found: Doubles = self.scale * self.m1 * sine / np.sqrt(1 - inside * inside)
        return found

    @staticmethod
    def _inside(cosine: Doubles) -> Doubles:
        """The cosine, kept from where the slope would be a division by zero."""
        return np.clip(cosine, -1 + 1e-7, 1 - 1e-7)


@dataclass(frozen=True)
class ClassSpec:
    """The settings of the loss of a large softmax.

    Args:
        num_classes: Classes are the numbers below it.
        margin: Margin of a row's own class. None: logits are products of features and centers.
        sample: Share of a rank's classes that a training step takes: those of the batch, and
            others at random.
        chunk: Classes whose logits are held at a time.
    """

    num_classes: int
    margin: Margin | None = None
    sample: float = 1.0
    chunk: int = 2048


class Chunk(NamedTuple):
    """Some classes and their centers, of shape ``(classes, dim)``."""

    classes: Ids
    centers: FloatArray


class Measures(NamedTuple):
    """The part of some classes in the softmax of each row; all of shape ``(rows,)``.

    Args:
        others: The largest logit of the classes but the row's own; -infinity of none.
        total: The sum of ``exp(logit - others)`` over them.
        own: The logit of the row's own class, with its margin; -infinity if it is not here.
        plain: The same without a margin.
    """

    others: Doubles
    total: Doubles
    own: Doubles
    plain: Doubles

    def to_array(self) -> FloatArray:
        """The four, of shape ``(4, rows)``."""
        return np.stack(self).astype(np.float32)

    @classmethod
    def from_array(cls, array: FloatArray) -> Measures:
        """The counterpart of :meth:`to_array`."""
        return cls(*array.reshape(4, -1).astype(np.float64))


class Softmax(NamedTuple):
    """The softmax of each row over all classes; all of shape ``(rows,)``.

    Args:
        normalizer: The logarithm of the sum of the logits' exponentials.
        own: The logit of the row's own class, with its margin.
        hits: 1 where no other class has a logit as large as the own one without its margin.
    """

    normalizer: Doubles
    own: Doubles
    hits: FloatArray

    @property
    def losses(self) -> FloatArray:
        """The cross-entropy of each row."""
        return (self.normalizer - self.own).astype(np.float32)

    def of(self, rows: slice) -> Softmax:
        """That of some of the rows."""
        return Softmax(self.normalizer[rows], self.own[rows], self.hits[rows])


class Measured(NamedTuple):
    """A batch whose softmax is known, and whose gradient may follow.

    Args:
        number: By which the gradient names it.
        features: Features of the rows of all ranks, one rank after another.
        labels: Their own classes.
        softmax: Softmax of each of them.
    """

    number: int
    table: str
    features: FloatArray
    labels: Ids
    softmax: Softmax


def find_measured(measured: Mapping[str, Measured], number: int) -> Measured:
    """The batch with that number, of the last ones of all tables.

    Raises:
        ModelError: Its gradient has come already, or another batch came after it.
    """
    for of in measured.values():
        if of.number == number:
            return of
    raise trained_twice()


def trained_twice() -> ModelError:
    """The centers cannot have another step before the step of the model ends."""
    return ModelError(
        "the centers of a classifier are trained twice in one step",
        expected="one backward pass for each forward pass", received="another one",
        hint="does train_step compute its gradient several times, or do two layers have one table?",
    )  # fmt: skip


def joined(parts: Iterable[Measures]) -> Softmax:
    """The softmax over the classes of all parts."""
    found = [np.stack(column) for column in zip(*parts, strict=True)]
    others, own, plain = found[0].max(0), found[2].max(0), found[3].max(0)
    largest = np.maximum(others, own)
    with np.errstate(invalid="ignore"):  # NaN of a feature stays NaN
        total = (found[1] * np.exp(found[0] - largest)).sum(0) + np.exp(own - largest)
        normalizer = largest + np.log(total)
    return Softmax(normalizer, own, (plain > others).astype(np.float32))


def measure(
    chunks: Iterable[Chunk], features: FloatArray, labels: Ids, margin: Margin | None
) -> Measures:
    """The part of the classes of ``chunks`` in the softmax of each row: the first pass.

    Args:
        chunks: Each class at most once.
        features: Features of shape ``(rows, dim)``.
        labels: The own class of each row, which need not be among them.
        margin: See :class:`ClassSpec`.
    """
    rows = len(labels)
    nothing = np.full(rows, -np.inf)
    others, total, own, plain = nothing, np.zeros(rows), nothing.copy(), nothing.copy()
    directions, _ = _directions(features, margin)
    for classes, centers in chunks:
        towards, _ = _directions(centers, margin)
        logits = _logits(directions, towards, margin)
        at, places = _own_places(classes, labels)
        plain[at] = logits[at, places]
        own[at] = plain[at] if margin is None else margin.logit(plain[at] / margin.scale)
        logits[at, places] = -np.inf
        largest = np.maximum(others, logits.max(1))
        safe = np.where(largest == -np.inf, 0, largest)
        np.exp(np.subtract(logits, safe[:, None].astype(np.float32), out=logits), out=logits)
        total = total * np.exp(others - safe) + logits.sum(1, dtype=np.float64)
        others = largest
    return Measures(others, total, own, plain)


def best(
    chunks: Iterable[Chunk], features: FloatArray, k: int, margin: Margin | None
) -> tuple[Ids, FloatArray]:
    """The ``k`` classes with the largest logits, without a margin, the largest first.

    Returns:
        Classes and logits, each of shape ``(rows, k)``; class -1 where there are fewer.
    """
    rows = len(features)
    found = np.full((rows, k), -1, np.int64), np.full((rows, k), -np.inf, np.float32)
    directions, _ = _directions(features, margin)
    for classes, centers in chunks:
        logits = _logits(directions, _directions(centers, margin)[0], margin)
        few = min(k, len(classes))
        places = np.argpartition(-logits, few - 1, axis=1)[:, :few]
        values = np.concatenate([found[1], np.take_along_axis(logits, places, 1)], axis=1)
        names = np.concatenate([found[0], classes[places]], axis=1)
        order = np.argsort(-values, axis=1, kind="stable")[:, :k]
        found = np.take_along_axis(names, order, 1), np.take_along_axis(values, order, 1)
    return found


class ClassPart:
    """The classes that one rank keeps, as rows of a store.

    Args:
        store: Store of the rank's rows. Classes without a row get one, with its start value.
    """

    def __init__(self, store: RowStore, spec: ClassSpec, rank: int = 0, ranks: int = 1) -> None:
        self._store, self._spec, self._rank = store, spec, rank
        count = spec.num_classes
        blocks = (np.arange(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK))
        self._classes = np.concatenate([some[owner(some, ranks) == rank] for some in blocks])
        self._slots = store.make_rows(self._classes)
        self._taken: tuple[Ids, Slots] = self._classes, self._slots

    def measure(self, features: FloatArray, labels: Ids, *, training: bool) -> Measures:
        """The first pass over this rank's classes; in training over a sample of them."""
        self._taken = self._classes, self._slots
        if training and self._spec.sample < 1:
            self._taken = self._sample(labels)
        return measure(self._chunks(), features, labels, self._spec.margin)

    def learn(
        self,
        features: FloatArray,
        labels: Ids,
        softmax: Softmax,
        upstream: FloatArray,
        shares: FloatArray,
        learning_rate: float | None,
    ) -> FloatArray:
        """The second pass over the classes of the last :meth:`measure`: one step of their centers.

        Args:
            features: As they were measured, of shape ``(rows, dim)``.
            labels: The own class of each row.
            softmax: Over the classes of all ranks.
            upstream: Gradient of the whole loss by each row's loss, as its worker has it.
            shares: What it is multiplied by for the centers: the share of the row's worker.
            learning_rate: Learning rate of this step; None: the centers stay as they are.

        Returns:
            The part of these classes in the gradient by the features, of shape ``(rows, dim)``.

        Raises:
            ModelError: A center's gradient is not finite, and the store raises then.
        """
        margin, store = self._spec.margin, self._store
        directions, lengths = _directions(features, margin)
        shared = directions * shares[:, None]
        onward = np.zeros_like(directions)
        normalizer = softmax.normalizer[:, None].astype(np.float32)
        scale = np.float32(1 if margin is None else margin.scale)
        store.clock += learning_rate is not None
        for at, (classes, centers) in zip(self._edges(), self._chunks(), strict=True):
            towards, sizes = _directions(centers, margin)
            slopes = _logits(directions, towards, margin)
            rows, places = _own_places(classes, labels)
            plain = slopes[rows, places].astype(np.float64) / scale
            np.exp(np.subtract(slopes, normalizer, out=slopes), out=slopes)
            slopes *= scale
            slope = scale if margin is None else margin.slope(plain)
            chance = np.exp(softmax.own[rows] - softmax.normalizer[rows])
            slopes[rows, places] = (chance - 1) * slope
            slopes *= upstream[:, None]
            onward += slopes @ towards
            if learning_rate is None:
                continue
            gradients = _through(slopes.T @ shared, towards, sizes)
            if store.on_nan != "ignore" and not is_finite(gradients):
                raise ModelError(
                    f"table {store.name!r}: the gradient of a class is not finite",
                    expected="finite gradients",
                    received="NaN or infinity in the gradient of one of the classes "
                    f"{int(classes[0])} to {int(classes[-1])}",
                    hint="a smaller learning rate; features that are not finite?",
                )
            store.step_at(self._taken[1][at], gradients, learning_rate)
        return _through(onward, directions, lengths)

    def _edges(self) -> Iterator[slice]:
        for start in range(0, len(self._taken[0]), self._spec.chunk):
            yield slice(start, start + self._spec.chunk)

    def _chunks(self) -> Iterator[Chunk]:
        classes, slots = self._taken
        for at in self._edges():
            yield Chunk(classes[at], self._store.values_at(slots[at]))

    def _sample(self, labels: Ids) -> tuple[Ids, Slots]:
        """The batch's classes that are here, and others at random, the same after a retry."""
        count, store = len(self._classes), self._store
        chosen = np.zeros(count, bool)
        places = np.searchsorted(self._classes, labels)
        here = np.take(self._classes, places, mode="clip") == labels if count else places < 0
        chosen[places[here]] = True
        more = int(self._spec.sample * count) - int(chosen.sum())
        if more > 0:
            seed = [store.start.seed & 0xFFFFFFFF, store.clock, self._rank]
            rest = np.flatnonzero(~chosen)
            chosen[np.random.default_rng(seed).choice(rest, more, replace=False)] = True
        return self._classes[chosen], self._slots[chosen]


def checked_labels(labels: npt.NDArray[np.generic], rows: int, num_classes: int, name: str) -> Ids:
    """The own class of each row, as int64.

    Raises:
        DataError: There are more or fewer than rows, or one is no class.
    """
    flat = np.asarray(labels).reshape(-1)
    whole = flat.astype(np.int64)
    if flat.size != rows or (flat.dtype.kind == "f" and (whole != flat).any()):
        raise DataError(
            f"these are no labels of the classifier {name!r}",
            expected=f"one integer for each of {rows} rows",
            received=f"{flat.dtype} of shape {np.shape(labels)}",
            hint="labels are numbers of classes, not one-hot vectors",
        )
    if flat.size and (whole.min() < 0 or whole.max() >= num_classes):
        wrong = whole[(whole < 0) | (whole >= num_classes)][0]
        raise DataError(
            f"a label is no class of the classifier {name!r}", expected=f"0 to {num_classes - 1}",
            received=str(wrong),
        )  # fmt: skip
    return whole


def _directions(rows: FloatArray, margin: Margin | None) -> tuple[FloatArray, FloatArray | None]:
    """Rows of length 1, and their lengths; without a margin the rows as they are."""
    if margin is None:
        return rows, None
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    np.maximum(lengths, _LEAST_NORM, out=lengths)
    return rows / lengths, lengths


def _logits(directions: FloatArray, towards: FloatArray, margin: Margin | None) -> FloatArray:
    logits: FloatArray = directions @ towards.T
    if margin is not None:
        logits *= np.float32(margin.scale)
    return logits


def _through(
    gradients: FloatArray, directions: FloatArray, lengths: FloatArray | None
) -> FloatArray:
    """The gradient by rows, from that by their directions."""
    if lengths is None:
        return gradients
    along = np.einsum("ij,ij->i", gradients, directions)[:, None]
    found: FloatArray = (gradients - along * directions) / lengths
    return found


def _own_places(classes: Ids, labels: Ids) -> tuple[Slots, Slots]:
    order = np.argsort(classes)
    places = np.searchsorted(classes, labels, sorter=order)
    there = order.take(places, mode="clip")
    rows = np.flatnonzero(classes[there] == labels)
    return rows, there[rows]
