"""``ShardedClassifier``: a softmax over very many classes, whose centers lie in a table."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.losses import loss as keras_losses

from sparkdl.errors import ConfigError, ModelError
from sparkdl.layers.backends import Ids, after, losses
from sparkdl.layers.local_rows import StoredRows, TableLayer
from sparkdl.learner.signature import loss_by_output
from sparkdl.settings.values import require_int
from sparkdl.tables.classes import Chunk, ClassSpec, Margin, best, checked_labels
from sparkdl.tables.rules import RowStart
from sparkdl.tables.service import IdArray, TableSpec
from sparkdl.tables.store import RowStore
from sparkdl.weights import FloatArray


def ArcFace(margin: float = 0.5, scale: float = 64.0) -> Margin:
    """``scale cos(t + margin)`` (Deng et al., ArcFace, 2019), with its true gradient.

    That of insightface's code: ``Margin(m2=margin, scale=scale, gradient='straight_through')``.
    """
    return Margin(m2=margin, scale=scale)


def CosFace(margin: float = 0.4, scale: float = 64.0) -> Margin:
    """``scale (cos(t) - margin)`` (Wang et al., CosFace, 2018)."""
    return Margin(m3=margin, scale=scale)


def SphereFace(margin: float = 1.35, scale: float = 64.0) -> Margin:
    """``scale cos(margin t)`` (Liu et al., SphereFace, 2017)."""
    return Margin(m1=margin, scale=scale)


class _Called(threading.local):
    """The layer that this thread has called last, by the name of its table."""

    def __init__(self) -> None:
        self.layers: dict[str, weakref.ref[ShardedClassifier]] = {}

    def find(self, table: str) -> ShardedClassifier:
        """That of a table; raises ModelError if there is none."""
        layer = self.layers[table]() if table in self.layers else None
        if layer is None:
            raise ModelError(
                f"there is no classifier with the table {table!r} before this loss or metric",
                expected="the output of a ShardedClassifier as prediction",
                received="another output",
                hint="model.compile(loss=classifier.loss, metrics=[classifier.accuracy])",
            )
        return layer


_called = _Called()


@keras.saving.register_keras_serializable(package="sparkdl")
class ShardedClassifier(TableLayer):
    """The last layer of a model with very many classes, whose centers lie in a table.

    Its output are the features that it is called with; the cross-entropy of the softmax over all
    classes is its :attr:`loss`. ``model.fit`` in one process keeps the centers in that process;
    ``SparkModel(model, mode='allreduce').fit`` spreads them over the workers: each computes the
    logits of its own classes for the rows of all workers, in chunks that are gone at once, and
    takes the steps of their centers.

    ::

        classifier = sparkdl.layers.ShardedClassifier(1_000_000, margin=ArcFace(0.5, 64))
        model = keras.Model(images, classifier(backbone(images)))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), classifier.loss,
                      metrics=[classifier.accuracy])
        ...
        classes, cosines = classifier.top_classes(model.predict(x), k=5)

    Args:
        num_classes: Labels are integers from 0 to ``num_classes - 1``.
        margin: ``ArcFace(0.5, 64)``, ``CosFace(0.4, 64)``, ``SphereFace(1.35, 64)`` or a
            ``Margin``: features and centers are normalized then. None: logits are the products of
            features and centers, as those of a ``Dense`` without bias.
        sample: Share of its classes that a worker takes in a training step: those of the batch's
            labels always, others at random (Partial FC). The centers of others stand still.
        table: Name of the table that keeps the centers. None: the layer's.
        optimizer: The centers': a Keras optimizer or its name. SGD (with momentum, weight decay),
            Adagrad, Adam and FTRL work. None: that of the model, with its learning rate.
        initializer: The start value of centers, see ``ServedEmbedding``. It depends on the seed,
            the table's name and the class only.
        chunk: Classes whose logits are held at a time.
        seed: Seed of the start values and samples; None: drawn when the layer is made.
        **kwargs: Arguments of ``keras.layers.Layer``.

    Input shape:
        Floats, ``(batch, dim)``.

    Output shape:
        The same, float32.

    Raises:
        ConfigError: An argument is not as described.
        ModelError: The layer is made in a ``keras.RematScope``. When called: the features have
            another shape, or the model has another loss or metric on this output, which would take
            features for scores of classes.
    """

    all_rows = True

    def __init__(
        self,
        num_classes: int,
        *,
        margin: Margin | Mapping[str, Any] | None = None,
        sample: float = 1.0,
        table: str | None = None,
        optimizer: keras.Optimizer | str | None = None,
        initializer: str | Mapping[str, Any] | None = None,
        chunk: int = 2048,
        seed: int | None = None,
        **kwargs: object,
    ) -> None:
        kwargs.setdefault("dtype", "float32")
        super().__init__(table=table, optimizer=optimizer, seed=seed, **kwargs)
        self.num_classes = require_int("num_classes", num_classes, least=2)
        self.margin = Margin(**margin) if isinstance(margin, Mapping) else margin
        if self.margin is not None and not isinstance(self.margin, Margin):
            raise ConfigError(
                "margin says how far a row's own class is kept from the others",
                expected="ArcFace(0.5, 64), CosFace(0.4, 64), SphereFace(1.35, 64), Margin(...)",
                received=repr(margin),
            )
        known = isinstance(sample, (int, float)) and not isinstance(sample, bool)
        if not known or not 0 < sample <= 1:
            raise ConfigError(
                "sample is the share of the classes that a step takes",
                expected="above 0, at most 1", received=repr(sample),
            )  # fmt: skip
        self.sample = float(sample)
        self.chunk = require_int("chunk", chunk, least=1)
        self.initializer = initializer or {"name": "normal", "stddev": 0.01}
        self.dim = 0
        self._training = False
        self.hits: FloatArray = np.zeros(0, np.float32)
        """1 for each row of the last batch whose own class was the nearest, else 0."""

    @property
    def classes(self) -> ClassSpec:
        """The settings of the softmax."""
        return ClassSpec(self.num_classes, self.margin, self.sample, self.chunk)

    @property
    def loss(self) -> ClassLoss:
        """The loss to compile a model with: the cross-entropy over all classes."""
        return ClassLoss(self.table, self.num_classes)

    @property
    def accuracy(self) -> ClassAccuracy:
        """The metric to compile a model with: the share of rows whose own class is the nearest."""
        return ClassAccuracy(self.table)

    def table_spec(self, optimizer: object) -> TableSpec:
        rule, rate = self.rule_and_rate(optimizer)
        start = RowStart(self.table, self.dim, self.initializer, self.seed).settings
        store = RowStore(self.dim, rule, start, name=self.table, seed=self.seed)
        return TableSpec(self.table, store.settings, rate, self.classes)

    def centers(self, classes: object) -> FloatArray:
        """The centers of some classes; start values of those without a step.

        Args:
            classes: Integers, of shape ``(n,)``.

        Returns:
            Of shape ``(n, dim)``, as they were trained: not normalized.

        Raises:
            ModelError: The centers lie on other workers.
        """
        return self.rows(np.asarray(classes, np.int64))

    def start_rows(self, ids: IdArray) -> FloatArray:
        return RowStart(self.table, self.dim, self.initializer, self.seed).rows(ids)

    def top_classes(self, features: object, k: int = 5) -> tuple[IdArray, FloatArray]:
        """The nearest classes of each row.

        Args:
            features: What the model predicts, of shape ``(rows, dim)``.
            k: How many.

        Returns:
            Classes (int64) and their cosines (without a margin: logits), of shape ``(rows, k)``,
            the nearest first.

        Raises:
            ModelError: The centers lie on other workers.
        """
        k = min(require_int("k", k, least=1), self.num_classes)
        array = np.ascontiguousarray(features, np.float32)
        found, logits = best(self._chunks(), array, k, self.margin)
        return found, logits if self.margin is None else logits / np.float32(self.margin.scale)

    def _chunks(self) -> Any:
        if isinstance(self.service, StoredRows):
            return self.service.tables[self.table].chunks(self.chunk)
        edges = range(0, self.num_classes, self.chunk)
        every = (np.arange(a, min(a + self.chunk, self.num_classes)) for a in edges)
        return (Chunk(classes, self.centers(classes)) for classes in every)

    def build(self, input_shape: Any) -> None:
        shape = tuple(input_shape)
        if len(shape) != 2 or shape[1] is None:
            raise ModelError(
                f"layer {self.name!r} takes one vector of features for each row",
                expected="shape (batch, dim)", received=str(shape),
                hint="keras.layers.Flatten or GlobalAveragePooling2D before it",
            )  # fmt: skip
        self.dim = shape[1]
        super().build(input_shape)

    def call(self, features: object, training: object = None) -> Any:
        model = self._get_call_context().entry_layer
        if isinstance(model, keras.Model):
            self.require_trainable_in(model)
        self.find_service()
        self._training = bool(training)
        _called.layers[self.table] = weakref.ref(self)
        return ops.cast(features, "float32")

    def losses_of(self, labels: object, features: object) -> Any:
        """The loss of each row; see :class:`ClassLoss`."""
        anchor = ops.convert_to_tensor(self._anchor)
        labels = ops.reshape(labels, (-1,))
        return losses(_Call(self, self._training), ops.cast(features, "float32"), labels, anchor)

    def require_trainable_in(self, model: keras.Model) -> None:
        """Raises ModelError if the model takes this layer's features for scores of classes."""
        names = list(getattr(model, "output_names", ())) or [""]
        outputs = list(getattr(model, "outputs", None) or [None])
        makers = [getattr(getattr(t, "_keras_history", None), "operation", self) for t in outputs]
        mine = [name for name, maker in zip(names, makers, strict=False) if maker is self]
        kept = getattr(model, "_compile_metrics", None)
        metrics = () if kept is None else (kept._user_metrics, kept._user_weighted_metrics)
        wrong: list[Any] = []
        told = [(getattr(model, "loss", None), ClassLoss), *((m, ClassAccuracy) for m in metrics)]
        for given, kind in told:
            by_output = loss_by_output(given, names) if len(names) > 1 else {names[0]: given}
            found = keras.tree.flatten([by_output.get(name) for name in mine])
            wrong += [g for g in found if g is not None and not isinstance(g, kind)]
        if wrong:
            raise ModelError(
                f"the output of layer {self.name!r} are features, no scores of classes",
                expected="loss=classifier.loss, metrics=[classifier.accuracy] or none",
                received=", ".join(str(getattr(w, "name", w)) for w in wrong),
            )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "num_classes": self.num_classes,
            "margin": None if self.margin is None else self.margin.settings,
            "sample": self.sample,
            "initializer": self.initializer,
            "chunk": self.chunk,
        }


@keras.saving.register_keras_serializable(package="sparkdl")
class ClassLoss(keras.losses.Loss):  # type: ignore[misc]
    """The cross-entropy of the softmax over all classes of a :class:`ShardedClassifier`.

    Args:
        table: Name of the classifier's table.
        num_classes: How many classes the classifier has.
        reduction: As of every Keras loss.
        dtype: As of every Keras loss.
    """

    def __init__(
        self, table: str, num_classes: int, reduction: str = "sum_over_batch_size",
        name: str = "class_loss", dtype: object = None,
    ) -> None:  # fmt: skip
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.table, self.num_classes = table, num_classes

    def __call__(self, y_true: object, y_pred: object, sample_weight: object = None) -> Any:
        """The reduced loss. Labels stay integers: as floats they would be other classes."""
        per_row = self.call(y_true, y_pred)
        return keras_losses.reduce_weighted_values(
            per_row, sample_weight=sample_weight, reduction=self.reduction, dtype=self.dtype
        )

    def call(self, y_true: object, y_pred: object) -> Any:
        """The loss of each row."""
        return _called.find(self.table).losses_of(ops.convert_to_tensor(y_true), y_pred)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "table": self.table, "num_classes": self.num_classes}


@keras.saving.register_keras_serializable(package="sparkdl")
class ClassAccuracy(keras.metrics.Mean):  # type: ignore[misc]
    """The share of rows whose own class is the nearest of a :class:`ShardedClassifier`'s.

    With ``sample`` below 1, in training: the nearest of those that the step took.

    Args:
        table: Name of the classifier's table.
        dtype: As of every Keras metric.
    """

    sums_over_workers = True  # as every mean; it can only be tried out beside its layer
    _direction = "up"  # for callbacks, as Keras' own accuracies have it

    def __init__(self, table: str, name: str = "accuracy", dtype: object = None) -> None:
        super().__init__(name=name, dtype=dtype)
        self.table = table

    def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> Any:
        """Takes the rows whose loss was computed last."""
        layer = _called.find(self.table)
        return super().update_state(after(lambda: layer.hits, y_pred), sample_weight)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "table": self.table}


class _Call:
    def __init__(self, layer: ShardedClassifier, training: bool) -> None:
        self._layer, self._training = layer, training
        self._number = -1

    def measure(self, features: FloatArray, labels: Ids, differentiated: bool) -> FloatArray:
        layer = self._layer
        assert layer.service is not None
        own = checked_labels(labels, len(features), layer.num_classes, layer.name)
        softmax, self._number = layer.service.measure(
            layer.table, layer.classes, features, own,
            training=layer.may_learn(self._training, differentiated),
        )  # fmt: skip
        layer.hits = softmax.hits
        return softmax.losses

    def learn(self, upstream: FloatArray) -> FloatArray:
        assert self._layer.service is not None
        return self._layer.service.learn(
            self._number, np.asarray(upstream, np.float32), trying=self._layer.trying
        )
